"""Sample several responses to a prompt and take the best: best-of-n, and expert iteration."""
