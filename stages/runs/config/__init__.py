"""What --config takes beside sections and their settings."""
