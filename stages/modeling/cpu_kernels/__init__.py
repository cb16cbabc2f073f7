"""Compute with optional C++ kernels on the CPU."""
