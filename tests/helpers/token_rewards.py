"""Rewards of token ids, as functions that a recipe can name."""

HALF_VOCABULARY = 160  # of the tiny models


def low_ids(prompts: list[list[int]], responses: list[list[int]]) -> list[float]:
    """Compute the share of a response's ids that are in the first half of the vocabulary."""
    return [sum(token < HALF_VOCABULARY for token in response) / len(response) for response in responses]
