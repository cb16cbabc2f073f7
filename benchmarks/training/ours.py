"""Run our reward training, SFT or DPO on the benchmark's work, in one process.

It uses the same parts and the same training loop as stages/reward.py, stages/sft.py and stages/dpo.py.
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Subset

from benchmarks.ppo.workload import parse_worker_arguments, set_threads, write_results
from benchmarks.training.workload import DOCUMENTS, MODEL, WARM_UP_STEPS, Meter, Work, attended_pairs
from stages.finetuning.packing import PackedBlocks, PackedRow, collate_blocks, summed_lm_loss
from stages.finetuning.token_store import TokenizedDocuments
from stages.modeling import lora
from stages.modeling.adapters import active_adapter
from stages.modeling.load import load_causal
from stages.modeling.pretrained import save_adapter
from stages.modeling.tokenizer import load_tokenizer
from stages.preference.logprobs import ReferencedExample, all_answer_logprobs
from stages.preference.loss import PreferenceLoss
from stages.recipe.recipe import select_settings
from stages.recipe.sections.reward import Reward
from stages.reward_modeling.dataset import Example, build_examples, collate_examples
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.loss import PairwiseLoss
from stages.reward_modeling.scoring_file import Scoring
from stages.stackexchange.pairs.table import read_pairs
from stages.training.trainer import TrainerSettings, train

PACKAGES = ("torch", "transformers", "peft")


def train_reward(work: Work, meter: Meter, batching: str):
    """Train on all pairs once, with batching 'question' or 'pair'; return the model."""
    tokenizer = load_tokenizer(work.path(MODEL))
    rows = read_pairs(Path(work.folder), "reward")
    data, _ = build_examples(rows, tokenizer, max_length_tokens=work.length, by_question=batching == "question",
                             max_pairs=10 ** 9)
    model, scoring = _load_with_lora(work, load_classifier, scorer=True), Scoring()
    loss_fn = PairwiseLoss(**select_settings(PairwiseLoss, Reward()))

    def loss(items: list[Example]) -> torch.Tensor:
        pairs = [(item.prompt, item.answers[index]) for item in items for pair in item.pairs for index in pair]
        computed = sum(len(item.prompt) + sum(map(len, item.answers)) for item in items)
        meter.record_loss(len(pairs) // 2, (prompt + answer for prompt, answer in pairs), computed, _attended(items))
        return loss_fn.summed_loss(model, items, scoring, work.precision)

    if batching == "question":
        work = replace(work, batch=work.questions, learning_rate=work.question_learning_rate)
    _time(work, meter, model, data, collate_examples, loss)
    return model


def train_dpo(work: Work, meter: Meter):
    """Train on all pairs once; return the model. The reference is computed at the first loss, to be in the time."""
    tokenizer = load_tokenizer(work.path(MODEL))
    data, _ = build_examples(read_pairs(Path(work.folder), "reward"), tokenizer, max_length_tokens=work.length,
                             by_question=False, max_pairs=10 ** 9)
    model, loss_fn, references = _load_with_lora(work, load_causal), PreferenceLoss("sigmoid", work.beta, 0.0), {}

    def compute_references() -> None:
        model.eval()
        with active_adapter(model, None):
            flat = all_answer_logprobs(model, data, work.precision).tolist()
        model.train()
        references.update((id(one), tuple(flat[2 * i: 2 * i + 2])) for i, one in enumerate(data))

    def loss(items: list[Example]) -> torch.Tensor:
        computed = sum(len(item.prompt) + sum(map(len, item.answers)) for item in items)
        is_first = not meter.read["items"]  # of the warm-up's losses, each
        meter.record_loss(len(items), (item.prompt + answer for item in items for answer in item.answers), computed)
        if is_first:
            compute_references()
        return loss_fn.summed_loss(
            model, [ReferencedExample(item, references[id(item)]) for item in items], work.precision)

    _time(work, meter, model, data, collate_examples, loss)
    return model


def train_sft(work: Work, meter: Meter, packing: str):
    """Train on all blocks of the documents once, packed 'wrapped' or 'bfd'; return the model."""
    documents = TokenizedDocuments(work.path(DOCUMENTS))
    blocks = PackedBlocks(documents, np.arange(len(documents)), work.length, packing, answers_only=False)
    model = _load_with_lora(work, load_causal)

    def loss(rows: list[PackedRow]) -> torch.Tensor:
        meter.record_loss(sum(int(row.is_label.sum()) for row in rows), (row.token_ids for row in rows),
                      sum(len(row.token_ids) for row in rows))
        return summed_lm_loss(model, rows, work.precision)

    _time(work, meter, model, blocks, collate_blocks, loss)
    return model


def _attended(items: list[Example]) -> int:
    """Count the pairs of tokens that attention needs where the answers to a question share its tokens."""
    prompts, rows = 0, 0
    for item in items:
        prompts += (1 - len(item.answers)) * attended_pairs(len(item.prompt))
        rows += sum(attended_pairs(len(item.prompt) + len(answer)) for answer in item.answers)
    return prompts + rows


def _load_with_lora(work: Work, load: Callable, scorer: bool = False):
    model = load(work.path(MODEL), work.precision, cpu_kernels="auto")
    torch.manual_seed(work.seed)
    return lora.add_lora(model, r=work.rank, alpha=work.alpha, dropout=work.dropout, target_modules=work.targets,
                         precision=work.precision, scorer=scorer)


def _time(work: Work, meter: Meter, model, data, collate: Callable, loss: Callable) -> None:
    def pass_over(items, learning_rate: float) -> None:
        settings = TrainerSettings.from_section(
            work, microbatch=work.batch, learning_rate=learning_rate, save_every_steps=10 ** 6)
        with tempfile.TemporaryDirectory() as folder:
            train(model, items, collate, loss, settings, Path(folder), "benchmark")

    few = Subset(data, range(min(len(data), WARM_UP_STEPS * work.batch)))
    meter.time(pass_over, few, data, work.learning_rate)


def main() -> None:
    """Time one of our trainers, and write its figures."""
    args = parse_worker_arguments(__doc__, Work, form=(str, "question"), adapter=(str, ""))
    meter = Meter()
    if args.form == "dpo":
        model = train_dpo(args.shape, meter)
    else:
        model = (train_reward if args.form in ("question", "pair") else train_sft)(args.shape, meter, args.form)
    write_results(args.out, meter.clock, PACKAGES, **meter.read)
    if args.adapter:
        save_adapter(model, load_tokenizer(args.shape.path(MODEL)), Path(args.adapter))


if __name__ == "__main__":
    set_threads()
    main()
