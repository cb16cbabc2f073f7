"""Reward functions and the shaping of their sum into one reward a response."""
