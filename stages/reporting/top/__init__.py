"""The top of the report: what a reader sees first."""
