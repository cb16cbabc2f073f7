"""Dumps, Markdown, scores, pairs, the prompt template. No torch."""
