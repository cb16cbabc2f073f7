"""Find what policies were trained on: the reward, the form of the prompts, and which of them were held out.

Score answers by that reward, and by each of its functions apart.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from stages.artifacts.artifact import digest, read_manifest
from stages.artifacts.lineage import find_input
from stages.modeling.adapters import is_adapter
from stages.reward_modeling.load import load_reward_models
from stages.reward_modeling.scorer import Scorer
from stages.rewards.checked_models import reward_artifact
from stages.rewards.reward_functions import load_reward_functions
from stages.rewards.shaping import RewardSum
from stages.runtime.progress import track

TRAIN_AGAIN = "train it again: snakemake --cores all {} --forcerun {}_train, or delete its folder"


@dataclass(frozen=True)
class PolicyTraining:
    """Settings of the section that policies were trained with, named as there; reward: the folder that 'model' names.

    rewards: entries of the section's `rewards`, as plain values.
    """

    rewards: list[dict]
    reward_combine: str
    spread_penalty: float
    prompt_column: str | None
    prompt_template: str
    evaluation_prompts: int
    seed: int
    stop_ids: list[int] | None
    reward: str | None


def read_training(policies: dict[str, Path], base: Path, prompts: Path) -> PolicyTraining:
    """Read what merged policies were trained on; ValueError, in one line, unless all were trained on the same.

    base: that they started from. prompts: the file that they were trained on.
    """
    trainings = {name: _read_one(name, folder, base, prompts) for name, folder in policies.items()}
    first, *others = trainings
    for name in others:
        if trainings[name] != trainings[first]:
            raise ValueError(f"--policy {name} and --policy {first} were trained on other rewards, seeds or prompts: "
                             f"evaluate them apart")
    return trainings[first]


def _read_one(name: str, merged: Path, base: Path, prompts: Path) -> PolicyTraining:
    where, manifest = f"--policy {name}={merged}", read_manifest(merged)
    if manifest["stage"] != "merge":
        raise ValueError(f"{where}: was made by {manifest['stage']}: give the folder that merge made of it")
    source = manifest["inputs"]["adapter"][-1]
    folder = find_input(merged, source["path"])
    if digest(folder) != source["sha256"]:
        raise ValueError(f"{where}: {folder}, the policy that was merged, has changed since: merge it again")
    trained = read_manifest(folder)
    config, inputs = trained["config"], trained["inputs"]
    if "prompts" not in inputs:
        raise ValueError(f"{where}: was not trained on prompts of your own: leave out --file, and give --posts, "
                         f"--pairs, --sft and --reward")
    if "evaluation_prompts" not in config:
        stage = trained["stage"]
        raise ValueError(f"{where}: was trained by an older version on all prompts, so that none is left to evaluate "
                         f"it on: {TRAIN_AGAIN.format(stage, stage)}")
    for label, given, recorded in (("file", prompts, inputs["prompts"]), ("base", base, inputs["policy"])):
        if digest(given) != recorded["sha256"]:
            raise ValueError(f"{where}: was not trained from --{label} {given} as it is now, but from "
                             f"{recorded['path']} as it was then: give that one, or train it again")
    settings = {field: config[field] for field in PolicyTraining.__dataclass_fields__ if field != "reward"}
    reward = inputs.get("reward")
    return PolicyTraining(**settings, reward=str(find_input(folder, reward["path"])) if reward else None)


class TrainedReward:
    """The weighted sum of the functions in `rewards`, as training computes it before baseline, scale, clip, penalties
    and KL.

    Each distinct answer to a prompt is scored once: who gives the same answer has the same score, also by a function
    that is random. Functions are called with at most `batch_texts` answers.
    """

    def __init__(self, training: PolicyTraining, tokenizer, *, precision: str, batch_texts: int,
                 cpu_kernels: str = "off"):
        self.batch_texts = batch_texts
        load_models = partial(_load_merged, reward=training.reward and Path(training.reward), precision=precision,
                              batch_rows=batch_texts, cpu_kernels=cpu_kernels)
        self._sum = RewardSum(
            [function for entry in training.rewards for function in load_reward_functions(
                **entry, precision=precision, pairs=None, load_models=load_models)],
            tokenizer, combine=training.reward_combine, spread_penalty=training.spread_penalty,
            template=training.prompt_template)
        self.weights = self._sum.weights  # of each part of the sum, by name
        self._scores: dict[tuple, np.ndarray] = {}

    def score(self, texts: dict[Hashable, tuple[list, list]]) -> dict[Hashable, np.ndarray]:
        """Compute rewards [N] by writer; texts: lists of prompts and of responses, as token ids, by writer."""
        return {writer: scores[0] for writer, scores in self._score_texts(texts).items()}

    def score_parts(self, texts: dict[Hashable, tuple[list, list]]) -> dict[Hashable, dict[str, np.ndarray]]:
        """Compute the unweighted scores [N] of each part, by writer; none where the reward is one function's own."""
        parts = [] if list(self.weights.values()) == [1.0] else self.weights
        return {writer: dict(zip(parts, scores[1:], strict=False))
                for writer, scores in self._score_texts(texts).items()}

    def _score_texts(self, texts: dict[Hashable, tuple[list, list]]) -> dict[Hashable, np.ndarray]:
        """Compute the rewards, and the scores of the P parts beside them, by writer: [1 + P, N]."""
        rows = {writer: [(tuple(start), tuple(end)) for start, end in zip(*both, strict=True)]
                for writer, both in texts.items()}
        new = list(dict.fromkeys(row for part in rows.values() for row in part if row not in self._scores))
        starts = range(0, len(new), self.batch_texts)
        for start in track(starts, "evaluate: rewards", len(starts), f"x {self.batch_texts} texts"):
            batch = new[start:start + self.batch_texts]
            total, parts = self._sum(*([list(row[side]) for row in batch] for side in (0, 1)))
            columns = torch.stack([total, *(parts[name] for name in self.weights)], 1)
            self._scores |= zip(batch, columns.double().numpy(), strict=True)
        width = 1 + len(self.weights)
        return {writer: np.array([self._scores[row] for row in own]).reshape(-1, width).T.copy()
                for writer, own in rows.items()}


def _load_merged(source: str, reward: Path | None, **options) -> list[Scorer]:
    """Load the models of a reward artifact that training named; ValueError for an adapter, which has no base here."""
    folder = reward_artifact(source, reward)
    if is_adapter(folder):
        raise ValueError(f"the policy was trained with the reward model {folder}, an adapter, which the evaluation "
                         f"cannot load: train with the merged one")
    return load_reward_models(folder, **options)
