"""The questions of a split as prompts, each once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stages.stackexchange.pairs.table import read_best_rows
from stages.stackexchange.prompt import prompt_ids


@dataclass(frozen=True)
class Prompts:
    """Rows of the pairs table, one a question, and the token ids of their prompts; over_length: questions left out."""

    rows: list[dict]
    ids: list[list[int]]
    over_length: int = 0

    def select(self, indices: Sequence[int]) -> "Prompts":
        """Return the prompts at these indices, in this order."""
        return Prompts([self.rows[i] for i in indices], [self.ids[i] for i in indices], self.over_length)


def load_prompts(pairs: Path, split: str, tokenizer, max_prompt_tokens: int, seed: int) -> Prompts:
    """Load the questions of a split in a seeded order, without those that are too long; ValueError if none is left."""
    rows = read_best_rows(pairs, split)
    fitting = [(row, ids) for row in rows if len(ids := prompt_ids(tokenizer, row["question"])) <= max_prompt_tokens]
    if not fitting:
        raise ValueError(f"{pairs} has no prompt of at most {max_prompt_tokens} tokens in its {split} split "
                         f"({len(rows)} are longer): raise max_prompt_tokens")
    order = torch.randperm(len(fitting), generator=torch.Generator().manual_seed(seed)).tolist()
    return Prompts(*map(list, zip(*(fitting[i] for i in order), strict=True)), len(rows) - len(fitting))
