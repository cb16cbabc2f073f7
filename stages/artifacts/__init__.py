"""Artifacts: folders with a manifest, what they come from, and whether they are up to date."""
