"""Run a stage from its command line: options from its signature and recipe, one line for a mistake."""
