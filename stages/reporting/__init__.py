"""The report page and the model card."""
