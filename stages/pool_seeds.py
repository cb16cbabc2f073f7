"""Pool seeds: one page on several runs of a recipe that differ by their seed, from their evaluations.

    python -m stages.pool_seeds --recipe results/demo/recipe.yaml \\
        --evaluate results/demo/seed-0/evaluate results/demo/seed-1/evaluate --out results/demo/seeds

Snakemake calls it where --config has `seeds`. Writes metrics.json (every number by seed, with intervals by question
within seeds and over seeds; the verdicts on reward hacking, their false alarms and misses) and report.html.
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

from pathlib import Path

from stages.artifacts.artifact import artifact_folder
from stages.evaluation.statistics import flatten_estimates
from stages.pooling.page import render_seeds_page
from stages.pooling.pool import pool_evaluations, read_evaluation
from stages.recipe.sections.evaluate import Evaluate
from stages.runtime.files import check_free_space, write_json

PAGE_BYTES = 8 << 20


def run(config: Evaluate, out: Path, *, evaluate: list[str]) -> dict[str, float]:
    """Fill `out` from finished evaluations, one a seed; ValueError if two have the same seed."""
    check_free_space("the page on all seeds", out, PAGE_BYTES)
    seeds = [read_evaluation(artifact_folder(folder)) for folder in evaluate]
    names = [seed.name for seed in seeds]
    if len(set(names)) < len(names):
        raise ValueError(f"--evaluate has two evaluations of one seed: {', '.join(names)}")
    metrics = pool_evaluations(seeds, samples=config.bootstrap_samples, seed=config.seed)
    (out / "report.html").write_text(render_seeds_page(metrics), encoding="utf-8")
    write_json(out / "metrics.json", metrics)
    return {"seeds": len(seeds), **_headline(metrics)}


def _headline(metrics: dict) -> dict[str, float]:
    """Return the gains over SFT with their intervals over seeds, for the manifest."""
    gains = {policy: pooled["gains"] for policy, pooled in metrics["policies"].items()}
    return flatten_estimates({f"{policy}_{score}_difference": row["over_seeds"]
                              for policy, scores in gains.items() for score, row in scores.items()})
