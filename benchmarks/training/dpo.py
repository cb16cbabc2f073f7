"""Compare DPO with TRL's DPOTrainer on the same pairs: pairs per second and memory.

    python -m benchmarks.training.dpo --pairs results/demo/pairs --base results/demo/sft-merged --json dpo.json

Each contender runs in a separate process, in turns (A B A B), --rounds times, and trains once over the same pairs: the
first --steps x --batch rows of the reward split, without those with a text over --length tokens. A LoRA adapter on
PEFT's choice of layers, no dropout, fp32, sigmoid loss, beta 0.1. Without --base the model is a LLaMA of 6 layers and
width 256 with random weights. benchmarks/training/workload.py says what is measured; a check makes sure that all
read the same texts. Ratios are of medians: of CPU seconds with one thread. `foreign` is the number of cores that other
processes used. MB are 10^6 bytes, the peak of a process.

TRL computes the reference in each step, as shipped; ours computes it once, which is in its time, too. Computed tokens
are those of the policy. "tuned TRL" has the switch that our start-up sets on such a machine, fp32 products by oneDNN
(stages/modeling/torch_setup.py), with eager attention.
"""

import argparse
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import torch

from benchmarks.common.tables import Goal, Result
from benchmarks.data.stage_runs import say
from benchmarks.ppo.processes import OURS, RunSettings
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
)
from benchmarks.training.sft import write_model
from benchmarks.training.workload import PAIRS, Work
from stages.reward_modeling.dataset import build_examples
from stages.stackexchange.pairs.table import read_pairs

SPLIT = "reward"
FORM = "dpo"
AT_LEAST = 2.0
CONTENDERS = [build_contender(TRL, "trl", FORM), build_contender(OURS, "ours", FORM),
              build_contender(TUNED, "trl", FORM, **SWITCHES)]


def measure(args: argparse.Namespace, folder: Path, setting: RunSettings) -> tuple[list[Result], dict]:
    """Measure the speed."""
    torch.set_num_threads(setting.threads)
    work = Work(str(folder), args.batch, length=args.length, learning_rate=args.learning_rate, schedule="cosine",
                weight_decay=0.05, rank=args.rank, dropout=args.dropout, precision=args.precision,
                targets=tuple(args.targets))
    prepare(work, args)
    figures = compare(CONTENDERS, work, args, setting, lambda name: SPLIT) | {"work": vars(work)}
    rate = "a_cpu_second" if setting.basis == "cpu" else "a_second"
    figures |= {"ratio_to_trl": ratio(figures, OURS, TRL, rate),
                "ratio_to_tuned_trl": ratio(figures, OURS, TUNED, rate),
                "memory_ratio_to_trl": ratio(figures, OURS, TRL, "peak_mb")}
    speedup = figures["ratio_to_trl"]
    goals = [Goal("pairs a second, ours / TRL", speedup, at_least=AT_LEAST)] if speedup else []
    title = f"medians of {setting.rounds} passes over the same pairs"
    return [build_table(figures, title, "pairs", setting.basis, goals)], figures


def prepare(work: Work, args: argparse.Namespace) -> None:
    """Write the model, and the pairs as rows for ours and as token ids for TRL; SystemExit if there is none."""
    tokenizer = write_model(work, args)
    rows = list(islice(read_pairs(args.pairs, SPLIT), args.steps * args.batch))
    examples, dropped = build_examples(
        rows, tokenizer, max_length_tokens=work.length, by_question=False, max_pairs=len(rows))
    if not examples:
        raise SystemExit(f"{args.pairs} has no pair of {work.length} tokens or fewer in its {SPLIT} split")
    work.path(SPLIT).mkdir()
    parquet.write_table(pa.Table.from_pylist(rows), work.path(SPLIT) / "part-00000.parquet")
    ids = [{"prompt_ids": one.prompt, "chosen_ids": one.answers[0], "rejected_ids": one.answers[1]} for one in examples]
    parquet.write_table(pa.Table.from_pylist(ids), work.path(PAIRS))
    say(f"{len(examples)} pairs, {dropped} dropped as too long")


def main() -> None:
    """Compare the contenders, and print and write what was measured."""
    parser = build_parser(__doc__, steps=20, batch=8, learning_rate=1e-4, rank=8)
    parser.add_argument("--base", type=Path, metavar="FOLDER", help="the initial causal model (default: see above)")
    parser.set_defaults(split=SPLIT)
    run_program(parser, measure)


if __name__ == "__main__":
    main()
