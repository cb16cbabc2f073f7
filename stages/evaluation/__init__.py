"""Compare policies and reward models on held-out questions."""
