"""Optional C++ kernels for the CPU."""
