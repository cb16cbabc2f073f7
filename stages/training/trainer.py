"""Transformers' Trainer as this project uses it: history, progress, and checkpoints that survive kill -9.

The Trainer carries optimiser, schedule, order of the data, accumulation and checkpoints. Added here: the loss of a step
is a mean over all its items, however they fall into microbatches (CORRECTNESS P5); a checkpoint counts only once it is
complete; the logs hold every logged step once whatever was interrupted; the best state kept; one progress line.
"""

import math
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed

from stages.training.callbacks import COMPLETE, Evaluation, HistoryCallback, load_trained
from stages.training.loggers import Logs

CHECKPOINTS = "checkpoints"
BEST = "best.safetensors"
# The mean loss since the last line is lost in a kill, so a line falls on every checkpoint.
LOG_EVERY_STEPS = 10


@dataclass(frozen=True)
class TrainerSettings:
    """What the optimiser needs to know; sizes count the caller's examples.

    patience_evaluations: stop after so many without a better one; None: never.
    """

    batch: int
    microbatch: int
    learning_rate: float
    schedule: str
    weight_decay: float
    seed: int
    save_every_steps: int
    max_steps: int | None = None
    epochs: float = 1.0
    warmup_steps: int = 0
    gradient_checkpointing: bool = False
    patience_evaluations: int | None = None

    @classmethod
    def like(cls, settings: object, **own) -> "TrainerSettings":
        """The fields that `settings` has by the same name, and the rest as given."""
        shared = {f.name: getattr(settings, f.name) for f in fields(cls) if hasattr(settings, f.name)}
        return cls(**(shared | own))


def train(
    model,
    dataset,
    collate: Callable,
    loss: Callable,
    settings: TrainerSettings,
    out: Path,
    label: str,
    watch: Evaluation | None = None,
    logs: Logs | None = None,
) -> list[dict]:
    """Train in place, going on from the last complete checkpoint under `out`; returns the history.

    logs: where the history goes; None: to `out` and the terminal. They are left open.
    dataset: a map-style data set; collate: list of its items to `content` and how many `items` the loss is to be a
    mean of; loss: a batch's content to the sum of its items' losses, a scalar, made with `model` (one process, one
    device).
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"{label} trains in one process, and was started as one of several: start it without torchrun")
    set_seed(settings.seed)
    book = HistoryCallback(out / BEST, label, watch, settings.patience_evaluations, logs or Logs(out, label))
    trainer = _Trainer(
        model=model, args=_arguments(settings, out), train_dataset=dataset, data_collator=collate, callbacks=[book]
    )
    trainer.own_loss = loss
    trainer.model_accepts_loss_kwargs = True  # it divides by the step's items itself
    trainer.remove_callback(PrinterCallback)
    checkpoint = last_checkpoint(out)
    if checkpoint:
        print(f"{label}: resumed at {Path(checkpoint).name}", file=sys.stderr, flush=True)
    trainer.train(resume_from_checkpoint=checkpoint)
    if watch and watch.keep_best:
        load_trained(model, out / BEST)
    return book.rows


def last_step(out: Path) -> int:
    """Of the last complete checkpoint; -1 without one."""
    found = last_checkpoint(out)
    return -1 if found is None else int(found.rpartition("-")[2])


def remove_checkpoints(out: Path) -> None:
    """Once the result is saved; until then, a killed process goes on from here."""
    shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
    (out / BEST).unlink(missing_ok=True)


def last_checkpoint(out: Path) -> str | None:
    """The newest checkpoint that was written to its end; half-written ones are removed."""
    found = []
    for folder in (out / CHECKPOINTS).glob("checkpoint-*"):
        if (folder / COMPLETE).exists():
            found.append(folder)
        else:
            shutil.rmtree(folder)
    return str(max(found, key=lambda f: int(f.name.split("-")[1]))) if found else None


def _arguments(settings: TrainerSettings, out: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(out / CHECKPOINTS),
        per_device_train_batch_size=settings.microbatch,
        gradient_accumulation_steps=settings.batch // settings.microbatch,
        max_steps=settings.max_steps or -1,
        num_train_epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.schedule,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        seed=settings.seed,
        data_seed=settings.seed,
        use_cpu=not torch.cuda.is_available(),
        activation_checkpointing=settings.gradient_checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False} if settings.gradient_checkpointing else None,
        save_strategy="steps",
        save_steps=settings.save_every_steps,
        save_total_limit=2,
        logging_steps=math.gcd(LOG_EVERY_STEPS, settings.save_every_steps),
        logging_first_step=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


class _Trainer(Trainer):
    own_loss: Callable

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches, sum(batch["items"] for batch in batches)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return self.own_loss(inputs["content"]) / max(1, num_items_in_batch)

    def floating_point_ops(self, inputs):
        return 0


