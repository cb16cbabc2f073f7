"""Preference pairs as training examples: each answer once, its pairs as indices.

An example is one question with some of its answers (token ids, each forwarded once) and the pairs (better, worse) among
them. 'pair' batching makes one example a pair; 'question' gathers all pairs of a question, so that each of its answers
is forwarded once and all its pairs train in one step (InstructGPT, section 3.5).
"""

from dataclasses import dataclass, field

import torch

from stages.learning.reward_model import Scorer, text_batch
from stages.text.template import answer_ids, prompt_ids


@dataclass
class Example:
    """One question, answers to it, and pairs of them (index of the better, index of the worse)."""

    question: tuple  # site, question id
    prompt: list[int]
    answers: list[list[int]] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)  # answer's text to its index

    def add_pair(self, texts: tuple[str, str], answers: list[list[int]]) -> None:
        """A better and a worse answer; one that stands here already is not added again."""
        for text, answer in zip(texts, answers, strict=True):
            if text not in self.places:
                self.places[text] = len(self.answers)
                self.answers.append(answer)
        self.pairs.append((self.places[texts[0]], self.places[texts[1]]))


def examples(
    rows, tokenizer, *, max_length_tokens: int, by_question: bool, max_pairs: int
) -> tuple[list[Example], int]:
    """Rows of a pairs table to examples, in their order; and how many pairs were dropped as over-long."""
    made: list[Example] = []
    kept = dropped = 0
    for row in rows:
        if kept == max_pairs:
            break
        key, texts = (row["site"], row["qid"]), (row["response_j"], row["response_k"])
        same = bool(made) and made[-1].question == key
        prompt = made[-1].prompt if same else prompt_ids(tokenizer, row["question"])
        answers = [answer_ids(tokenizer, text) for text in texts]
        if len(prompt) + max(map(len, answers)) > max_length_tokens:
            dropped += 1
            continue
        if not (by_question and same):
            made.append(Example(key, prompt))
        made[-1].add_pair(texts, answers)
        kept += 1
    return made, dropped


def collate_examples(items: list[Example]) -> dict[str, torch.Tensor]:
    """Examples to a batch: texts [rows, T], `better` and `worse` row indices [pairs]."""
    prompts, answers, better, worse = [], [], [], []
    for item in items:
        better += [len(answers) + j for j, _ in item.pairs]
        worse += [len(answers) + k for _, k in item.pairs]
        prompts += [item.prompt] * len(item.answers)
        answers += item.answers
    return text_batch(prompts, answers) | {"better": torch.tensor(better), "worse": torch.tensor(worse)}


def accuracy(scorer: Scorer, items: list[Example]) -> float:
    """Share of pairs whose better text scores higher; ties count one half."""
    scores = scorer([item.prompt for item in items for _ in item.answers], [a for item in items for a in item.answers])
    split = scores.split([len(item.answers) for item in items])
    gaps = torch.cat([s[j : j + 1] - s[k] for item, s in zip(items, split, strict=True) for j, k in item.pairs])
    return float((gaps > 0).float().mean() + 0.5 * (gaps == 0).float().mean())
