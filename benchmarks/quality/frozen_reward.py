"""Cross-validate a reward head on the frozen states of a base: by number of layers, penalty and number of pairs.

    python -m benchmarks.quality.frozen_reward --base data/models/smollm2-135m-instruct --pairs results/seven/pairs \\
        --layers 10 14 16 --penalties 1000 3000 --cache /tmp/frozen

What stages.reward fits with tune 'head', on all pairs of an artifact: each of FOLDS parts of the questions is held out
in turn. The states of a number of layers are computed once, and stay in --cache: further penalties take seconds.
"""

import argparse
from pathlib import Path

import numpy as np

from stages.evaluation.pair_accuracy import EQUAL_LENGTH
from stages.evaluation.statistics import bootstrap_mean, pair_wins
from stages.evaluation.summary import format_estimate
from stages.modeling import torch_setup
from stages.modeling.tokenizer import load_tokenizer
from stages.reward_modeling.dataset import Example, build_examples, pair_indices
from stages.reward_modeling.head_fit import compute_features, fit_weights
from stages.reward_modeling.load import load_classifier
from stages.stackexchange.pairs.table import SPLITS, read_pairs

FOLDS = 5
MAX_TOKENS = 2048  # of a question and an answer; longer ones are left out


def load_columns(base: Path, layers: int, items: list[Example], cache: Path) -> np.ndarray:
    """Compute the states and logarithms of the lengths of all answers [M, D + 1], or read them from the cache."""
    file = cache / f"states-{layers}.npy"
    if not file.exists():
        model = load_classifier(base, "bf16", new_head=True, cpu_kernels="auto", layers=layers)
        cache.mkdir(parents=True, exist_ok=True)
        np.save(file, compute_features(model, items, "bf16", False, f"{layers} layers"))
    return np.load(file)


def score_folds(differences: np.ndarray, folds: np.ndarray, penalty: float, used: np.ndarray) -> np.ndarray:
    """Score the differences [N, K] of every fold by weights fitted to the others, of those pairs that are used [N]."""
    scores = np.zeros(len(differences))
    for fold in range(FOLDS):
        held_out = folds == fold
        scores[held_out] = differences[held_out] @ fit_weights(differences[used & ~held_out], penalty, free=1)
    return scores


def format_row(name: str, scores: np.ndarray, lengths: tuple[np.ndarray, np.ndarray], groups: np.ndarray,
               gaps: np.ndarray) -> str:
    """Format accuracy, its gain over the longer answer, and the accuracy at equal length and at a gap of 2 or more."""
    right, longer = pair_wins(scores, np.zeros_like(scores)), pair_wins(*lengths)
    equal = np.abs(lengths[0] - lengths[1]) < EQUAL_LENGTH * np.maximum(*lengths)
    columns = {"accuracy": right, "minus longer": right - longer, "equal length": np.where(equal, right, np.nan),
               "gap 2 or more": np.where(gaps >= 2, right, np.nan)}
    words = []
    for label, values in columns.items():
        estimate = bootstrap_mean(values, groups, samples=4000, seed=0)
        if estimate is not None:
            words.append(f"{label} {format_estimate(estimate, signed=label.startswith('minus'))}")
    return f"{name:28s} " + "  ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--layers", type=int, nargs="+", default=[14])
    parser.add_argument("--penalties", type=float, nargs="+", default=[3000.0])
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0], help="of the training questions")
    options = parser.parse_args()
    torch_setup.prepare()
    rows = (row for split in SPLITS for row in read_pairs(options.pairs, split))
    tokenizer = load_tokenizer(options.base)
    items, _ = build_examples(rows, tokenizer, max_length_tokens=MAX_TOKENS, by_question=True, max_pairs=10**9)
    better, worse = pair_indices(items)
    groups = np.repeat(np.arange(len(items)), [len(item.pairs) for item in items])
    gaps = np.array([gap for item in items for gap in item.score_gaps])
    characters = np.array([len(text) for item in items for text in item.answer_index], float)
    lengths = characters[better], characters[worse]
    order = np.random.default_rng(0).permutation(len(items))
    folds, rank = (order % FOLDS)[groups], (order // FOLDS)[groups] * FOLDS / len(items)
    print(f"{len(gaps)} pairs of {len(items)} questions")
    print(format_row("longer answer", lengths[0] - lengths[1], lengths, groups, gaps))
    for layers in options.layers:
        columns = load_columns(options.base, layers, items, options.cache)
        differences = columns[better] - columns[worse]
        for penalty in options.penalties:
            for share in options.shares:
                scores = score_folds(differences, folds, penalty, rank < share)
                name = f"{layers} layers, {penalty:g}, {share:g}"
                print(format_row(name, scores, lengths, groups, gaps), flush=True)


if __name__ == "__main__":
    main()
