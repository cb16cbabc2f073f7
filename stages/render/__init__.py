"""Format HTML, Markdown and terminal text, escaped. Standard library only."""
