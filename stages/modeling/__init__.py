"""Load, quantise, adapt and merge models; forward passes on packed sequences."""
