"""What torch leaves slow on a CPU, by kernels of our own: attention of short rows, and what lies between products."""
