"""Find what policies were trained on: the reward, the form of the prompts, and which prompts were held out."""

from dataclasses import dataclass
from pathlib import Path

from stages.artifacts.artifact import digest, read_manifest
from stages.artifacts.lineage import find_input

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
