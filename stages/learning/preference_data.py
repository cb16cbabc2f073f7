"""Preference pairs as training examples: each text once, its pairs as indices.

An example is one question with some of its answers (token ids, each forwarded once) and the pairs (better, worse) among
them. 'pair' batching makes one example a pair; 'question' gathers all pairs of a question, so that each of its answers
is forwarded once and all its pairs train in one step (InstructGPT, section 3.5).
"""

from dataclasses import dataclass, field

import torch

from stages.learning.models import batched
from stages.text.template import answer_ids, prompt_ids


@dataclass
class Example:
    """One question's texts and its pairs (index of the better text, index of the worse)."""

    question: tuple
    texts: list[list[int]] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)


def examples(
    rows, tokenizer, *, max_length_tokens: int, by_question: bool, max_pairs: int
) -> tuple[list[Example], int]:
    """Rows of a pairs table to examples, in their order; and how many pairs were dropped as over-long."""
    made: list[Example] = []
    place: dict[tuple, dict[str, int]] = {}
    kept = dropped = 0
    prompt: tuple[tuple, list[int]] = ((), [])
    for row in rows:
        if kept == max_pairs:
            break
        key = (row["site"], row["qid"])
        if prompt[0] != key:
            prompt = (key, prompt_ids(tokenizer, row["question"]))
        texts = [prompt[1] + answer_ids(tokenizer, row[name]) for name in ("response_j", "response_k")]
        if max(map(len, texts)) > max_length_tokens:
            dropped += 1
            continue
        if not (by_question and made and made[-1].question == key):
            made.append(Example(key))
            place = {}
        indices = []
        for name, text in zip(("response_j", "response_k"), texts, strict=True):
            if row[name] not in place:
                place[row[name]] = len(made[-1].texts)
                made[-1].texts.append(text)
            indices.append(place[row[name]])
        made[-1].pairs.append((indices[0], indices[1]))
        kept += 1
    return made, dropped


def collate_examples(items: list[Example]) -> dict[str, torch.Tensor]:
    """Examples to a batch: texts [rows, T] right-padded, `better` and `worse` row indices [pairs]."""
    texts, better, worse = [], [], []
    for item in items:
        better += [len(texts) + j for j, _ in item.pairs]
        worse += [len(texts) + k for _, k in item.pairs]
        texts += item.texts
    input_ids, keep_mask = batched(texts)
    return {
        "input_ids": input_ids,
        "attention_mask": keep_mask,
        "better": torch.tensor(better),
        "worse": torch.tensor(worse),
    }
