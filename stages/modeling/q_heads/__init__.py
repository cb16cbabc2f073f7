"""Q heads beside a causal model: their files, and the output layer that they shift."""
