"""A Stack Exchange dump to questions, Markdown, preference pairs and prompts. Never imports torch."""
