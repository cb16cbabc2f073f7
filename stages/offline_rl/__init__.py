"""Offline reinforcement learning from scored answers: ILQL."""
