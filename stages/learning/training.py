"""Transformers' Trainer as this project uses it: history, progress, and checkpoints that survive kill -9.

The Trainer carries optimiser, schedule, accumulation, mixed precision and several processes. Added here: a checkpoint
counts only once it is complete, `history.jsonl` holds every logged step once whatever was interrupted, and one
progress line.
"""

import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

from stages.plumbing.artifact import write_text
from stages.plumbing.progress import Progress

COMPLETE = "complete"
CHECKPOINTS = "checkpoints"
HISTORY = "history.jsonl"
BEST = "best.safetensors"
# Differ from run to run, or restart when a run resumes: not part of the result.
UNREPEATABLE = ("runtime", "per_second", "total_flos", "train_loss")
# The mean loss since the last line is lost in a kill, so a line falls on every checkpoint.
LOG_EVERY_STEPS = 10


@dataclass(frozen=True)
class Training:
    """What the optimiser needs to know; sizes count the caller's examples."""

    batch: int
    microbatch: int
    learning_rate: float
    schedule: str
    weight_decay: float
    seed: int
    precision: str
    save_every_steps: int
    max_steps: int | None = None
    epochs: float = 1.0
    warmup_steps: int = 0
    gradient_checkpointing: bool = False

    @classmethod
    def like(cls, settings: object, **own) -> "Training":
        """The fields that `settings` has by the same name, and the rest as given."""
        shared = {f.name: getattr(settings, f.name) for f in fields(cls) if hasattr(settings, f.name)}
        return cls(**(shared | own))


def train(
    model,
    dataset,
    collate: Callable,
    settings: Training,
    out: Path,
    label: str,
    loss: Callable | None = None,
    evaluate: Callable[[], dict] | None = None,
    evaluate_every_steps: int | None = None,
    keep_best: str | None = None,
) -> list[dict]:
    """Train in place, going on from the last complete checkpoint under `out`; returns the history.

    dataset: a map-style data set; collate: list of its items to a dict of tensors; loss: (model, batch) to a scalar
    (default: the model's own, given labels); evaluate: called every `evaluate_every_steps` and at the end in eval mode,
    its numbers go into the history; keep_best: the one of them (the higher the better) by which the final weights are
    chosen among the evaluated states.
    """
    set_seed(settings.seed)
    book = _Book(out / HISTORY, label, evaluate, evaluate_every_steps, keep_best)
    trainer = _Trainer(
        model=model, args=_arguments(settings, out), train_dataset=dataset, data_collator=collate, callbacks=[book]
    )
    trainer.own_loss = loss
    trainer.remove_callback(PrinterCallback)
    checkpoint = last_checkpoint(out)
    if checkpoint:
        print(f"{label}: resumed at {Path(checkpoint).name}", file=sys.stderr, flush=True)
    trainer.train(resume_from_checkpoint=checkpoint)
    if keep_best:
        _load_trained(model, out / BEST)
    return book.rows


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


def _arguments(settings: Training, out: Path) -> TrainingArguments:
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
        bf16=settings.precision in ("mixed", "bf16", "nf4"),
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
    own_loss: Callable | None = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.own_loss is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return self.own_loss(model, inputs)


class _Book(TrainerCallback):
    """History, progress, evaluations, and the mark of a complete checkpoint."""

    def __init__(
        self, path: Path, label: str, evaluate: Callable | None, evaluate_every_steps: int | None, keep_best: str | None
    ):
        self.path, self.label = path, label
        self.evaluate, self.every, self.keep_best = evaluate, evaluate_every_steps, keep_best
        self.rows: list[dict] = []
        self.progress = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.rows = [_repeatable(row) for row in state.log_history]
        self._write()
        self.progress = Progress(self.label, state.max_steps, "steps", done=state.global_step)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        note = f"loss {self.rows[-1]['loss']:.3f}" if self.rows and "loss" in self.rows[-1] else ""
        self.progress.advance(note=note)
        due = self.every and state.global_step % self.every == 0
        if self.evaluate and (due or state.global_step == state.max_steps):
            model.eval()
            with torch.no_grad():
                numbers = self.evaluate()
            model.train()
            if self.keep_best and numbers[self.keep_best] > self._best_so_far():
                _save_trained(model, self.path.with_name(BEST))
            state.log_history.append(numbers | {"step": state.global_step})
            self.on_log(args, state, control)

    def on_log(self, args, state, control, **kwargs):
        self.rows = [row for entry in state.log_history if set(row := _repeatable(entry)) - {"step", "epoch"}]
        self._write()

    def on_save(self, args, state, control, **kwargs):
        (Path(args.output_dir) / f"checkpoint-{state.global_step}" / COMPLETE).touch()

    def on_train_end(self, args, state, control, **kwargs):
        self.progress.finish()

    def _best_so_far(self) -> float:
        return max((row[self.keep_best] for row in self.rows if self.keep_best in row), default=float("-inf"))

    def _write(self) -> None:
        write_text(self.path, "".join(json.dumps(row, sort_keys=True) + "\n" for row in self.rows))


def _save_trained(model, path: Path) -> None:
    draft = path.with_suffix(".tmp")
    save_file({name: p.detach().cpu().clone() for name, p in model.named_parameters() if p.requires_grad}, draft)
    draft.replace(path)


def _load_trained(model, path: Path) -> None:
    saved = load_file(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(saved.pop(name))


def _repeatable(row: dict) -> dict:
    return {key: value for key, value in row.items() if not any(word in key for word in UNREPEATABLE)}
