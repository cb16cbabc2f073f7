"""Held-out questions as prompts for policies, each with its best human answer."""

from pathlib import Path

import torch

from stages.stackexchange.pairs.table import read_best_rows
from stages.stackexchange.prompt import answer_ids, prompt_ids

MAX_SELECTION_SHARE = 0.25


class EvaluationPrompts:
    """A seeded choice of a split's questions; ValueError when none is short enough.

    `selection_prompts` and `selection_questions` are further questions, on which temperatures are chosen: none of them
    is among the others, and they are at most MAX_SELECTION_SHARE of those that fit.

    longest: tokens that the models have positions for. A human answer beyond it has no ids, and so no reward.
    """

    def __init__(self, pairs: Path, split: str, tokenizer, *, prompts: int, selection_prompts: int,
                 max_prompt_tokens: int, max_response_tokens: int, longest: int, seed: int):
        rows = read_best_rows(pairs, split)
        limit = min(max_prompt_tokens, longest - max_response_tokens)
        fitting = [(row, ids) for row in rows if len(ids := prompt_ids(tokenizer, row["question"])) <= limit]
        if not fitting:
            raise ValueError(f"{pairs} has no held-out question of at most {limit} tokens ({len(rows)} are longer)")
        order = torch.randperm(len(fitting), generator=torch.Generator().manual_seed(seed)).tolist()
        apart = len(fitting) - min(selection_prompts, int(MAX_SELECTION_SHARE * len(fitting)))
        chosen = [fitting[i] for i in sorted(order[:min(prompts, apart)])]
        selected = [fitting[i] for i in sorted(order[apart:])]  # from the end: the others are the same without them
        self.selection_prompts = [ids for _, ids in selected]
        self.selection_questions = [row["question"] for row, _ in selected]
        self.rows, self.prompts = [row for row, _ in chosen], [ids for _, ids in chosen]
        self.over_length = len(rows) - len(fitting)
        self.questions = [row["question"] for row in self.rows]
        self.best_answers = [row["response_j"] for row in self.rows]
        answer_tokens = [answer_ids(tokenizer, text) for text in self.best_answers]
        self.best_answer_ids = [ids if len(prompt) + len(ids) <= longest else None
                                for prompt, ids in zip(self.prompts, answer_tokens, strict=True)]
