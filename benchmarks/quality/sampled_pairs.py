"""Fit a reward head with and without sampled answers, and measure what it ranks right on other questions.

    python -m benchmarks.quality.sampled_pairs --run results/seven --counts 0 25 50 100 200

The head of the run's recipe (reward.tune: head) is fitted to the reward split with samples to so many of its questions,
and once with answers to other questions as worse answers instead (Singhal et al. 2023, arXiv 2310.03716). Measured on
the rl split, the judge's: pairs of human answers, and the best human answer against a sample cut alike, greedy or at
temperature 1, and against the best answer to another question.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from stages import judge, reward
from stages.evaluation.statistics import bootstrap_mean, pair_wins
from stages.evaluation.summary import format_estimate
from stages.modeling import torch_setup
from stages.modeling.tokenizer import load_tokenizer
from stages.recipe.recipe import load_recipe
from stages.reward_modeling.dataset import Example, pair_indices
from stages.reward_modeling.head_fit import compute_features, fit_weights
from stages.reward_modeling.sampled_pairs import TEMPERATURES, best_answer
from stages.stackexchange.pairs.table import space_evenly

OTHER = "other question"


def pair_with_others(items: list[Example]) -> list[Example]:
    """Pair the best answer of each question with that of the question in the middle of the rest."""
    best = [best_answer(item) for item in items]
    return [Example(item.question, item.prompt, [best[i], best[(i + len(items) // 2) % len(items)]], [(0, 1)], [1])
            for i, item in enumerate(items)]


def compute_differences(model, kinds: dict[str, list[Example]], precision: str, label: str
                        ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Compute features of the better minus the worse answer of each pair [N, K], and the numbers of questions [N]."""
    differences = {}
    for kind, items in kinds.items():
        columns = compute_features(model, items, precision, False, f"{label}: {kind}")
        better, worse = pair_indices(items)
        differences[kind] = (columns[better] - columns[worse],
                             np.repeat(np.arange(len(items)), [len(item.pairs) for item in items]))
    return differences


def list_kinds(data: reward.RewardData, questions: int) -> dict[str, list[Example]]:
    """List the examples of each kind of pair; of at most so many questions the pairs of human answers."""
    sampled = {f"temperature {temperature:g}": items for temperature, items in data.sampled.items()}
    others = pair_with_others(data.training[:len(data.sampled[0.0])])
    return {"human": space_evenly(data.training, questions), **sampled, OTHER: others}


def format_row(name: str, weights: np.ndarray, measured: dict[str, tuple[np.ndarray, np.ndarray]]) -> str:
    """Format the accuracy on each kind of pair, with its interval by question."""
    words = [f"length {weights[-1]:.2f}"]
    for kind, (differences, groups) in measured.items():
        scores = differences @ weights
        wins = pair_wins(scores, np.zeros_like(scores))
        words.append(f"{kind} {format_estimate(bootstrap_mean(wins, groups, samples=2000, seed=0))}")
    return f"{name:16s} " + "  ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="results/NAME, with sft-merged, pairs and recipe.yaml")
    parser.add_argument("--counts", type=int, nargs="+", default=[0, 25, 50, 100, 200])
    parser.add_argument("--questions", type=int, default=500, help="of each split, whose human pairs are read")
    options = parser.parse_args()
    torch_setup.prepare()
    base, tokenizer = options.run / "sft-merged", load_tokenizer(options.run / "sft-merged")
    config = replace(load_recipe(options.run / "recipe.yaml").reward, validation_share=0.0,
                     sampled_questions=max(options.counts))
    model = reward.load_untrained(config, base).eval()
    differences = {split: compute_differences(model, list_kinds(
        reward.load_data(config, tokenizer, base, options.run / "pairs", split), options.questions),
        config.precision, split) for split in (reward.SPLIT, judge.SPLIT)}
    fitted, measured = differences[reward.SPLIT], differences[judge.SPLIT]
    sampled = [fitted[f"temperature {temperature:g}"][0] for temperature in TEMPERATURES]
    further = {f"{count} questions": [rows[space_evenly(range(len(rows)), count)] for rows in sampled]
               for count in options.counts} | {OTHER: [fitted[OTHER][0]]}
    for name, rows in further.items():
        weights = fit_weights(np.concatenate([fitted["human"][0], *rows]), config.head_penalty, free=1)
        print(format_row(name, weights, measured), flush=True)


if __name__ == "__main__":
    main()
