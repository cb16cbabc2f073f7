"""Reward a response and its tokens: reward functions, shaping, and the KL penalty."""
