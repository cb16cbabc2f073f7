"""What the Snakefile calls: the recipe and the folder of a run, its seeds, and its lines on the terminal."""
