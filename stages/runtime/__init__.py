"""Artifacts, manifests, the command line, progress and worker processes. Never imports torch."""
