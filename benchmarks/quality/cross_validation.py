"""The reward model by cross-validation: every question's pairs ranked by a model that was trained on other questions.

    python -m benchmarks.quality.cross_validation --recipe configs/sites.yaml --base results/sites/sft-merged \\
        --pairs results/sites/pairs --out /tmp/folds --json folds.json

One held-out fifth of a few small sites is too little to tell a gain of two points from none. Here each of FOLDS
parts of all questions is held out in turn, and stages.reward trains on the others as the recipe says (one member, its
last state). Folds that are in --out already are not made again; --fold makes some of them, for several processes.

The base is the same for all folds: of the texts, not the votes, it may have seen those of the questions held out.
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
from stages.recipe.reward import Reward
from stages.reward_modeling.load import load_scorer
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import apply_scoring
from stages.stackexchange.pairs.table import SPLITS, group_numbers, key_of, rows_of

FOLDS = 5
SCORES = "scores.parquet"


def split(pairs: Path, fold: int, out: Path) -> None:
    """All pairs of an artifact as another one: `evaluation` has every FOLDS-th question, `reward` the others."""
    table = pa.concat_tables(dataset.dataset(pairs / name, format="parquet").to_table() for name in SPLITS)
    keys = zip(table["site"].to_pylist(), table["qid"].to_pylist(), strict=True)
    here = group_numbers(keys) % FOLDS == fold
    for name, rows in (("reward", ~here), ("evaluation", here)):
        (out / name).mkdir(parents=True, exist_ok=True)
        parquet.write_table(table.filter(pa.array(rows)), out / name / "part-00000.parquet")


def scored(config: Reward, base: Path, pairs: Path, out: Path) -> pa.Table:
    """Train on the `reward` split and rank `evaluation`: a row a pair, with both scores and both lengths."""
    reward.run(config, out, base=base, pairs=pairs)
    model = load_scorer(base, config.precision, new_head=True)
    apply_scoring(out, model)
    scorer = Scorer(load_adapter(model, out), config.precision)
    held = draw_held_out_pairs(rows_of(pairs, "evaluation"), tokenizer.load_tokenizer(base), max_pairs=10**9,
                          max_tokens=config.max_length_tokens, seed=0)
    scores = scorer(held.prompts, held.answers).numpy()
    lengths = np.array([len(answer) for _, answer in held.texts])
    sites, questions = zip(*map(key_of, held.rows), strict=True)
    return pa.table({"site": sites, "qid": questions,
                     **{f"{what}_{side}": values[places] for what, values in (("score", scores), ("length", lengths))
                        for side, places in (("better", held.better), ("worse", held.worse))}})


def judged(table: pa.Table) -> dict:
    """Accuracy, its difference from "the longer answer wins", and accuracy at about equal length; by question."""
    column = {name: table[name].to_numpy() for name in table.column_names if name.startswith(("score", "length"))}
    groups = group_numbers(zip(table["site"].to_pylist(), table["qid"].to_pylist(), strict=True))
    right = pair_wins(column["score_better"], column["score_worse"])
    one, other = column["length_better"], column["length_worse"]
    equal = np.abs(one - other) < EQUAL_LENGTH * np.maximum(np.maximum(one, other), 1)
    values = {"accuracy": right, "minus the longer answer": right - pair_wins(one, other),
              "accuracy at equal length": np.where(equal, right, np.nan)}
    found = {name: bootstrap_mean(each, groups, samples=4000, seed=0) for name, each in values.items()}
    return {name: number for name, number in found.items() if number is not None}


def lines(found: dict[str, dict]) -> Iterator[str]:
    """A table for people."""
    for part, numbers in found.items():
        for name, number in numbers.items():
            yield (f"{part:10} {name:26} {number['mean']: .3f} [{number['low']: .3f}, {number['high']: .3f}] "
                   f"({number['count']} pairs of {number['groups']} questions)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("recipe", "base", "pairs", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--fold", type=int, nargs="*", default=list(range(FOLDS)), choices=range(FOLDS))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    config = replace(recipe.load_recipe(asked.recipe).reward, members=1, validation_share=0.0)
    for fold in asked.fold:
        folder = asked.out / f"fold-{fold}"
        if not (folder / SCORES).exists():
            split(asked.pairs, fold, folder / "pairs")
            (folder / "reward").mkdir(exist_ok=True)
            table = scored(config, asked.base, folder / "pairs", folder / "reward")
            parquet.write_table(table, folder / SCORES)
    made = {f"fold {fold}": parquet.read_table(asked.out / f"fold-{fold}" / SCORES) for fold in asked.fold}
    found = {part: judged(table) for part, table in {**made, "together": pa.concat_tables(made.values())}.items()}
    print("\n".join(lines(found)))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
