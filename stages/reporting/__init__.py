"""Render the report page and the model cards."""
