"""Describe artifacts for the command-line viewer. Never imports torch."""
