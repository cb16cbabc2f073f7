"""Policies on the same prompts with the same random numbers: what each writes, and how likely each finds it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from stages.generation.sampler import sample_in_batches
from stages.reward_modeling.load import load_merged_reward
from stages.runtime.progress import Progress, track

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


def sample_answers(
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


def score_answers(reward: Path, prompts: list[list], answers: list[list]) -> list[np.ndarray]:
    """Rewards of prompts with answers, by list; NaN for an answer of None. Each distinct text is scored once, in fp32.

    reward: a merged reward model.
    """
    scorer = load_merged_reward(reward, "fp32")
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
