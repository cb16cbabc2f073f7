"""Compare reward training with TRL's RewardTrainer: pairs per second, memory, and accuracy after an epoch.

    python -m benchmarks.training.reward --pairs results/demo/pairs --base results/demo/base --json reward.json
    python -m benchmarks.training.reward --pairs results/demo/pairs --base results/demo/base --accuracy
    python -m benchmarks.training.reward --pairs results/demo/pairs --shape smollm2 --precision bf16

Our trainer runs by question (each answer is computed once, and each question once for all its answers) and pair by
pair. Each contender runs in a separate process, in turns (A B A B), --rounds times, and trains once over the same
pairs: the first --steps x --batch of the reward split. All start from the same weights, head included, with a LoRA
adapter on PEFT's choice of layers (--targets), in --precision (see sft.py), and no dropout (TRL's RewardTrainer turns
it off; --dropout gives it to ours). Pairs with a text over --length tokens are dropped for all.
benchmarks/training/workload.py says what is measured, and floor.py what the share of the rate is; a check makes sure
that all read the same texts. Ratios are of medians: of CPU seconds with one thread, which other processes hardly
disturb. `foreign` is the number of cores that other processes used. MB are 10^6 bytes, the peak of a process.

"TRL" is as shipped; "tuned TRL" has the switch that our start-up sets on such a machine, fp32 products by oneDNN
(stages/modeling/torch_setup.py), with eager attention.

--accuracy trains an epoch of each on the pairs (--train-pairs at most) of all questions but a share --held-out, and
ranks the pairs of those. The goal: the 95 % interval of the paired difference, questions resampled, contains 0. A step
has --batch pairs, or --questions questions; the table has the number of steps.
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
from benchmarks.ppo.processes import OURS, RunSettings, run_once
from benchmarks.training.floor import add_shares, smollm2_goals
from benchmarks.training.processes import (
    SWITCHES,
    TRL,
    TUNED,
    build_contender,
    build_parser,
    build_table,
    compare,
    ratio,
    run_program,
    select_contenders,
    summarise_runs,
)
from benchmarks.training.sft import write_model
from benchmarks.training.workload import MODEL, PAIRS, Work
from stages.evaluation.pair_accuracy import HeldOutPairs, draw_held_out_pairs
from stages.evaluation.statistics import bootstrap_mean
from stages.modeling.tokenizer import load_tokenizer
from stages.reward_modeling.dataset import build_examples
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.reward_model import initialise_head
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import Scoring
from stages.stackexchange.pairs.table import first_question_keys, question_key, read_first_rows, read_pairs

SPLIT = "reward"
BY_PAIR = f"{OURS}, pair by pair"
AT_LEAST = 2.5
INTERVAL = partial(bootstrap_mean, samples=2000, seed=0)
CONTENDERS = [
    build_contender(TRL, "trl", "pair"), build_contender(OURS, "ours", "question"),
    build_contender(BY_PAIR, "ours", "pair"), build_contender(TUNED, "trl", "pair", **SWITCHES)]


def measure(args: argparse.Namespace, folder: Path, setting: RunSettings) -> tuple[list[Result], dict]:
    """Measure the speed, and with --accuracy the accuracy after a whole epoch."""
    torch.set_num_threads(setting.threads)
    held_out = first_question_keys(args.pairs, SPLIT, args.held_out, 10 ** 9)
    work = Work(str(folder / "timed"), args.batch, args.questions, args.length, args.learning_rate,
                args.question_learning_rate or args.learning_rate, rank=args.rank,
                dropout=args.dropout, precision=args.precision, targets=tuple(args.targets))
    if not args.base:
        initial = Work(str(folder / "base"))
        write_model(initial, args)
        args.base = initial.path(MODEL)
    prepare(work, args.base, args.pairs, held_out, args.batch * args.steps)
    figures = compare(CONTENDERS, work, args, setting, lambda name: SPLIT)
    add_shares(figures, work, setting, logits=False)
    rate = "a_cpu_second" if setting.basis == "cpu" else "a_second"
    figures |= {"work": vars(work),
              "ratio_to_trl": ratio(figures, OURS, TRL, rate), "ratio_to_tuned_trl": ratio(figures, OURS, TUNED, rate),
              "pair_by_pair_ratio_to_trl": ratio(figures, BY_PAIR, TRL, rate),
              "memory_ratio_to_trl": ratio(figures, OURS, TRL, "peak_mb")}
    speedup = figures["ratio_to_trl"]
    goals = [Goal("pairs a second, ours / TRL", speedup, at_least=AT_LEAST)] if speedup else []
    goals += smollm2_goals(figures, args.shape, OURS)
    title = f"medians of {setting.rounds} passes over the same pairs"
    tables = [build_table(figures, title, "pairs", setting.basis, goals)]
    if args.accuracy:
        epoch = replace(work, folder=str(folder / "epoch"))
        result, figures["accuracy"] = compare_accuracy(args, epoch, held_out, setting)
        tables.append(result)
    return tables, figures


def prepare(work: Work, base: Path, pairs: Path, held_out: set[tuple], most: int) -> None:
    """Write the initial classifier, the first pairs of questions not held out, and their token ids for TRL.

    Raises SystemExit if there is no such pair.
    """
    tokenizer = load_tokenizer(base)
    scorer = load_classifier(base, new_head=True)
    initialise_head(scorer, torch.Generator().manual_seed(work.seed))
    scorer.save_pretrained(work.path(MODEL))
    tokenizer.save_pretrained(work.path(MODEL))
    rows = [row for row in read_pairs(pairs, SPLIT) if question_key(row) not in held_out]
    by_pair, dropped = build_examples(rows, tokenizer, max_length_tokens=work.length, by_question=False, max_pairs=most)
    if not by_pair:
        raise SystemExit(f"{pairs} has no pair of {work.length} tokens or fewer in its {SPLIT} split")
    work.path(SPLIT).mkdir()
    parquet.write_table(pa.Table.from_pylist(rows[:len(by_pair) + dropped]), work.path(SPLIT) / "part-00000.parquet")
    ids = [{"chosen_ids": one.prompt + one.answers[0], "rejected_ids": one.prompt + one.answers[1]} for one in by_pair]
    parquet.write_table(pa.Table.from_pylist(ids), work.path(PAIRS))
    say(f"{len(by_pair)} pairs of {len({one.question for one in by_pair})} questions, {dropped} dropped as too long")


def compare_accuracy(
    args: argparse.Namespace, work: Work, held_out: set[tuple], setting: RunSettings
) -> tuple[Result, dict]:
    """Estimate the accuracy on held-out pairs after one epoch on the others, and its paired difference to TRL's."""
    prepare(work, args.base, args.pairs, held_out, args.train_pairs)
    rows = read_first_rows(args.pairs, SPLIT, held_out)
    tokenizer = load_tokenizer(args.base)
    pairs = draw_held_out_pairs(rows, tokenizer, max_pairs=10 ** 9, max_tokens=work.length, seed=0)
    right, passes = {"untrained": pairs.score_wins(score_texts(work, pairs, None))}, {}
    for one in select_contenders(CONTENDERS[:3], args):
        adapter = Path(work.folder) / one.name
        run = run_once(replace(one, arguments=(*one.arguments, "--adapter", str(adapter))), work, setting)
        right[one.name], passes[one.name] = pairs.score_wins(score_texts(work, pairs, adapter)), summarise_runs([run])
        say(f"{one.name}: {np.mean(right[one.name]):.3f} after {passes[one.name]['cpu']:.0f} CPU s")
    figures = {name: INTERVAL(values, pairs.groups) for name, values in right.items()}
    differences = {f"{name} - {TRL}": INTERVAL(right[name] - right[TRL], pairs.groups)
                   for name in (OURS, BY_PAIR) if {name, TRL} <= set(right)}
    goals = [goal for name, one in differences.items() for goal in
             (Goal(f"{name}, low end", one["low"], at_most=0.0), Goal(f"{name}, high end", one["high"], at_least=0.0))]
    table = [[name, one["mean"], one["low"], one["high"], passes[name]["steps"] if name in passes else "-",
              passes[name]["a_cpu_second"] if name in passes else "-"] for name, one in (figures | differences).items()]
    title = (f"held-out accuracy on {len(pairs.rows)} pairs of {len(set(pairs.groups.tolist()))} questions after one "
             f"epoch, 95 % intervals by question")
    columns = ["contender", "accuracy", "low", "high", "steps", "pairs a cpu second"]
    return Result(title, columns, table, goals), {"found": figures, "differences": differences, "passes": passes}


