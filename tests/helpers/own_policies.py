"""Policies as if trained on prompts of one's own: tiny models of random weights with the manifests of a training."""

import json
from pathlib import Path

from stages.artifacts.artifact import digest
from stages.recipe.schema import result_settings
from stages.recipe.sections.models import Base, Merge
from stages.recipe.sections.ppo import Ppo
from tests.helpers import tiny_models

FACTS = {"seconds": 75.0, "peak_memory_mib": 1234, "device": "cpu (x)", "threads": 1, "python": "3.11.7",
         "versions": {"torch": "2.13.0"}, "commit": None, "files": {}}


def write_manifest(folder: Path, stage: str, settings: object, inputs: dict, **metrics: float) -> Path:
    """Write the manifest of a stage whose inputs are folders or files, lists of them, or folders by name."""
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(FACTS | {
        "stage": stage, "config": result_settings(settings), "metrics": metrics,
        "inputs": {name: identify(source) for name, source in inputs.items()}}))
    return folder


def identify(source: Path | list | dict) -> dict | list:
    if isinstance(source, list):
        return [identify(each) for each in source]
    if isinstance(source, dict):
        return {name: identify(each) for name, each in source.items()}
    return {"path": str(source), "sha256": digest(source)}


def save_trained(place: Path, prompts: Path, settings: Ppo, names: tuple[str, ...] = ("ppo",)) -> dict:
    """Save a base, and policies of other weights that were 'trained' from it; return the inputs of evaluate."""
    base = write_manifest(tiny_models.save_base(place / "base"), "base", Base(model="hub/base"), {})
    merged = {}
    for seed, name in enumerate(names, 1):
        trained = write_manifest(place / name, "ppo", settings, {"policy": base, "prompts": prompts},
                                 prompts=12, iterations=2, best_iteration=1)
        (trained / "history.jsonl").write_text(
            '{"iteration": 1, "reward": 0.5, "kl": 0.1, "validation_reward_scale": 2.0}\n')
        merged[name] = write_manifest(
            tiny_models.save_base(place / f"{name}-merged", seed), "merge", Merge(),
            {"base": base, "adapter": [trained], "prompts": prompts})
        (merged[name] / "README.md").write_text("---\nlibrary_name: transformers\n---\n\n# A model\n")
    return {"base": base, "policy": merged, "file": prompts}
