"""Cross-validate the reward model: rank every question's pairs by a model trained on other questions.

    python -m benchmarks.quality.cross_validation --recipe configs/sites.yaml --base results/sites/sft-merged \\
        --pairs results/sites/pairs --out /tmp/folds --json folds.json

One held-out fifth of a few small sites is too little to tell a gain of two points from none. Here each of FOLDS parts
of all questions is held out in turn, and stages.reward trains on the others as the recipe says (one member, its last
checkpoint). Folds that are in --out already are kept; --fold selects some of them, for several processes.

All folds share one base: it may have seen the texts of held-out questions, but not their votes.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as dataset
import pyarrow.parquet as parquet

from stages import reward
from stages.evaluation.pair_accuracy import EQUAL_LENGTH, draw_held_out_pairs
from stages.evaluation.statistics import bootstrap_mean, pair_wins
from stages.modeling import tokenizer
from stages.modeling.pretrained import load_adapter
from stages.recipe import recipe
from stages.recipe.sections.reward import Reward
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import apply_scoring
from stages.stackexchange.pairs.table import SPLITS, group_numbers, question_key, read_pairs

FOLDS = 5
SCORES = "scores.parquet"


def write_fold(pairs: Path, fold: int, out: Path) -> None:
    """Copy all pairs of an artifact: every FOLDS-th question to the split `evaluation`, the others to `reward`."""
    table = pa.concat_tables(dataset.dataset(pairs / name, format="parquet").to_table() for name in SPLITS)
    keys = zip(table["site"].to_pylist(), table["qid"].to_pylist(), strict=True)
    held_out = group_numbers(keys) % FOLDS == fold
    for name, rows in (("reward", ~held_out), ("evaluation", held_out)):
        (out / name).mkdir(parents=True, exist_ok=True)
        parquet.write_table(table.filter(pa.array(rows)), out / name / "part-00000.parquet")


def train_and_score(config: Reward, base: Path, pairs: Path, out: Path) -> pa.Table:
    """Train on the split `reward` and score `evaluation`: one row per pair, with both scores and both lengths."""
    reward.run(config, out, base=base, pairs=pairs)
    model = load_classifier(base, config.precision, new_head=True)
    apply_scoring(out, model)
    scorer = Scorer(load_adapter(model, out), config.precision)
    held_out = draw_held_out_pairs(read_pairs(pairs, "evaluation"), tokenizer.load_tokenizer(base), max_pairs=10**9,
                                   max_tokens=config.max_length_tokens, seed=0)
    scores = scorer(held_out.prompts, held_out.answers).numpy()
    lengths = np.array([len(answer) for _, answer in held_out.texts])
    sites, questions = zip(*map(question_key, held_out.rows), strict=True)
    return pa.table({"site": sites, "qid": questions,
                     **{f"{name}_{side}": values[index] for name, values in (("score", scores), ("length", lengths))
                        for side, index in (("better", held_out.better), ("worse", held_out.worse))}})


def estimate_accuracy(table: pa.Table) -> dict:
    """Estimate the accuracy, its gain over "the longer answer wins", and that at about equal length, by question."""
    column = {name: table[name].to_numpy() for name in table.column_names if name.startswith(("score", "length"))}
    groups = group_numbers(zip(table["site"].to_pylist(), table["qid"].to_pylist(), strict=True))
    right = pair_wins(column["score_better"], column["score_worse"])
    better, worse = column["length_better"], column["length_worse"]
    equal = np.abs(better - worse) < EQUAL_LENGTH * np.maximum(np.maximum(better, worse), 1)
    values = {"accuracy": right, "minus the longer answer": right - pair_wins(better, worse),
              "accuracy at equal length": np.where(equal, right, np.nan)}
    estimates = {name: bootstrap_mean(each, groups, samples=4000, seed=0) for name, each in values.items()}
    return {name: estimate for name, estimate in estimates.items() if estimate is not None}


def format_lines(results: dict[str, dict]) -> Iterator[str]:
    """Format the table that is printed."""
    for part, estimates in results.items():
        for name, estimate in estimates.items():
            yield (f"{part:10} {name:26} {estimate['mean']: .3f} [{estimate['low']: .3f}, {estimate['high']: .3f}] "
                   f"({estimate['count']} pairs of {estimate['groups']} questions)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("recipe", "base", "pairs", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--fold", type=int, nargs="*", default=list(range(FOLDS)), choices=range(FOLDS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = replace(recipe.load_recipe(arguments.recipe).reward, members=1, validation_share=0.0)
    for fold in arguments.fold:
        folder = arguments.out / f"fold-{fold}"
        if not (folder / SCORES).exists():
            write_fold(arguments.pairs, fold, folder / "pairs")
            (folder / "reward").mkdir(exist_ok=True)
            table = train_and_score(config, arguments.base, folder / "pairs", folder / "reward")
            parquet.write_table(table, folder / SCORES)
    tables = {f"fold {fold}": parquet.read_table(arguments.out / f"fold-{fold}" / SCORES) for fold in arguments.fold}
    tables["together"] = pa.concat_tables(list(tables.values()))
    results = {part: estimate_accuracy(table) for part, table in tables.items()}
    print("\n".join(format_lines(results)))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
