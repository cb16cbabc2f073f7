"""Reward training beside TRL's RewardTrainer on the same pairs: pairs a second, memory, and accuracy after an epoch.

    python -m benchmarks.training.reward --pairs results/demo/pairs --base results/demo/base --json reward.json
    python -m benchmarks.training.reward --pairs results/demo/pairs --base results/demo/base --accuracy

Ours trains by question (each answer is computed once, and each question once for all of its answers) and, as a third,
pair by pair. Each contender runs in a process of its own, in turns (A B A B), --rounds times, and trains once over the
same pairs: the first --steps x --batch of the reward split. All start from the same weights, head included, with a LoRA
adapter on PEFT's choice of layers and no dropout (TRL's RewardTrainer turns it off); fp32; pairs with a text over
--length tokens are dropped for all alike. What is counted of a pass, and what is not, stands in
benchmarks/training/workload.py; that all have read the same texts is checked. Ratios are of medians: with one thread of CPU
seconds, which other processes hardly disturb; `foreign` is the number of cores that those had. MB are 10^6 bytes, the
most that a process held.

"TRL" is as shipped; "tuned TRL" has the switch set that our own start sets on such a machine, fp32 products by oneDNN
(stages/modeling/torch_setup.py), and eager attention, which goes with it.

--accuracy: an epoch of each over the pairs (--train-pairs at most) of all but --held-out of the questions; then each
ranks the pairs of those, scored by one code. The goal: the 95 % interval of the paired difference, questions resampled,
holds 0. Steps hold --batch pairs, or --questions questions: how many steps an epoch has is in the table.
"""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import torch
from peft import PeftModel

from benchmarks.common.tables import Goal, Result
from benchmarks.data.stage_runs import say
from benchmarks.ppo.processes import OURS, Setting, once
from benchmarks.training.processes import (
    SWITCHES,
    TRL,
    TUNED,
    asked_for,
    compare,
    contender,
    parser,
    program,
    ratio,
    summary,
    table_of,
)
from benchmarks.training.workload import MODEL, PAIRS, Work
from stages.evaluation.pair_accuracy import HeldOutPairs, draw_held_out_pairs
from stages.evaluation.statistics import bootstrap_mean
from stages.modeling.tokenizer import load_tokenizer
from stages.reward_modeling.dataset import examples
from stages.reward_modeling.load import load_scorer
from stages.reward_modeling.reward_model import initialise_head
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import Scoring
from stages.stackexchange.pairs.table import first_questions, first_rows, key_of, rows_of

SPLIT = "reward"
BY_PAIR = f"{OURS}, pair by pair"
AT_LEAST = 2.5
INTERVAL = partial(bootstrap_mean, samples=2000, seed=0)
CONTENDERS = [contender(TRL, "trl", "pair"), contender(OURS, "ours", "question"), contender(BY_PAIR, "ours", "pair"),
              contender(TUNED, "trl", "pair", **SWITCHES)]


def measure(given: argparse.Namespace, folder: Path, setting: Setting) -> tuple[list[Result], dict]:
    """Speed, and with --accuracy what a whole epoch comes to."""
    torch.set_num_threads(setting.threads)
    held = first_questions(given.pairs, SPLIT, given.held_out, 10 ** 9)
    work = Work(str(folder / "timed"), given.batch, given.questions, given.length, given.learning_rate,
                given.question_learning_rate or given.learning_rate, rank=given.rank)
    prepare(work, given.base, given.pairs, held, given.batch * given.steps)
    found = compare(CONTENDERS, work, given, setting, lambda name: SPLIT)
    rate = "a_cpu_second" if setting.basis == "cpu" else "a_second"
    found |= {"work": vars(work),
              "ratio_to_trl": ratio(found, OURS, TRL, rate), "ratio_to_tuned_trl": ratio(found, OURS, TUNED, rate),
              "pair_by_pair_ratio_to_trl": ratio(found, BY_PAIR, TRL, rate),
              "memory_ratio_to_trl": ratio(found, OURS, TRL, "peak_mb")}
    taken = found["ratio_to_trl"]
    goals = [Goal("pairs a second, ours / TRL", taken, at_least=AT_LEAST)] if taken else []
    shown = [table_of(found, f"medians of {setting.rounds} passes over the same pairs", "pairs", setting.basis, goals)]
    if given.accuracy:
        result, found["accuracy"] = accuracy(given, replace(work, folder=str(folder / "epoch")), held, setting)
        shown.append(result)
    return shown, found


