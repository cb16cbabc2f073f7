"""Sample responses with a key-value cache; best-of-n; metrics of the sampled text."""
