"""Plan a run before it starts, from the shapes of its models."""
