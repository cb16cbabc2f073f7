"""Packed (variable-length) sequences: batches, attention and token log-probabilities without padding."""
