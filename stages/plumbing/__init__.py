"""Artifact, command line, typed settings, progress. Standard library only."""
