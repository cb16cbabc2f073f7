"""Our reward training or SFT on the benchmark's work: one process.

Made of the pieces that stages/reward.py and stages/sft.py are made of, in the loop that they train with.
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Subset

from benchmarks.ppo.workload import threads, worker_arguments, write
from benchmarks.training.workload import DOCUMENTS, MODEL, WARM_UP_STEPS, Meter, Work
from stages.finetuning.lm_loss import collate_blocks, summed_loss
from stages.finetuning.packing import Blocks, Row
from stages.finetuning.token_store import Documents
from stages.modeling import lora
from stages.modeling.load import load_causal
from stages.modeling.pretrained import save_adapter
from stages.modeling.tokenizer import load_tokenizer
from stages.reward_modeling.dataset import Example, collate_examples, examples
from stages.reward_modeling.load import load_scorer
from stages.reward_modeling.loss import PairwiseLoss
from stages.reward_modeling.scoring_file import Scoring
from stages.stackexchange.pairs.table import rows_of
from stages.training.trainer import TrainerSettings, train

PACKAGES = ("torch", "transformers", "peft")


def reward(work: Work, meter: Meter, batching: str):
    """A pass over all pairs, 'question' by question or 'pair' by pair; gives the model."""
    tokenizer = load_tokenizer(work.path(MODEL))
    rows = rows_of(Path(work.folder), "reward")
    data, _ = examples(rows, tokenizer, max_length_tokens=work.length, by_question=batching == "question",
                       max_pairs=10 ** 9)
    model, objective, scoring = _learner(work, load_scorer, scorer=True), PairwiseLoss(), Scoring()

    def loss(items: list[Example]) -> torch.Tensor:
        pairs = [(item.prompt, item.answers[index]) for item in items for pair in item.pairs for index in pair]
        computed = sum(len(item.prompt) + sum(map(len, item.answers)) for item in items)
        meter.loss_of(len(pairs) // 2, (prompt + answer for prompt, answer in pairs), computed)
        return objective.summed_loss(model, items, scoring, work.precision)

    if batching == "question":
        work = replace(work, batch=work.questions, learning_rate=work.question_learning_rate)
    _time(work, meter, model, data, collate_examples, loss)
    return model


def sft(work: Work, meter: Meter, packing: str):
    """A pass over all blocks of the documents, 'wrapped' or 'bfd'; gives the model."""
    documents = Documents(work.path(DOCUMENTS))
    blocks = Blocks(documents, np.arange(len(documents)), work.length, packing, answers_only=False)
    model = _learner(work, load_causal)

    def loss(rows: list[Row]) -> torch.Tensor:
        meter.loss_of(sum(int(row.learnt.sum()) for row in rows), (row.ids for row in rows),
                      sum(len(row.ids) for row in rows))
        return summed_loss(model, rows, work.precision)

    _time(work, meter, model, blocks, collate_blocks, loss)
    return model


def _learner(work: Work, load: Callable, scorer: bool = False):
    model = load(work.path(MODEL), work.precision)
    torch.manual_seed(work.seed)
    return lora.add_lora(model, r=work.rank, alpha=work.alpha, dropout=work.dropout, target_modules=(),
                           precision=work.precision, scorer=scorer)


def _time(work: Work, meter: Meter, model, data, collate: Callable, loss: Callable) -> None:
    def pass_over(items, learning_rate: float) -> None:
        settings = TrainerSettings.like(work, microbatch=work.batch, learning_rate=learning_rate, save_every_steps=10 ** 6)
        with tempfile.TemporaryDirectory() as folder:
            train(model, items, collate, loss, settings, Path(folder), "benchmark")

    few = Subset(data, range(min(len(data), WARM_UP_STEPS * work.batch)))
    meter.time(pass_over, few, data, work.learning_rate)


def main() -> None:
    given = worker_arguments(__doc__, Work, form=(str, "question"), adapter=(str, ""))
    meter = Meter()
    model = (reward if given.form in ("question", "pair") else sft)(given.shape, meter, given.form)
    write(given.out, meter.clock, PACKAGES, **meter.read)
    if given.adapter:
        save_adapter(model, load_tokenizer(given.shape.path(MODEL)), Path(given.adapter))


if __name__ == "__main__":
    threads()
    main()