def prepare(work: Work, base: Path, pairs: Path, held: set[tuple], most: int) -> None:
    """Fill the work's folder with the scorer that all start from, with the first pairs of questions not held out, and
    with their token ids for TRL. SystemExit when there are none."""
    tokenizer = load_tokenizer(base)
    scorer = load_scorer(base, new_head=True)
    initialise_head(scorer, torch.Generator().manual_seed(work.seed))
    scorer.save_pretrained(work.path(MODEL))
    tokenizer.save_pretrained(work.path(MODEL))
    rows = [row for row in rows_of(pairs, SPLIT) if key_of(row) not in held]
    by_pair, dropped = examples(rows, tokenizer, max_length_tokens=work.length, by_question=False, max_pairs=most)
    if not by_pair:
        raise SystemExit(f"{pairs} has no pair of {work.length} tokens or fewer in its {SPLIT} split")
    work.path(SPLIT).mkdir()
    parquet.write_table(pa.Table.from_pylist(rows[:len(by_pair) + dropped]), work.path(SPLIT) / "part-00000.parquet")
    ids = [{"chosen_ids": one.prompt + one.answers[0], "rejected_ids": one.prompt + one.answers[1]} for one in by_pair]
    parquet.write_table(pa.Table.from_pylist(ids), work.path(PAIRS))
    say(f"{len(by_pair)} pairs of {len({one.question for one in by_pair})} questions, {dropped} dropped as over-long")


def accuracy(given: argparse.Namespace, work: Work, held: set[tuple], setting: Setting) -> tuple[Result, dict]:
    """Share of the pairs held out that each ranks right after one epoch over all others, with its interval; and ours
    less TRL's, pair by pair."""
    prepare(work, given.base, given.pairs, held, given.train_pairs)
    rows = first_rows(given.pairs, SPLIT, held)
    tokenizer = load_tokenizer(given.base)
    pairs = draw_held_out_pairs(rows, tokenizer, max_pairs=10 ** 9, max_tokens=work.length, seed=0)
    right, passes = {"untrained": pairs.decided(scores(work, pairs, None))}, {}
    for one in asked_for(CONTENDERS[:3], given):
        adapter = Path(work.folder) / one.name
        run = once(replace(one, arguments=(*one.arguments, "--adapter", str(adapter))), work, setting)
        right[one.name], passes[one.name] = pairs.decided(scores(work, pairs, adapter)), summary([run])
        say(f"{one.name}: {np.mean(right[one.name]):.3f} after {passes[one.name]['cpu']:.0f} CPU s")
    found = {name: INTERVAL(values, pairs.groups) for name, values in right.items()}
    differences = {f"{name} - {TRL}": INTERVAL(right[name] - right[TRL], pairs.groups)
                   for name in (OURS, BY_PAIR) if {name, TRL} <= set(right)}
    goals = [goal for name, one in differences.items() for goal in
             (Goal(f"{name}, low end", one["low"], at_most=0.0), Goal(f"{name}, high end", one["high"], at_least=0.0))]
    table = [[name, one["mean"], one["low"], one["high"], passes[name]["steps"] if name in passes else "-",
              passes[name]["a_cpu_second"] if name in passes else "-"] for name, one in (found | differences).items()]
    title = (f"held-out accuracy on {len(pairs.rows)} pairs of {len(set(pairs.groups.tolist()))} questions after one "
             f"epoch, 95 % intervals by question")
    columns = ["contender", "accuracy", "low", "high", "steps", "pairs a cpu second"]
    return Result(title, columns, table, goals), {"found": found, "differences": differences, "passes": passes}


def scores(work: Work, pairs: HeldOutPairs, adapter: Path | None) -> np.ndarray:
    """Of the texts, by the model that all start from or by that with an adapter and its head."""
    model = load_scorer(work.path(MODEL))
    if adapter:
        model = PeftModel.from_pretrained(model, adapter).eval()
    return Scorer(model, "fp32", Scoring())(pairs.prompts, pairs.answers).numpy()


def main() -> None:
    made = parser(__doc__, steps=40, batch=4, learning_rate=2e-5, rank=8)
    made.add_argument("--base", type=Path, required=True, metavar="FOLDER", help="the causal model to start from")
    made.add_argument("--questions", type=int, default=4, metavar="N", help="a step of ours by question")
    made.add_argument("--question-learning-rate", type=float, metavar="X",
                      help="of ours by question, with other pairs in a step than TRL; without it, the same")
    made.add_argument("--held-out", type=float, default=0.2, metavar="SHARE", help="of the questions, never trained on")
    made.add_argument("--train-pairs", type=int, default=100_000, metavar="N", help="of --accuracy's epoch, at most")
    made.add_argument("--accuracy", action="store_true", help="train whole epochs and compare what was learnt")
    program(made, measure)


if __name__ == "__main__":
    main()
