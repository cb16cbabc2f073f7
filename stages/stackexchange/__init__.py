"""Turn a Stack Exchange dump into questions, Markdown, preference pairs and prompts. Never imports torch."""
