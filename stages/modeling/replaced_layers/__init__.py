"""Replace modules of one model instance by equivalent ones that compute faster; Liger's kernels on a GPU."""
