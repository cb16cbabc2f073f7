"""Check before the first update: log-probabilities, memory, the reward model."""
