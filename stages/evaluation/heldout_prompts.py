"""Held-out questions as prompts for policies, each with its best human answer if there is one."""

from collections.abc import Callable
from pathlib import Path

import torch

from stages.stackexchange.pairs.table import read_best_rows
from stages.stackexchange.prompt import Template, answer_ids, encode_prompt, prompt_ids
from stages.stackexchange.prompt_file import hold_out_prompts, read_own_prompts

MAX_SELECTION_SHARE = 0.25


class HeldOutPrompts:
    """A seeded choice of rows with a `question` each; ValueError when none is short enough.

    `selection_prompts` and `selection_questions` are further questions, on which temperatures are chosen: none of them
    is among the others, and they are at most MAX_SELECTION_SHARE of those that fit. `best_answers` is empty where
    nobody answered.
    """

    def __init__(self, rows: list[dict], encode: Callable[[str], list[int]], origin: str, *, prompts: int,
                 selection_prompts: int, max_prompt_tokens: int, max_response_tokens: int, longest: int, seed: int):
        limit = min(max_prompt_tokens, longest - max_response_tokens)
        fitting = [(row, ids) for row in rows if len(ids := encode(row["question"])) <= limit]
        if not fitting:
            raise ValueError(f"{origin} of at most {limit} tokens ({len(rows)} are longer)")
        order = torch.randperm(len(fitting), generator=torch.Generator().manual_seed(seed)).tolist()
        apart = len(fitting) - min(selection_prompts, int(MAX_SELECTION_SHARE * len(fitting)))
        chosen = [fitting[i] for i in sorted(order[:min(prompts, apart)])]
        selected = [fitting[i] for i in sorted(order[apart:])]  # from the end: the others are the same without them
        self.selection_prompts = [ids for _, ids in selected]
        self.selection_questions = [row["question"] for row, _ in selected]
        self.rows, self.prompts = [row for row, _ in chosen], [ids for _, ids in chosen]
        self.over_length = len(rows) - len(fitting)
        self.questions = [row["question"] for row in self.rows]
        self.best_answers: list[str] = []


class EvaluationPrompts(HeldOutPrompts):
    """A choice of a split's questions.

    longest: tokens that the models have positions for. A human answer beyond it has no ids, and so no reward.
    """

    def __init__(self, pairs: Path, split: str, tokenizer, *, longest: int, **sizes):
        super().__init__(read_best_rows(pairs, split), lambda text: prompt_ids(tokenizer, text),
                         f"{pairs} has no held-out question", longest=longest, **sizes)
        self.best_answers = [row["response_j"] for row in self.rows]
        answer_tokens = [answer_ids(tokenizer, text) for text in self.best_answers]
        self.best_answer_ids = [ids if len(prompt) + len(ids) <= longest else None
                                for prompt, ids in zip(self.prompts, answer_tokens, strict=True)]


class OwnEvaluationPrompts(HeldOutPrompts):
    """A choice of a user's own prompts: of those that training held out by the same `held_out` and `training_seed`.

    A row's qid is the place of its prompt in the file, from 1; its site is the file's name.
    """

    def __init__(self, path: Path, tokenizer, *, column: str | None, template: Template, held_out: int,
                 training_seed: int, **sizes):
        texts = read_own_prompts(path, column)
        _, evaluation = hold_out_prompts(texts, held_out, training_seed)
        if not evaluation:
            raise ValueError(f"{path} has {len(texts)} prompts, of which none is held out for the evaluation: add "
                             f"prompts, or set evaluation_prompts above 0, and train again")
        qids = {text: qid for qid, text in enumerate(texts, 1)}
        rows = [{"site": path.name, "qid": qids[text], "question": text, "metadata": [""], "authors": []}
                for text in evaluation]
        super().__init__(rows, lambda text: encode_prompt(tokenizer, text, template),
                         f"{path} has no held-out prompt", **sizes)
        self.file_prompts, self.held_out = len(texts), len(evaluation)
