"""SFT beside TRL's SFTTrainer on the same documents: label tokens a second, and memory, by way of packing.

    python -m benchmarks.training.sft --pairs results/demo/pairs --json sft.json
    python -m benchmarks.training.sft --pairs results/demo/pairs --base results/demo/base --precision mixed --packing wrapped

Each contender runs in a process of its own, in turns (A B A B), --rounds times, and trains once over the same
documents, questions with their better answers: as many as fill --steps x --batch blocks of --length tokens. LoRA on
PEFT's choice of layers, dropout 0.05; without --base a LLaMA of 6 layers, width 256 and a vocabulary of 4096, with
random weights and a tokenizer made from the documents. What is counted of a pass, and what is not, stands in
benchmarks/training/workload.py.

Tokens are those with a label: not the first of a block ('wrapped') or document ('bfd'). With 'wrapped' all read the
same blocks, which is checked; with 'bfd' TRL cuts documents off at --length, where ours goes on in another block.
Ratios are of medians: with one thread of CPU seconds; `foreign` is the number of cores that other processes had. MB
are 10^6 bytes, the most that a process held.

--precision mixed is bf16 by autocast: ours beside TRL with bf16=True. "TRL" is as shipped; "tuned TRL" has the switch
set that our own start sets on such a machine, fp32 products by oneDNN (stages/modeling/torch_setup.py), and eager
attention, which goes with it; with 'wrapped' alone, as on TRL's 'bfd', one row of a whole batch, both make it slower.
"""

import argparse
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch

from benchmarks.common.tables import Goal, Result
from benchmarks.data.stage_runs import say
from benchmarks.ppo.processes import OURS, Setting
from benchmarks.ppo.workload import Shape
from benchmarks.training.processes import SWITCHES, TRL, TUNED, compare, contender, parser, program, ratio, table_of
from benchmarks.training.workload import DOCUMENTS, MODEL, Work
from stages.finetuning.token_store import write_documents
from stages.modeling import tiny_llama
from stages.modeling.load import load_causal
from stages.modeling.tokenizer import load_tokenizer
from stages.stackexchange.pairs.table import rows_of
from stages.stackexchange.prompt import encoded

AT_LEAST = 1.2
PACKINGS = ("wrapped", "bfd")


def measure(given: argparse.Namespace, folder: Path, setting: Setting) -> tuple[list[Result], dict]:
    """Every way of packing that was asked for."""
    torch.set_num_threads(setting.threads)
    work = Work(str(folder), given.batch, length=given.length, learning_rate=given.learning_rate, schedule="cosine",
                weight_decay=0.05, rank=given.rank, dropout=0.05, precision=given.precision)
    prepare(work, given)
    contenders = [contender(f"{name}, {packing}", worker, packing) for packing in given.packing
                  for name, worker in ((TRL, "trl"), (OURS, "ours"))]
    if "wrapped" in given.packing:
        contenders.append(contender(f"{TUNED}, wrapped", "trl", "wrapped", **SWITCHES))

    def like(name: str) -> str:
        return "wrapped" if name.endswith("wrapped") else name

    found = compare(contenders, work, given, setting, like) | {"work": vars(work)}
    rate = "a_cpu_second" if setting.basis == "cpu" else "a_second"
    for packing in PACKINGS:
        ours, trl, tuned = (f"{name}, {packing}" for name in (OURS, TRL, TUNED))
        found |= {f"{packing}_ratio_to_trl": ratio(found, ours, trl, rate),
                  f"{packing}_ratio_to_tuned_trl": ratio(found, ours, tuned, rate),
                  f"{packing}_memory_ratio_to_trl": ratio(found, ours, trl, "peak_mb")}
    taken = found["wrapped_ratio_to_trl"]
    bound = [Goal("tokens a second, wrapped, ours / TRL", taken, at_least=AT_LEAST)]
    goals = bound if taken and given.precision == "fp32" else []
    title = f"{given.precision}, medians of {setting.rounds} passes over the same documents"
    return [table_of(found, title, "tokens", setting.basis, goals)], found


def prepare(work: Work, given: argparse.Namespace) -> None:
    """Fill the work's folder with the model and documents of just as many tokens as the blocks hold. SystemExit when
    the split has fewer."""
    tokenizer = _model(work, given)
    tokens = given.steps * work.batch * work.length

    def cut() -> Iterator[tuple[list[int], list[int]]]:
        left = tokens
        for prompt, answer in encoded(tokenizer, _texts(given)):
            yield prompt[:left], answer[:max(0, left - len(prompt))]
            left -= len(prompt) + len(answer)
            if left <= 0:
                return

    documents = write_documents(work.path(DOCUMENTS), cut(), None)
    held = int(documents.lengths.sum())
    if held < tokens:
        raise SystemExit(f"the {given.split} split of {given.pairs} has {held:,} tokens, {tokens:,} are asked for: "
                         f"--steps {held // (work.batch * work.length)} is the most")
    longer = int((documents.lengths > work.length).sum())
    say(f"{len(documents)} documents, {held:,} tokens; {longer} documents are longer than a block")


def _model(work: Work, given: argparse.Namespace):
    """The base, or one made for it, into the work's folder; gives its tokenizer."""
    if given.base:
        tokenizer, model = load_tokenizer(given.base), load_causal(given.base)
    else:
        shape = Shape()
        tokenizer = tiny_llama.train_tokenizer(chain.from_iterable(_texts(given)), shape.vocabulary)
        torch.manual_seed(work.seed)
        model = tiny_llama.small_llama(tokenizer, hidden_size=shape.width, intermediate_size=shape.intermediate,
                                    layers=shape.layers, heads=shape.heads, max_position_tokens=1024,
                                    initializer_range=0.02)
    model.save_pretrained(work.path(MODEL))
    tokenizer.save_pretrained(work.path(MODEL))
    return tokenizer


def _texts(given: argparse.Namespace) -> Iterator[tuple[str, str]]:
    for row in rows_of(given.pairs, given.split, ["question", "response_j"]):
        yield row["question"], row["response_j"]


def main() -> None:
    made = parser(__doc__, steps=12, batch=8, learning_rate=1e-4, rank=16)
    made.add_argument("--base", type=Path, metavar="FOLDER", help="the causal model to start from (default: see above)")
    made.add_argument("--split", default="finetune", metavar="NAME", help="of the pairs, whose better answers are read")
    made.add_argument("--precision", choices=("fp32", "mixed"), default="fp32")
    made.add_argument("--packing", nargs="+", choices=PACKINGS, default=PACKINGS)
    program(made, measure)


if __name__ == "__main__":
    main()
