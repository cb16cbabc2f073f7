"""Judge any reward model, say which part of a failing pipeline is at fault, and export a model for other trainers."""
