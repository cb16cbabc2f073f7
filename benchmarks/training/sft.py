"""Compare SFT with TRL's SFTTrainer on the same documents: label tokens per second and memory, for each packing.

    python -m benchmarks.training.sft --pairs results/demo/pairs --json sft.json
    python -m benchmarks.training.sft --pairs results/demo/pairs --base results/demo/base --precision mixed \\
        --packing wrapped
    python -m benchmarks.training.sft --pairs results/demo/pairs --shape smollm2 --precision bf16 --packing wrapped

Each contender runs in a separate process, in turns (A B A B), --rounds times, and trains once over the same documents,
questions with their better answers: as many as fill --steps x --batch blocks of --length tokens. LoRA on PEFT's choice
of layers (--targets), dropout 0.05. Without --base the model is a LLaMA of 6 layers, width 256 and a vocabulary of
4096, with random weights and a tokenizer trained on the documents; --shape smollm2 has the sizes of SmolLM2-135M.
benchmarks/training/workload.py says what is measured, and floor.py what the share of the rate is.

Tokens are those with a label: all but the first of a block ('wrapped') or document ('bfd'). With 'wrapped' all read the
same blocks, which is checked. With 'bfd' TRL truncates documents at --length, while our packing continues them in
another block. Ratios are of medians: of CPU seconds with one thread. `foreign` is the number of cores that other
processes used. MB are 10^6 bytes, the peak of a process.

--precision mixed is bf16 by autocast, against TRL with bf16=True; with bf16 the frozen weights are bf16 as well. "TRL"
is as shipped; "tuned TRL" has the switch that our start-up sets on such a machine, fp32 products by oneDNN
(stages/modeling/torch_setup.py), with eager attention. It runs with 'wrapped' only: on TRL's 'bfd', one row of a whole
batch, both make it slower.
"""

import argparse
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch

from benchmarks.common.tables import Goal, Result
from benchmarks.data.stage_runs import say
from benchmarks.ppo.processes import OURS, RunSettings
from benchmarks.ppo.workload import SHAPES, language_model
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
)
from benchmarks.training.workload import DOCUMENTS, MODEL, Work
from stages.finetuning.token_store import write_documents
from stages.modeling import tiny_llama
from stages.modeling.load import load_causal
from stages.modeling.tokenizer import load_tokenizer
from stages.stackexchange.pairs.table import read_pairs
from stages.stackexchange.prompt import encode_examples

AT_LEAST = 1.2
PACKINGS = ("wrapped", "bfd")


def measure(args: argparse.Namespace, folder: Path, setting: RunSettings) -> tuple[list[Result], dict]:
    """Measure every packing of --packing."""
    torch.set_num_threads(setting.threads)
    work = Work(str(folder), args.batch, length=args.length, learning_rate=args.learning_rate, schedule="cosine",
                weight_decay=0.05, rank=args.rank, dropout=args.dropout, precision=args.precision,
                targets=tuple(args.targets))
    prepare(work, args)
    contenders = [build_contender(f"{name}, {packing}", worker, packing) for packing in args.packing
                  for name, worker in ((TRL, "trl"), (OURS, "ours"))]
    if "wrapped" in args.packing:
        contenders.append(build_contender(f"{TUNED}, wrapped", "trl", "wrapped", **SWITCHES))

    def group(name: str) -> str:
        return "wrapped" if name.endswith("wrapped") else name

    figures = compare(contenders, work, args, setting, group) | {"work": vars(work)}
    add_shares(figures, work, setting, logits=True)
    rate = "a_cpu_second" if setting.basis == "cpu" else "a_second"
    for packing in PACKINGS:
        ours, trl, tuned = (f"{name}, {packing}" for name in (OURS, TRL, TUNED))
        figures |= {f"{packing}_ratio_to_trl": ratio(figures, ours, trl, rate),
                  f"{packing}_ratio_to_tuned_trl": ratio(figures, ours, tuned, rate),
                  f"{packing}_memory_ratio_to_trl": ratio(figures, ours, trl, "peak_mb")}
    speedup = figures["wrapped_ratio_to_trl"]
    speed_goals = [Goal("tokens a second, wrapped, ours / TRL", speedup, at_least=AT_LEAST)]
    goals = speed_goals if speedup and args.precision == "fp32" else []
    goals += smollm2_goals(figures, args.shape, f"{OURS}, wrapped")
    title = f"{args.precision}, medians of {setting.rounds} passes over the same documents"
    return [build_table(figures, title, "tokens", setting.basis, goals)], figures


def prepare(work: Work, args: argparse.Namespace) -> None:
    """Write the model, and documents with exactly as many tokens as the blocks; SystemExit if the split has fewer."""
    tokenizer = write_model(work, args)
    tokens = args.steps * work.batch * work.length

    def truncated_documents() -> Iterator[tuple[list[int], list[int]]]:
        left = tokens
        for prompt, answer in encode_examples(tokenizer, _texts(args)):
            yield prompt[:left], answer[:max(0, left - len(prompt))]
            left -= len(prompt) + len(answer)
            if left <= 0:
                return

    documents = write_documents(work.path(DOCUMENTS), truncated_documents(), None)
    available = int(documents.lengths.sum())
    if available < tokens:
        raise SystemExit(f"the {args.split} split of {args.pairs} has {available:,} tokens, but {tokens:,} are needed: "
                         f"--steps {available // (work.batch * work.length)} is the maximum")
    longer = int((documents.lengths > work.length).sum())
    say(f"{len(documents)} documents, {available:,} tokens; {longer} documents are longer than a block")


def write_model(work: Work, args: argparse.Namespace):
    """Write the initial model: the base, or a random one; return its tokenizer."""
    if args.base:
        tokenizer, model = load_tokenizer(args.base), load_causal(args.base)
    else:
        shape = SHAPES[args.shape]
        tokenizer = tiny_llama.train_tokenizer(chain.from_iterable(_texts(args)), SHAPES["small"].vocabulary)
        torch.manual_seed(work.seed)
        if args.shape == "small":
            model = tiny_llama.build_small_llama(
                tokenizer, hidden_size=shape.width, intermediate_size=shape.intermediate,
                num_hidden_layers=shape.layers, num_attention_heads=shape.heads, max_position_embeddings=1024,
                initializer_range=0.02)
        else:
            model = language_model(shape)
    model.save_pretrained(work.path(MODEL))
    tokenizer.save_pretrained(work.path(MODEL))
    return tokenizer


def _texts(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    for row in read_pairs(args.pairs, args.split, ["question", "response_j"]):
        yield row["question"], row["response_j"]


def main() -> None:
    parser = build_parser(__doc__, steps=12, batch=8, learning_rate=1e-4, rank=16)
    parser.add_argument("--base", type=Path, metavar="FOLDER", help="the initial causal model (default: see above)")
    parser.add_argument("--split", default="finetune", metavar="NAME", help="split whose better answers are read")
    parser.set_defaults(dropout=0.05)
    parser.add_argument("--packing", nargs="+", choices=PACKINGS, default=PACKINGS)
    run_program(parser, measure)


if __name__ == "__main__":
    main()
