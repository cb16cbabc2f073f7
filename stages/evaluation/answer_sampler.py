"""Sample the answers of all policies, with one model in memory at a time, and none for results that are stored.

First every policy at the sampling temperature, and at every candidate temperature on questions apart; then, when the
best temperature of each is chosen by the mean reward on these, each policy at its best one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from stages.evaluation.cached_results import CachedResults, digest_value, join_rows, split_rows
from stages.evaluation.heldout_prompts import HeldOutPrompts
from stages.evaluation.pair_accuracy import HeldOutPairs
from stages.evaluation.policy_answers import MAIN_KEY, Answers, LoadedModel, repeat_each, sample_answers, score_gold
from stages.evaluation.summary import BEST, SAMPLES, display_name
from stages.evaluation.tasks.wording import greedy_name
from stages.modeling.load import autocast, load_causal
from stages.modeling.packed import token_logprobs


class AnswerSampler:
    """Sample answers of models given as folders; all policies with the same random numbers.

    temperature: of all policies. temperatures: candidates for each policy's best. best_of: samples of SFT a prompt;
    0: none. cache: results of earlier evaluations. start: the model in SFT's place. stop_ids: that end an answer; None:
    the tokenizer's EOS.
    """

    def __init__(self, tokenizer, prompts: HeldOutPrompts, *, batch_prompts: int, max_new_tokens: int,
                 temperature: float, temperatures: Sequence[float], best_of: int, seed: int,
                 cpu_kernels: str = "off", precision: str = "fp32",
                 cache: CachedResults | None = None, start: str = "sft", stop_ids: Sequence[int] | None = None):
        self.tokenizer, self.prompts, self.precision = tokenizer, prompts, precision
        self.temperature, self.temperatures, self.best_of, self.seed = temperature, temperatures, best_of, seed
        self.start, self._greedy = start, greedy_name(start)
        self._sampling = {"batch_prompts": batch_prompts, "max_new_tokens": max_new_tokens, "precision": precision,
                          "stop_ids": [tokenizer.eos_token_id] if stop_ids is None else list(stop_ids)}
        self._model = LoadedModel(partial(load_causal, precision=precision, cpu_kernels=cpu_kernels))
        self._cache = cache or CachedResults()

    def sample_policies(self, folders: dict[str, Path], held_out: HeldOutPairs | None = None
                        ) -> tuple[dict[str, Answers], dict[str, dict[float, Answers]], np.ndarray | None]:
        """Sample at the sampling temperature, with log-probabilities, and SFT also greedily.

        folders: SFT's last, for it computes the log-probabilities of the others' answers.

        Returns: the answers by policy; the answers to the selection's questions by policy (base left out) and
            candidate temperature; SFT's mean log-probability of each held-out text [M], None without
            pairs.
        """
        answers, swept, sft = {}, {}, folders[self.start]
        for name, folder in folders.items():
            sampled = self._answer(folder, name, self.temperature)
            answers[name] = replace(sampled, logprobs=self._answer_logprobs(folder, sampled, name))
            if (name != "base" or self.start == name) and self.prompts.selection_prompts:
                swept[name] = {temperature: self._sample(
                    folder, self.prompts.selection_prompts, temperature, f"{name} at temperature {temperature:g}")
                    for temperature in self.temperatures}
        if self.best_of:
            answers[SAMPLES] = self._answer_often(sft, self.temperature)
        for name, sampled in answers.items():
            under_sft = sampled.logprobs if name == self.start else self._answer_logprobs(sft, sampled, self.start)
            answers[name] = replace(sampled, sft_logprobs=under_sft)
        answers[self._greedy] = self._answer(sft, self._greedy, 0.0)
        on_pairs = np.array([float(row.mean()) for row in self._logprobs(
            sft, held_out.prompts, held_out.answers, 1.0, "SFT on pairs")]) if held_out else None
        self._model.release()
        return answers, swept, on_pairs

    def sample_at_best(self, folders: dict[str, Path], answers: dict[str, Answers], temperatures: dict[str, float]
                       ) -> dict[str, Answers]:
        """Sample each policy at its best temperature, as NAME_best, without log-probabilities.

        folders: SFT and the trained policies. answers: those sampled so far, which are used again where the
        temperature is theirs. temperatures: by name, that of SFT's repeated samples among them.
        """
        at_best = {}
        for name, folder in folders.items():
            for each in [name, *([SAMPLES] if name == self.start and self.best_of else [])]:
                temperature = temperatures[each]
                source = self._greedy if (each, temperature) == (self.start, 0) else each
                if answers[source].temperature == temperature:
                    sampled = replace(answers[source], logprobs=None, sft_logprobs=None)
                elif each == SAMPLES:  # many samples of a prompt begin alike at a low temperature
                    sampled = self._answer_often(folder, temperature, share_prefixes=True)
                else:
                    sampled = self._answer(folder, f"{name} at best", temperature)
                at_best[f"{each}{BEST}"] = sampled
        self._model.release()
        return at_best

    def _answer(self, folder: Path, name: str, temperature: float) -> Answers:
        return self._sample(folder, self.prompts.prompts, temperature, f"{name} answers")

    def _answer_often(self, folder: Path, temperature: float, **options) -> Answers:
        """Sample several answers of SFT: with other random numbers than its own answers, which they are compared to."""
        prompts = repeat_each(self.prompts.prompts, self.best_of * len(self.prompts.prompts))
        label = f"{self.best_of} of {display_name(self.start)} at temperature {temperature:g}"
        return self._sample(folder, prompts, temperature, label, seed=self.seed + 1, **options)

    def _sample(self, folder: Path, prompts: list[list[int]], temperature: float, label: str, **options) -> Answers:
        """Sample with the model in `folder`, or take the answers of an earlier evaluation."""
        options = self._sampling | {"temperature": temperature, "seed": self.seed} | options

        def compute() -> dict[str, torch.Tensor]:
            sampled = sample_answers(self._model.get(folder), self.tokenizer, prompts, label=f"evaluate: {label}",
                                     **options)
            return join_rows(sampled.responses) | {"ended": torch.tensor(sampled.ended, dtype=torch.bool)}

        tensors = self._cache.compute("answers", folder, compute, prompts=digest_value(prompts), **options)
        responses = [row.tolist() for row in split_rows(tensors)]
        return Answers(responses, self.tokenizer.batch_decode(responses, skip_special_tokens=True),
                       tensors["ended"].tolist(), temperature=temperature)

    def _answer_logprobs(self, folder: Path, answers: Answers, name: str) -> list[torch.Tensor]:
        prompts = repeat_each(self.prompts.prompts, len(answers.responses))
        return self._logprobs(folder, prompts, answers.responses, self.temperature, f"KL, {name}")

    def _logprobs(self, folder: Path, prompts: list[list[int]], responses: list[list[int]], temperature: float,
                  label: str) -> list[torch.Tensor]:
        """Compute the log-probability of each token of the responses, or take those of an earlier evaluation."""
        def compute() -> dict[str, torch.Tensor]:
            with autocast(self.precision):
                return join_rows(token_logprobs.response_logprobs(
                    self._model.get(folder), prompts, responses, temperature, f"evaluate: {label}"))

        return split_rows(self._cache.compute(
            "log-probabilities", folder, compute, texts=digest_value([prompts, responses]), temperature=temperature,
            precision=self.precision))


def measure_temperatures(swept: dict[str, dict[float, Answers]], prompts: HeldOutPrompts, score: Callable,
                         gold_scorer: Callable | None, start: str) -> dict[str, list[dict]]:
    """List the mean reward of each policy at each temperature and, where it is known, the mean gold score.

    By falling temperature, on the selection's questions; the policy `start` comes first.

    score: (prompts, responses) by key to rewards [N] by key.
    """
    rows = {(name, at): answers for name, policy in swept.items() for at, answers in policy.items()}
    rewards = score({key: (prompts.selection_prompts, answers.responses) for key, answers in rows.items()})
    gold = {key: score_gold(gold_scorer, prompts.selection_questions, answers.texts)[MAIN_KEY]
            for key, answers in rows.items()} if gold_scorer else {}
    return {name: [{"temperature": at, "reward": float(np.mean(rewards[name, at])),
                    "gold": _mean_where_known(gold.get((name, at), ())),
                    "eos_rate": sum(rows[name, at].ended) / len(rows[name, at].ended)}
                   for at in sorted(swept[name], reverse=True)]
            for name in sorted(swept, key=lambda name: name != start)}


def choose_temperatures(curves: dict[str, list[dict]], policies: Iterable[str], candidates: Sequence[float],
                        default: float) -> dict[str, float]:
    """Choose each policy's temperature of the highest mean reward, the higher one of equals; default: without a curve.

    For SFT's repeated samples (SAMPLES) it is SFT's or, as greedy samples are all the same, the lowest above 0.

    curves: of measure_temperatures. policies: SFT or base first, and the trained ones. candidates: temperatures.
    """
    rows = {name: curves.get(name) or [{"temperature": default, "reward": 0.0}] for name in policies}
    best = {name: max(curve, key=lambda row: (row["reward"], row["temperature"]))["temperature"]
            for name, curve in rows.items()}
    return best | {SAMPLES: next(iter(best.values())) or min(filter(None, candidates), default=default)}


def _mean_where_known(values: Sequence[float]) -> float | None:
    known = [value for value in values if not np.isnan(value)]
    return sum(known) / len(known) if known else None
