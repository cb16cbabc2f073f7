"""Frontier: compare ways to align at equal KL, on one page.

    python -m stages.frontier --recipe configs/demo.yaml --evaluate results/demo/frontier/evaluate \\
        --trained results/demo/frontier/ppo-kl-0_1 results/demo/frontier/ppo-kl-0_1-merged \\
        --out results/demo/frontier/page

Give --evaluate one evaluation for each seed; all must have the same policies. Give --trained the folders of the
trainings and of their merges, in any order: they are matched to the evaluated policies by their digests, and tell what
each cost. Writes frontier.html (self-contained), metrics.json (every number), points.csv (each policy in each seed)
and figures/*.png. Loads no model.
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from stages.artifacts.artifact import artifact_folder, digest, read_manifest
from stages.artifacts.manifest import list_input_sources
from stages.evaluation.summary import BEST_OF_N, display_name, samples_per_answer
from stages.kl_frontier.analysis import BEST_OF_N_FAMILY, FrontierAnalysis, read_evaluations
from stages.kl_frontier.page import render_frontier
from stages.recipe.sections.evaluate import Frontier
from stages.recipe.variants import list_variants
from stages.reporting.figures import FigureFolder
from stages.runtime.files import write_json, write_text

SHARED = ("sft", "reward")  # trainings that several methods start from


def run(config: Frontier, out: Path, *, evaluate: list[str], trained: list[str]) -> dict[str, float]:
    """Fill `out` with the page and its numbers; evaluate: a folder a seed. ValueError if they have other policies."""
    folders = [artifact_folder(folder) for folder in evaluate]
    evaluations = read_evaluations(folders)
    policies, families = _describe_policies(config, list(evaluations.kl))
    frontier = FrontierAnalysis(evaluations, policies, families, samples=config.bootstrap_samples, seed=config.seed)
    metrics = frontier.compute()
    trainings = _find_trainings(map(artifact_folder, trained), folders)
    seconds = {name: [read_manifest(of_seed[name])["seconds"] if name in of_seed else None for of_seed in trainings]
               for name in (*policies, *SHARED)}
    metrics["costs"] = {kind: {name: cost for name in names if (cost := _average(seconds[name]))}
                        for kind, names in (("policies", policies), ("shared", SHARED))}
    figures = FigureFolder(out / "figures")
    page = render_frontier(metrics, figures)
    write_text(out / "frontier.html", page)
    write_json(out / "metrics.json", metrics)
    points = pd.concat(pd.DataFrame({"seed": evaluations.seeds, "policy": name, **frontier.seed_means(name),
                                     "family": policy["family"], "seconds": seconds[name]})
                       for name, policy in policies.items())
    write_text(out / "points.csv", points.sort_index(kind="stable").to_csv(index=False))
    return {"policies": len(policies), "questions": metrics["questions"], "seeds": len(folders),
            "page_bytes": len(page.encode()), "figures": figures.count}


def _describe_policies(config: Frontier, names: list[str]) -> tuple[dict[str, dict], dict[str, str]]:
    """Return family, label and mark of each policy, best-of-n first, and each family's label; mark: what differs in it.

    A policy that is no variant is a family of its own.
    """
    best_of_n = sorted((name for name in names if BEST_OF_N.fullmatch(name)), key=samples_per_answer)
    policies = {name: {"family": BEST_OF_N_FAMILY, "label": display_name(name), "mark": f"{samples_per_answer(name)}"}
                for name in best_of_n}
    families = {BEST_OF_N_FAMILY: "best-of-n"} if best_of_n else {}
    variants = {variant.name: (variant.section, variant.mark) for variant in list_variants(config)}
    for name in [*(name for name in variants if name in names), *names]:
        if name not in policies:
            family, mark = variants.get(name, (name, ""))
            label = families[family] = display_name(family).replace("_", " ")
            policies[name] = {"family": family, "label": f"{label} ({mark})" if mark else label, "mark": mark}
    return policies, families


def _find_trainings(folders: Iterable[Path], evaluations: Iterable[Path]) -> list[dict[str, Path]]:
    """Return the folder of each model's training, by policy and for 'sft' and 'reward', of each evaluation.

    Models are matched by digest, through a merge to its last adapter; one whose training is not given is absent.

    Args:
        folders: trainings and merges, in any order.
    """
    by_digest = {digest(folder): folder for folder in folders}

    def find(source: dict) -> Path | None:
        folder = by_digest.get(source.get("sha256"))
        manifest = read_manifest(folder) if folder else {}
        if manifest.get("stage") != "merge":
            return folder
        sources = list_input_sources(manifest["inputs"])
        return find([source for name, source in sources.items() if name.startswith("adapter")][-1])

    inputs = [list_input_sources(read_manifest(folder)["inputs"]) for folder in evaluations]
    return [{name.removeprefix("policy."): folder for name, source in sources.items() if (folder := find(source))}
            for sources in inputs]


def _average(seconds: list[float | None]) -> dict | None:
    known = [value for value in seconds if value]
    return {"mean": float(np.mean(known)), "by_seed": known} if known else None
