"""Policies that were trained on a user's own prompts and reward: what is evaluated otherwise than on a dump."""
