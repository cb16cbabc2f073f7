"""Two policies on the same prompts with the same random numbers: what each writes, and what one gained over the other.

Shapes: N prompts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoConfig

from stages.learning import models, output_layer, text_measures
from stages.learning.kl import kl_k1, kl_k3
from stages.learning.ragged import response_tokens
from stages.learning.rollout import sample_in_batches
from stages.learning.statistics import wins
from stages.plumbing.progress import Progress

FORWARD_TOKENS = 8192  # in one forward pass: bounds its memory


@dataclass(frozen=True)
class Answers:
    """One response to each prompt: token ids as sampled (with the EOS that ended them), texts, whether they ended."""

    responses: list[list[int]]
    texts: list[str]
    ended: list[bool]


def shared_tokenizer(*folders):
    """The one tokenizer of several models; ValueError when they differ: ids of one would mean nothing to another."""
    first, *others = [models.load_tokenizer(folder) for folder in folders]
    for folder, other in zip(folders[1:], others, strict=True):
        if other.get_vocab() != first.get_vocab():
            raise ValueError(f"{folder} has another tokenizer than {folders[0]}: they cannot be compared")
    return first


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


def policy_numbers(answers: Answers, rewards: np.ndarray, estimate: Callable) -> dict:
    """One policy's answers in numbers; `rewards` [N] as the reward model gives them, whether or not an answer ended."""
    count = len(answers.responses)
    return {
        "reward": estimate(rewards, np.arange(count)),
        "response_tokens": sum(map(len, answers.responses)) / count,
        "eos_rate": sum(answers.ended) / count,
        "repetition": sum(map(text_measures.repetition, answers.responses)) / count,
        "distinct_2": text_measures.distinct(answers.responses),
        "distinct_responses": len(set(answers.texts)) / count,
        "code_share": sum(map(text_measures.has_code, answers.texts)) / count,
    }


def gain(
    rewards: np.ndarray,
    reference_rewards: np.ndarray,
    log_p: list[torch.Tensor],
    log_ref: list[torch.Tensor],
    estimate: Callable,
) -> dict:
    """What a policy gained over its reference on the same prompts [N], and the KL it paid, in nats a response.

    log_p, log_ref: of the policy's own responses, under the policy and under the reference. kl_k1 is unbiased and
    may be negative by chance; kl_k3 is unbiased and never negative.
    """
    alone = np.arange(len(rewards))  # every prompt is a question of its own
    rows = list(zip(log_p, log_ref, strict=True))
    return {
        "reward_difference": estimate(rewards - reference_rewards, alone),
        "win_rate": estimate(wins(rewards, reference_rewards), alone),
        "kl_k1": estimate(np.array([float(kl_k1(p, ref).sum()) for p, ref in rows]), alone),
        "kl_k3": estimate(np.array([float(kl_k3(p, ref).sum()) for p, ref in rows]), alone),
    }


def gold_gain(sft: dict, ppo: dict, human: dict, estimate: Callable) -> dict | None:
    """Each gold number's means and the paired difference PPO minus SFT, where it applies; None where nothing does.

    sft, ppo, human: name to numbers [N], NaN where the gold scorer knows nothing of the question.
    """
    found = {}
    for name in sft:
        numbers = [np.array(side[name], float) for side in (sft, ppo, human)]
        applies = ~np.isnan(numbers[0]) & ~np.isnan(numbers[1])
        if applies.any():
            means = dict(zip(("sft", "ppo", "human"), (_mean(values[applies]) for values in numbers), strict=True))
            found[name] = means | {"difference": estimate(numbers[1] - numbers[0], np.arange(len(applies)))}
    return found or None


def _mean(values: np.ndarray) -> float | None:
    return None if np.isnan(values).all() else float(np.nanmean(values))
