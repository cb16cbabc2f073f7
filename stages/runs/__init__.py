"""Read and keep the artifacts of a run: its folder, what feeds what, what is out of date."""
