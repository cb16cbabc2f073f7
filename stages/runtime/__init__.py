"""Files, progress, signals and processes of a stage. Never imports torch."""
