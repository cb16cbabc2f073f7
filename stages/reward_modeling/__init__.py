"""Pairwise reward models: data set, loss, head, scoring, and how a folder says how to score."""
