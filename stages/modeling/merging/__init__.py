"""Merge adapters into the weights of their base, and check that the merged model computes the same."""
