"""Finished evaluations of many policies, with gains that follow Gao et al.'s forms, for the frontier."""

import json
from pathlib import Path

import numpy as np
import pandas as pd

from stages.artifacts.artifact import digest
from stages.generation.best_of_n import best_of_kl
from stages.kl_frontier.fits import evaluate_fit
from stages.runtime.files import hash_file
from tests.helpers import finished_run

BEST_OF = (2, 4, 8, 16, 32, 64)
KL = {"ppo-kl-0_03": 11.0, "ppo-kl-0_1": 4.2, "ppo-kl-0_3": 1.6, "ppo-kl-1": 0.35, "rloo": 3.9, "grpo": 5.0,
      "dpo-beta-0_03": 9.0, "dpo-beta-0_1": 3.1, "dpo-beta-0_3": 1.0, "expert_iteration": 1.8, "ilql": 2.4}
GOLD = {"best_of_n": (1.6, 0.35), "ppo": (1.5, 0.75), "rloo": (1.5, 0.78), "grpo": (1.4, 0.7), "dpo": (1.0, 0.6),
        "expert_iteration": (1.1, 0.3), "ilql": (0.4, 0.2)}  # a, b
REWARD = {family: (1.6 * a, 0.4 * b) for family, (a, b) in GOLD.items()}


def family_of(policy: str) -> str:
    return "best_of_n" if policy.startswith("best_of_") else policy.split("-")[0]


def gain(parameters: dict, policy: str, kl: float) -> float:
    family = family_of(policy)
    form = "best_of_n" if family == "best_of_n" else "rl"
    return float(evaluate_fit(form, *parameters[family], np.array([kl ** 0.5]))[0])


def write_evaluation(folder: Path, *, questions: int = 200, seed: int = 0, truth: str | None = "gold",
                     noise: float = 0.8, models: dict[str, str] | None = None, site: str = "demo") -> Path:
    """Write an evaluation's folder; models: digests of the models by name."""
    generator = np.random.default_rng(seed)
    kls = {f"best_of_{n}": best_of_kl(n) for n in BEST_OF} | {
        name: kl * float(generator.normal(1, 0.03)) for name, kl in KL.items()}
    level = generator.normal(size=questions)
    tables = []
    for policy in ("sft", "base", *kls):
        kl = kls.get(policy, 0.0)
        own = {"reward": REWARD, **({truth: GOLD} if truth else {})}
        scores = {name: level + (gain(parameters, policy, kl) if policy in kls else 0)
                  + generator.normal(0, noise, questions) for name, parameters in own.items()}
        if not policy.startswith("best_of_"):
            spread = 0.0 if policy == "sft" else min(noise, 1.5)
            scores["kl_k1"] = kl + generator.normal(0, spread, questions)
        tables.append(pd.DataFrame({"policy": policy, "site": site, "qid": range(questions)} | scores))
    folder.mkdir(parents=True)
    pd.concat(tables).to_parquet(folder / "per_question.parquet")
    judged = finished_run.metrics(gold=0.3 if truth == "gold" else None)
    policies = judged["policies"] | dict.fromkeys(KL, judged["policies"]["ppo"]) | {
        name: judged["policies"]["best_of_2"] | {"kl_formula": kl} for name, kl in kls.items() if name not in KL}
    metrics = {"reward_model": judged["reward_model"], "policies": policies,
               "comparisons": dict.fromkeys(KL, judged["comparisons"]["ppo"]),
               "judge": {"accuracy": {"mean": 0.71}} if truth == "judge" else None,
               "attainable": {"samples": 64 + seed, "policies": {}, "curve": [
                   {"beta": 1 / kl, "kl": kl, "gain": 3.0 * kl ** 0.5 + seed} for kl in (0.01, 1.0, 4.0)]}}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    inputs = {name: {"path": name, "sha256": sha256} for name, sha256 in (models or {}).items()}
    write_manifest(folder, "evaluate", config={"seed": seed}, inputs={
        "policy": {name: source for name, source in inputs.items() if name in KL},
        **{name: source for name, source in inputs.items() if name not in KL}})
    return folder


def write_manifest(folder: Path, stage: str, seconds: float = 75.0, inputs: dict | None = None,
                   config: dict | None = None) -> str:
    """Write a manifest of the folder's files; return its digest, which differs by the folder's name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(folder.name)
    files = {file.name: {"bytes": file.stat().st_size, "sha256": hash_file(file)} for file in folder.iterdir()}
    (folder / "manifest.json").write_text(json.dumps(
        {"stage": stage, "config": config or {}, "inputs": inputs or {}, "metrics": {}, "seconds": seconds,
         "files": files}))
    return digest(folder)


def write_trainings(place: Path) -> tuple[list[Path], dict[str, str]]:
    """Write a training and a merge of each policy, and of SFT and the reward model; return folders and digests."""
    folders, models = [], {}
    for number, name in enumerate([*KL, "sft", "reward"], 1):
        trained, merged = place / name, place / f"{name}-merged"
        stage = name.split("-")[0]
        trained_digest = write_manifest(trained, stage, seconds=60.0 * number)
        models[name] = write_manifest(merged, "merge", inputs={
            "base": {"path": "sft", "sha256": "0"}, "adapter": [{"path": str(trained), "sha256": trained_digest}]})
        folders += [trained, merged]
    return folders, models
