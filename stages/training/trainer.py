"""Train with Transformers' Trainer, with resumable checkpoints and a history that repeats bit for bit.

The Trainer provides optimizer, schedule, data order, gradient accumulation and checkpoints. This module and
step_trainer.py add: a step's loss that is the mean over all its items, however they are split into microbatches;
checkpoints that count only if they are complete, so that training survives kill -9; logs that hold each step once; the
best state; one progress line.
"""

import math
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

from stages.distributed import group, sharding
from stages.runtime.stage_lines import print_line
from stages.runtime.stopping import Stopped, deferred
from stages.training.callbacks import Evaluation, HistoryCallback, SaveCallback, StepCallback, load_trainable
from stages.training.checkpoint import checkpoint_number, find_newest_intact
from stages.training.checkpoint_plan import (
    KEEP_CHECKPOINTS,
    CheckpointTimer,
    check_training_space,
    checkpoint_interval,
    count_saves,
)
from stages.training.loggers import TrainingLogger
from stages.training.optimizers import MuonWithAdamW
from stages.training.step_trainer import RestoreLoss, ShardedStepTrainer, StepTrainer, saved_parameters

CHECKPOINTS = "checkpoints"
BEST = "best.safetensors"
LOG_EVERY_STEPS = 10


@dataclass(frozen=True)
class TrainerSettings:
    """Settings of the optimization; batch sizes are in items of the data set.

    patience_evaluations: stop after this many evaluations without a better one; None: never.
    """

    batch: int
    microbatch: int
    learning_rate: float
    schedule: str
    weight_decay: float
    seed: int
    save_every_steps: int
    save_every_minutes: float | None = None
    optimizer: str = "adamw"
    max_steps: int | None = None
    epochs: float = 1.0
    warmup_steps: int = 0
    gradient_checkpointing: bool = False
    patience_evaluations: int | None = None

    @classmethod
    def from_section(cls, section: object, **overrides) -> "TrainerSettings":
        """Take the fields that a section of the recipe has under the same name, then `overrides`."""
        shared = {f.name: getattr(section, f.name) for f in fields(cls) if hasattr(section, f.name)}
        return cls(**(shared | overrides))


def train(
    model, dataset, collate: Callable, loss_fn: Callable, settings: TrainerSettings, out: Path, label: str,
    evaluation: Evaluation | None = None, logger: TrainingLogger | None = None,
    after_step: Callable[[int], None] | None = None,
) -> list[dict]:
    """Train in place, resuming from the newest intact checkpoint under `out`; return the history.

    On a signal, a checkpoint is saved after the step at work, and Stopped is raised.

    Args:
        dataset: a map-style data set.
        collate: maps a list of its items to {"content": a batch, "items": the count that the loss is a mean of}. The
            processes share the batches of a step.
        loss_fn: maps a batch to the sum of its items' losses, a scalar computed with `model`.
        logger: left open; None: log to `out` and the terminal.
        after_step: called with the number of each step after its update, before it is evaluated or saved.

    Raises ValueError, before anything is trained, if the disk has no room for the checkpoints.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > group.world_size():
        raise ValueError(f"{label} was started as one of several processes that have not met: start it by its command")
    check_training_space(
        out, saved_parameters(model), optimizer=settings.optimizer,
        saves=count_saves(len(dataset), settings.batch, settings.epochs, settings.max_steps,
                          checkpoint_interval(settings.save_every_steps, settings.save_every_minutes)),
        keeps_best=evaluation is not None and evaluation.score is not None, checkpoints=out / CHECKPOINTS)
    set_seed(settings.seed)
    callback = HistoryCallback(
        out / BEST, label, evaluation, settings.patience_evaluations, logger or TrainingLogger(out, label))
    trainer = _build_trainer(model, dataset, collate, loss_fn, settings, out,
                             [*([StepCallback(after_step)] if after_step else []), callback])
    checkpoint = find_newest_intact(out / CHECKPOINTS)
    if checkpoint:
        print_line(f"{label}: resumed at {checkpoint.name}")
        trainer.add_callback(RestoreLoss(trainer, checkpoint))
    with deferred() as request:
        saving = SaveCallback(request, CheckpointTimer(settings.save_every_minutes), sharding.has_shards(model))
        trainer.add_callback(saving)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if saving.stopped_at is not None:
        number = request.signal or signal.SIGTERM  # another process may have had the signal
        raise Stopped(number, f"step {saving.stopped_at}")
    if evaluation and evaluation.score:
        load_trainable(model, out / BEST)
    return callback.rows


def last_checkpoint_step(out: Path) -> int:
    """Return the step of the newest intact checkpoint; -1 if there is none."""
    checkpoint = find_newest_intact(out / CHECKPOINTS)
    return -1 if checkpoint is None else checkpoint_number(checkpoint)


def remove_checkpoints(out: Path) -> None:
    """Delete checkpoints and best state, once the result is saved; before that, a killed process resumes from them."""
    shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
    (out / BEST).unlink(missing_ok=True)


def _build_trainer(model, dataset, collate: Callable, loss_fn: Callable, settings: TrainerSettings, out: Path,
                   callbacks: list[TrainerCallback]) -> Trainer:
    sharded = sharding.has_shards(model)
    trainer = (ShardedStepTrainer if sharded else StepTrainer)(
        model=model, args=_arguments(settings, out, sharded), train_dataset=dataset, data_collator=collate,
        callbacks=callbacks, optimizers=(_build_optimizer(model, settings), None))
    trainer.loss_fn = loss_fn
    trainer.model_accepts_loss_kwargs = True  # compute_loss divides by the step's items itself
    trainer.remove_callback(PrinterCallback)
    return trainer


def _build_optimizer(model, settings: TrainerSettings) -> torch.optim.Optimizer | None:
    """Build the optimizer that the Trainer does not know by name; None: its own AdamW."""
    if settings.optimizer == "adamw":
        return None
    return MuonWithAdamW(model, learning_rate=settings.learning_rate, weight_decay=settings.weight_decay)


def _arguments(settings: TrainerSettings, out: Path, sharded: bool) -> TrainingArguments:
    """Return the Trainer's arguments; sharded: all processes take part in saving a checkpoint."""
    return _OneDeviceArguments(
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
        save_strategy="steps" if group.rank() == 0 or sharded else "no",
        save_steps=settings.save_every_steps,
        save_total_limit=KEEP_CHECKPOINTS,
        logging_steps=math.gcd(LOG_EVERY_STEPS, settings.save_every_steps),
        logging_first_step=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,  # batches are lists of rows on the CPU: there is no tensor to copy
    )


class _OneDeviceArguments(TrainingArguments):
    """Arguments of a process that computes on one device, however many there are.

    With several, the Trainer would wrap the model in DataParallel and multiply the batch by their number.
    """

    @property
    def n_gpu(self) -> int:
        return min(1, super().n_gpu)
