"""Sample the answers of all policies, with one model in memory at a time, and none for results that are stored.

First every policy at the sampling temperature, and at every candidate temperature on the questions that temperatures
are chosen on; then, when they are chosen, each policy at its best one.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from stages.evaluation.cached_results.files import digest_value
from stages.evaluation.cached_results.tensors import CachedResults, join_rows, split_rows
from stages.evaluation.heldout_prompts import HeldOutPrompts
from stages.evaluation.pair_accuracy import HeldOutPairs, mean_logprobs
from stages.evaluation.policy_answers import Answers, LoadedModel, repeat_each, sample_answers
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
        self._sampling = {"batch_prompts": batch_prompts, "max_new_tokens": max_new_tokens, "precision": precision}
        self._sampling |= {} if stop_ids is None else {"stop_ids": list(stop_ids)}
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
            answers[name] = replace(sampled, logprobs=self._logprobs(folder, sampled, name))
            if (name != "base" or self.start == name) and self.prompts.selection_prompts:
                swept[name] = self._sweep(folder, name)
        if self.best_of:
            answers[SAMPLES] = self._answer_often(sft, self.temperature, share_prefixes=False)
        for name, sampled in answers.items():
            under_sft = sampled.logprobs if name == self.start else self._logprobs(sft, sampled, self.start)
            answers[name] = replace(sampled, sft_logprobs=under_sft)
        answers[self._greedy] = self._answer(sft, self._greedy, 0.0)
        on_pairs = self._pair_logprobs(sft, held_out) if held_out else None
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
                at_best[f"{each}{BEST}"] = self._sampled_before(each, temperatures[each], answers) or (
                    self._answer_often(folder, temperatures[each], share_prefixes=True) if each == SAMPLES
                    else self._answer(folder, f"{name} at best", temperatures[each]))
        self._model.release()
        return at_best

    def _sampled_before(self, name: str, temperature: float, answers: dict[str, Answers]) -> Answers | None:
        is_greedy = (name, temperature) == (self.start, 0)
        source = name if temperature == self.temperature else self._greedy if is_greedy else None
        return replace(answers[source], logprobs=None, sft_logprobs=None) if source else None

    def _answer(self, folder: Path, name: str, temperature: float) -> Answers:
        return self._sample(folder, self.prompts.prompts, f"evaluate: {name} answers", temperature=temperature,
                            seed=self.seed)

    def _answer_often(self, folder: Path, temperature: float, share_prefixes: bool) -> Answers:
        """Sample several answers of SFT: with other random numbers than its own answers, which they are compared to.

        share_prefixes: pays where the temperature is low, and many samples of a prompt begin alike.
        """
        prompts = repeat_each(self.prompts.prompts, self.best_of * len(self.prompts.prompts))
        label = f"evaluate: {self.best_of} of {display_name(self.start)} at temperature {temperature:g}"
        return self._sample(folder, prompts, label, temperature=temperature, seed=self.seed + 1,
                            share_prefixes=share_prefixes)

    def _sweep(self, folder: Path, name: str) -> dict[float, Answers]:
        return {temperature: self._sample(
            folder, self.prompts.selection_prompts, f"evaluate: {name} at temperature {temperature:g}",
            temperature=temperature, seed=self.seed) for temperature in self.temperatures}

    def _sample(self, folder: Path, prompts: list[list[int]], label: str, **options) -> Answers:
        """Sample with the model in `folder`, or take the answers of an earlier evaluation."""
        options = self._sampling | options

        def compute() -> dict[str, torch.Tensor]:
            sampled = sample_answers(self._model.get(folder), self.tokenizer, prompts, label=label, **options)
            return join_rows(sampled.responses) | {"ended": torch.tensor(sampled.ended, dtype=torch.bool)}

        tensors = self._cache.compute("answers", folder, compute, prompts=digest_value(prompts),
                                      eos=self.tokenizer.eos_token_id, **options)
        responses = [row.tolist() for row in split_rows(tensors)]
        return Answers(responses, self.tokenizer.batch_decode(responses, skip_special_tokens=True),
                       tensors["ended"].tolist())

    def _logprobs(self, folder: Path, answers: Answers, name: str) -> list[torch.Tensor]:
        prompts = repeat_each(self.prompts.prompts, len(answers.responses))

        def compute() -> dict[str, torch.Tensor]:
            with autocast(self.precision):
                return join_rows(token_logprobs.response_logprobs(
                    self._model.get(folder), prompts, answers.responses, self.temperature, f"evaluate: KL, {name}"))

        return split_rows(self._cache.compute(
            "log-probabilities", folder, compute, texts=digest_value([prompts, answers.responses]),
            temperature=self.temperature, precision=self.precision))

    def _pair_logprobs(self, folder: Path, held_out: HeldOutPairs) -> np.ndarray:
        def compute() -> dict[str, torch.Tensor]:
            with autocast(self.precision):
                means = mean_logprobs(held_out, self._model.get(folder), "evaluate: SFT on pairs")
            return {"means": torch.from_numpy(means)}

        return self._cache.compute("mean log-probabilities", folder, compute, precision=self.precision,
                                   texts=digest_value([held_out.prompts, held_out.answers]))["means"].numpy()
