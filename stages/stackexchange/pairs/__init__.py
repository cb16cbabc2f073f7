"""Draw preference pairs from questions, split by question."""
