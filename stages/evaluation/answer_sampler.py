"""Sample the answers of all policies, with one model in memory at a time.

First every policy at the sampling temperature, and at every candidate temperature on the questions that temperatures
are chosen on; then, when they are chosen, each policy at its best one.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from stages.evaluation.heldout_prompts import EvaluationPrompts
from stages.evaluation.pair_accuracy import HeldOutPairs, mean_logprobs
from stages.evaluation.policy_answers import Answers, sample_answers
from stages.evaluation.policy_comparison import SAMPLES, repeat_each
from stages.evaluation.summary import BEST, GREEDY
from stages.modeling.load import load_causal
from stages.modeling.packed import token_logprobs


class AnswerSampler:
    """Sample answers of models given as folders; all policies with the same random numbers.

    temperature: of all policies. temperatures: candidates for each policy's best. best_of: samples of SFT a prompt;
    0: none.
    """

    def __init__(self, tokenizer, prompts: EvaluationPrompts, *, batch_prompts: int, max_new_tokens: int,
                 temperature: float, temperatures: Sequence[float], best_of: int, seed: int, cpu_kernels: str):
        self.prompts, self.temperature, self.temperatures = prompts, temperature, temperatures
        self.best_of, self.seed, self.cpu_kernels = best_of, seed, cpu_kernels
        self._sample = partial(sample_answers, tokenizer=tokenizer, batch_prompts=batch_prompts,
                               max_new_tokens=max_new_tokens)

    def sample_policies(self, folders: dict[str, Path], held_out: HeldOutPairs
                        ) -> tuple[dict[str, Answers], dict[str, dict[float, Answers]], np.ndarray]:
        """Sample at the sampling temperature, with log-probabilities, and SFT also greedily.

        folders: SFT's last, for it computes the log-probabilities of the others' answers.

        Returns: the answers by policy; the answers to the selection's questions by policy (base left out) and
            candidate temperature; SFT's mean log-probability of each held-out text [M].
        """
        answers, swept = {}, {}
        for name, folder in folders.items():
            model = None  # one at a time in memory
            model = self._load(folder)
            sampled = self._answer(model, name, self.temperature)
            answers[name] = replace(sampled, logprobs=self._logprobs(model, sampled, name))
            if name != "base" and self.prompts.selection_prompts:
                swept[name] = self._sweep(model, name)
        if self.best_of:
            answers[SAMPLES] = self._answer_often(model, self.temperature, share_prefixes=False)
        for name, sampled in answers.items():
            under_sft = sampled.logprobs if name == "sft" else self._logprobs(model, sampled, "sft")
            answers[name] = replace(sampled, sft_logprobs=under_sft)
        answers[GREEDY] = self._answer(model, GREEDY, 0.0)
        return answers, swept, mean_logprobs(held_out, model, "evaluate: SFT on pairs")

    def sample_at_best(self, folders: dict[str, Path], answers: dict[str, Answers], temperatures: dict[str, float]
                       ) -> dict[str, Answers]:
        """Sample each policy at its best temperature, as NAME_best, without log-probabilities.

        folders: SFT and the trained policies. answers: those sampled so far, which are used again where the
        temperature is theirs. temperatures: by name, that of SFT's repeated samples among them.
        """
        at_best = {}
        for name, folder in folders.items():
            wanted = [name, *([SAMPLES] if name == "sft" and self.best_of else [])]
            again = {each: self._sampled_before(each, temperatures[each], answers) for each in wanted}
            model = None
            model = None if all(again.values()) else self._load(folder)
            for each, before in again.items():
                at_best[f"{each}{BEST}"] = before or (
                    self._answer_often(model, temperatures[each], share_prefixes=True) if each == SAMPLES
                    else self._answer(model, f"{name} at best", temperatures[each]))
        return at_best

    def _sampled_before(self, name: str, temperature: float, answers: dict[str, Answers]) -> Answers | None:
        source = name if temperature == self.temperature else GREEDY if (name, temperature) == ("sft", 0) else None
        return replace(answers[source], logprobs=None, sft_logprobs=None) if source else None

    def _load(self, folder: Path):
        return load_causal(folder, cpu_kernels=self.cpu_kernels)

    def _answer(self, model, name: str, temperature: float) -> Answers:
        return self._sample(model, prompts=self.prompts.prompts, temperature=temperature, seed=self.seed,
                            label=f"evaluate: {name} answers")

    def _answer_often(self, model, temperature: float, share_prefixes: bool) -> Answers:
        """Sample several answers of SFT: with other random numbers than its own answers, which they are compared to.

        share_prefixes: pays where the temperature is low, and many samples of a prompt begin alike.
        """
        prompts = repeat_each(self.prompts.prompts, self.best_of * len(self.prompts.prompts))
        return self._sample(model, prompts=prompts, temperature=temperature, seed=self.seed + 1,
                            label=f"evaluate: {self.best_of} of SFT at temperature {temperature:g}",
                            share_prefixes=share_prefixes)

    def _sweep(self, model, name: str) -> dict[float, Answers]:
        return {temperature: self._sample(
            model, prompts=self.prompts.selection_prompts, temperature=temperature, seed=self.seed,
            label=f"evaluate: {name} at temperature {temperature:g}") for temperature in self.temperatures}

    def _logprobs(self, model, answers: Answers, name: str) -> list:
        prompts = repeat_each(self.prompts.prompts, len(answers.responses))
        return token_logprobs.response_logprobs(
            model, prompts, answers.responses, self.temperature, f"evaluate: KL, {name}")
