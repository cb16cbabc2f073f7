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

from pathlib import Path

import numpy as np
import pandas as pd

from stages.evaluation.summary import BEST_OF_N, display_name, samples_per_answer
from stages.kl_frontier import analysis, costs, evaluations
from stages.kl_frontier.page import render_frontier
from stages.kl_frontier.pooling import Pool
from stages.recipe.sections.evaluate import Report
from stages.recipe.sections.frontier import Frontier
from stages.recipe.variants import list_variants
from stages.reporting.figures import FigureFolder
from stages.runtime.artifact import artifact_folder, read_manifest
from stages.runtime.files import write_json, write_text

SHARED = ("sft", "reward")  # trainings that several methods start from


def run(config: Frontier, out: Path, *, evaluate: list[str], trained: list[str]) -> dict[str, float]:
    """Fill `out` with the page and its numbers; evaluate: a folder a seed. ValueError if they have other policies."""
    folders = [artifact_folder(folder) for folder in evaluate]
    seeds = [evaluations.read_evaluation(folder, label)
             for folder, label in zip(folders, _name_seeds(folders), strict=True)]
    evaluations.check_same_policies(seeds)
    names = _name_policies(config, seeds[0].policies)
    pool = Pool([seed.questions for seed in seeds], samples=config.bootstrap_samples, seed=config.seed)
    frontier = analysis.FrontierAnalysis(seeds, names, pool)
    metrics = frontier.compute()
    trainings = costs.Trainings(map(artifact_folder, trained))
    models = [{name: trainings.find(sha256) for name, sha256 in costs.find_models(read_manifest(folder)).items()}
              for folder in folders]
    metrics["costs"] = {kind: _measure_costs(trainings, models, chosen) for kind, chosen in (
        ("policies", metrics["policies"]), ("shared", SHARED))}
    paths = {name: trainings.path_of_kl(sha256) for name in metrics["policies"] if (sha256 := models[0].get(name))}
    metrics["training_paths"] = {name: path for name, path in paths.items() if path}
    for name, policy in metrics["policies"].items():
        policy["samples_per_answer"] = samples_per_answer(name)
    figures = FigureFolder(out / "figures", Report().figure_width_inches)
    page = render_frontier(metrics, figures)
    write_text(out / "frontier.html", page)
    write_json(out / "metrics.json", metrics)
    _write_points(out / "points.csv", frontier, metrics, trainings, models)
    return {"policies": len(names), "questions": metrics["questions"], "seeds": len(seeds),
            "page_bytes": len(page.encode()), "figures": figures.count}


def _name_seeds(folders: list[Path]) -> list[str]:
    """Name each evaluation by the seed of its settings or, where these are the same, by its folder."""
    seeds = [str(read_manifest(folder)["config"].get("seed")) for folder in folders]
    return seeds if len(set(seeds)) == len(seeds) else [str(folder) for folder in folders]


def _name_policies(config: Frontier, policies: list[str]) -> list[analysis.PolicyName]:
    """Name the evaluated policies, best-of-n first; one that is no variant is a family of its own."""
    variants = {variant.name: variant for variant in list_variants(config)}
    best_of_n = sorted((name for name in policies if BEST_OF_N.fullmatch(name)), key=samples_per_answer)
    trained = [name for name in [*variants, *policies] if name in policies and name not in best_of_n]
    names = [analysis.PolicyName(name, analysis.BEST_OF_N, "best-of-n", display_name(name),
                                 f"{samples_per_answer(name)}") for name in best_of_n]
    for name in dict.fromkeys(trained):
        section, mark = (variants[name].section, variants[name].mark) if name in variants else (name, "")
        family = display_name(section).replace("_", " ")
        names.append(analysis.PolicyName(name, section, family, f"{family} ({mark})" if mark else family, mark))
    return names


def _measure_costs(trainings: costs.Trainings, models: list[dict[str, str | None]], names) -> dict[str, dict]:
    """Return the seconds of each training by model, of every seed and their mean; one that is not given is absent."""
    seconds = {name: [trainings.seconds(seed[name]) for seed in models if seed.get(name)] for name in names}
    return {name: {"mean": float(np.mean(values)), "by_seed": values} for name, values in seconds.items() if values}


def _write_points(path: Path, frontier: analysis.FrontierAnalysis, metrics: dict, trainings: costs.Trainings,
                  models: list[dict[str, str | None]]) -> None:
    """Write a row for each policy and seed: means minus SFT's, KL, and the seconds of training."""
    by_seed = dict(zip(metrics["seeds"], models, strict=True))
    rows = [row | {"family": metrics["policies"][row["policy"]]["family"], "seconds": trainings.seconds(sha256)
                   if (sha256 := by_seed[row["seed"]].get(row["policy"])) else None} for row in frontier.seed_rows()]
    table = pd.DataFrame(rows).rename(columns={name: f"{name}_minus_sft" for name in frontier.measures})
    write_text(path, table.to_csv(index=False))
