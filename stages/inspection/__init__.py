"""Read the contents of artifacts for the command line."""
