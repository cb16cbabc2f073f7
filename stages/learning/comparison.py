"""Policies on the same prompts with the same random numbers: what each writes, and how likely each finds it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig

from stages.learning import models, output_layer
from stages.learning.loading import merged_reward
from stages.learning.ragged import response_tokens
from stages.learning.rollout import sample_in_batches
from stages.runtime.progress import Progress, track

FORWARD_TOKENS = 8192  # in one forward pass: bounds its memory
SCORED_AT_ONCE = 512


@dataclass(frozen=True)
class Answers:
    """One response to each prompt: token ids as sampled (with the EOS that ended them), texts, whether they ended.

    log_p, log_ref: log-probability of each token, in nats, under the policy that wrote it and under SFT, at the
    temperature it was drawn at: 1-D, one a response; None: not asked for.
    """

    responses: list[list[int]]
    texts: list[str]
    ended: list[bool]
    log_p: list[torch.Tensor] | None = None
    log_ref: list[torch.Tensor] | None = None


def shared_tokenizer(*folders):
    """The one tokenizer of several models; ValueError when they differ: ids of one would mean nothing to another."""
    first = models.load_tokenizer(folders[0])
    for folder in folders[1:]:
        if not same_tokenizer(folder, first):
            raise ValueError(f"{folder} has another tokenizer than {folders[0]}: they cannot be compared")
    return first


def same_tokenizer(folder: Path, tokenizer) -> bool:
    """Whether the model in `folder` knows the same ids by the same names."""
    return models.load_tokenizer(folder).get_vocab() == tokenizer.get_vocab()


def longest_text(*folders) -> int:
    """Tokens that every one of these models has positions for."""
    configs = map(AutoConfig.from_pretrained, folders)
    return min(getattr(config, "max_position_embeddings", None) or 2**31 for config in configs)


def answers_of(
    model,
    tokenizer,
    prompts: list[list[int]],
    *,
    batch_prompts: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    label: str,
) -> Answers:
    """Sample an answer to each prompt; two models asked alike meet the same random numbers."""
    progress = Progress(label, len(prompts), "answers")
    rollout = sample_in_batches(
        model,
        prompts,
        batch_prompts,
        seed,
        progress.advance,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        stop_ids=[tokenizer.eos_token_id],
    )
    progress.finish()
    return Answers(rollout.responses, rollout.texts(tokenizer), rollout.ended)


@torch.no_grad()
def log_probabilities(
    model, prompts: list[list[int]], responses: list[list[int]], temperature: float, label: str | None = None
) -> list[torch.Tensor]:
    """Log-probability, in nats, of each response token given what stands before it: 1-D fp32 on the CPU, one a row.

    label: of the progress shown; None: none is.
    """
    progress = Progress(label, len(prompts), "texts") if label else None
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    found: list = [None] * len(prompts)
    for chunk in models.chunks_by_length(lengths, max(1, FORWARD_TOKENS // max(lengths, default=1))):
        texts = response_tokens([prompts[i] for i in chunk], [responses[i] for i in chunk], model.device)
        hidden = models.ragged_states(model, texts.batch, texts.before)
        log_p = output_layer.log_probabilities(model.get_output_embeddings(), hidden, texts.chosen, temperature).cpu()
        for i, scores in zip(chunk, log_p.split([len(responses[i]) for i in chunk]), strict=True):
            found[i] = scores
        if progress:
            progress.advance(len(chunk))
    if progress:
        progress.finish()
    return found


def rewards_of(reward: Path, prompts: list[list], answers: list[list]) -> list[np.ndarray]:
    """Rewards of prompts with answers, by list; NaN for an answer of None. Each distinct text is scored once, in fp32.

    reward: a merged reward model.
    """
    scorer = merged_reward(reward, "fp32")
    texts = [[None if end is None else (tuple(start), tuple(end)) for start, end in zip(*both, strict=True)]
             for both in zip(prompts, answers, strict=True)]
    distinct = sorted({text for part in texts for text in part if text is not None},
                      key=lambda text: (sum(map(len, text)), text))
    known: dict = {None: float("nan")}
    starts = range(0, len(distinct), SCORED_AT_ONCE)
    for start in track(starts, "evaluate: rewards", len(starts), f"x {SCORED_AT_ONCE} texts"):
        chunk = distinct[start:start + SCORED_AT_ONCE]
        known |= zip(chunk, scorer(*zip(*chunk, strict=True)).tolist(), strict=True)
    return [np.array([known[text] for text in part]) for part in texts]