def score_texts(work: Work, pairs: HeldOutPairs, adapter: Path | None) -> np.ndarray:
    """Score the texts with the initial model, or with an adapter and its head on it."""
    model = load_classifier(work.path(MODEL))
    if adapter:
        model = PeftModel.from_pretrained(model, adapter).eval()
    return Scorer(model, "fp32", Scoring())(pairs.prompts, pairs.answers).numpy()


def main() -> None:
    parser = build_parser(__doc__, steps=40, batch=4, learning_rate=2e-5, rank=8)
    parser.add_argument("--base", type=Path, metavar="FOLDER",
                        help="the causal model to start from (default: a random one of --shape, as in sft)")
    parser.set_defaults(split=SPLIT)
    parser.add_argument("--questions", type=int, default=4, metavar="N", help="per step of our training by question")
    parser.add_argument("--question-learning-rate", type=float, metavar="X",
                      help="of our training by question; default: --learning-rate")
    parser.add_argument("--held-out", type=float, default=0.2, metavar="SHARE", help="of the questions, for --accuracy")
    parser.add_argument("--train-pairs", type=int, default=100_000, metavar="N", help="in that epoch, at most")
    parser.add_argument("--accuracy", action="store_true", help="train whole epochs and compare accuracies")
    run_program(parser, measure)


if __name__ == "__main__":
    main()
