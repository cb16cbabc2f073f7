"""Prompts in a seeded order, split into those to train on and those that select the best policy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from stages.stackexchange.prompt import Template, encode_prompt

MIN_PROMPTS = 4  # at most a quarter is held out: a small site trains on most of its prompts


@dataclass(frozen=True)
class Prompts:
    """Rows with a `question` each, and the token ids of their prompts; over_length: rows left out as too long."""

    rows: list[dict]
    ids: list[list[int]]
    over_length: int = 0

    def select(self, indices: Sequence[int]) -> "Prompts":
        """Return the prompts at these indices, in this order."""
        return Prompts([self.rows[i] for i in indices], [self.ids[i] for i in indices], self.over_length)


def draw_prompts(
    rows: Iterable[dict], tokenizer, *, max_prompt_tokens: int, seed: int, template: Template = "question"
) -> Prompts:
    """Encode the question of each row, leave out the prompts that are too long, and shuffle the others."""
    encoded = [(row, encode_prompt(tokenizer, row["question"], template)) for row in rows]
    fitting = [(row, ids) for row, ids in encoded if len(ids) <= max_prompt_tokens]
    order = torch.randperm(len(fitting), generator=torch.Generator().manual_seed(seed)).tolist()
    return Prompts([fitting[i][0] for i in order], [fitting[i][1] for i in order], len(encoded) - len(fitting))


def split_prompts(
    prompts: Prompts, validation_prompts: int, *, max_prompt_tokens: int, origin: str, stage: str
) -> tuple[Prompts, Prompts]:
    """Split into training and validation prompts, at most a quarter of them.

    origin: where the prompts are from, for the ValueError that is raised if there are fewer than MIN_PROMPTS.
    """
    count = len(prompts.ids)
    if count < MIN_PROMPTS:
        raise ValueError(f"{origin} has {count} prompts of at most {max_prompt_tokens} tokens "
                         f"({prompts.over_length} are longer): {stage} needs at least {MIN_PROMPTS}")
    held_out = min(validation_prompts, count // MIN_PROMPTS)
    return prompts.select(range(held_out, count)), prompts.select(range(held_out))
