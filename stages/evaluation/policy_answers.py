"""Sample one answer of a policy to each prompt, and score answers with the reward model."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from stages.generation.sampler import sample_in_batches
from stages.reward_modeling.load import load_reward_models
from stages.reward_modeling.scorer import combine_scores
from stages.runtime.progress import Progress, track

SCORED_AT_ONCE = 512  # texts


@dataclass(frozen=True)
class Answers:
    """Responses to prompts: token ids as sampled (with the EOS that ended them), texts, and whether they ended.

    logprobs, sft_logprobs: log-probability of each token in nats, under the policy that sampled it and under SFT, at
    the sampling temperature; one 1-D tensor a response. None: not computed.
    """

    responses: list[list[int]]
    texts: list[str]
    ended: list[bool]
    logprobs: list[torch.Tensor] | None = None
    sft_logprobs: list[torch.Tensor] | None = None


def sample_answers(
    model, tokenizer, prompts: list[list[int]], *, batch_prompts: int, max_new_tokens: int, temperature: float,
    seed: int, label: str, share_prefixes: bool = False
) -> Answers:
    """Sample an answer to each prompt; two models with the same seed and prompts use the same random numbers.

    share_prefixes: for prompts that come several times (sampler.generate_stepwise).
    """
    progress = Progress(label, len(prompts), "answers")
    rollout = sample_in_batches(
        model, prompts, batch_prompts, seed, progress.advance, max_new_tokens=max_new_tokens, temperature=temperature,
        stop_ids=[tokenizer.eos_token_id], share_prefixes=share_prefixes)
    progress.finish()
    return Answers(rollout.responses, rollout.decode(tokenizer), rollout.ended)


def score_answers(
    reward: Path, prompts: list[list], answers: list[list], cpu_kernels: str = "off"
) -> list[np.ndarray]:
    """Score lists of prompts with lists of answers by a merged reward model in fp32: one array a list.

    An answer of None scores NaN. Each distinct text is scored once.
    """
    scorers = load_reward_models(reward, "fp32", cpu_kernels=cpu_kernels)
    texts = [[None if end is None else (tuple(start), tuple(end)) for start, end in zip(*both, strict=True)]
             for both in zip(prompts, answers, strict=True)]
    distinct = sorted({text for part in texts for text in part if text is not None},
                      key=lambda text: (sum(map(len, text)), text))
    rewards: dict = {None: float("nan")}
    starts = range(0, len(distinct), SCORED_AT_ONCE)
    for start in track(starts, "evaluate: rewards", len(starts), f"x {SCORED_AT_ONCE} texts"):
        chunk = distinct[start:start + SCORED_AT_ONCE]
        scores = combine_scores([scorer(*zip(*chunk, strict=True)) for scorer in scorers])
        rewards |= zip(chunk, scores.tolist(), strict=True)
    return [np.array([rewards[text] for text in part]) for part in texts]
