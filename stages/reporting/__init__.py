"""Render the report page."""
