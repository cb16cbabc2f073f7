"""Load, quantise, adapt and merge models."""
