"""Serve the demo page."""
