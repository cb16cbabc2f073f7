"""TODO docstring."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from stages.runtime.files import atomic_path
from stages.training.loggers import Logs


@dataclass(frozen=True)
class Evaluation:
    """Evaluations while training: `measure` gives numbers at a step, in eval mode, every `every_steps` and at the end.

    keep_best: the better a state, the higher; makes the best one the result, by what `measure` found. None: the last.
    """

    measure: Callable[[int], dict]
    every_steps: int
    keep_best: Callable[[dict], float] | None = None


class HistoryCallback(TrainerCallback):
    """History, progress, evaluations, the best state, and the mark of a complete checkpoint."""

    def __init__(self, best: Path, label: str, watch: Evaluation | None, patience: int | None, logs: Logs):
        self.best, self.label, self.watch, self.patience, self.logs = best, label, watch, patience, logs
        self.rows: list[dict] = []
        self.progress = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.rows = history_rows(state)
        self.logs.resume(state.global_step, self.rows)
        self.progress = self.logs.progress(self.label, state.max_steps, done=state.global_step)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        note = f"loss {self.rows[-1]['loss']:.3f}" if self.rows and "loss" in self.rows[-1] else ""
        self.progress.advance(note=note)
        if self.watch and (state.global_step % self.watch.every_steps == 0 or state.global_step == state.max_steps):
            self._evaluate(state, control, model)

    def _evaluate(self, state, control, model) -> None:
        model.eval()
        with torch.no_grad():
            numbers = self.watch.measure(state.global_step)
        model.train()
        state.log_history.append(numbers | {"step": state.global_step})
        if self.watch.keep_best:
            quality = [self.watch.keep_best(row) for row in state.log_history if set(numbers) <= set(row)]
            since = len(quality) - 1 - quality.index(max(quality))
            if since == 0:
                save_trained(model, self.best)
            control.should_training_stop |= self.patience is not None and since >= self.patience
        self.on_log(None, state, control)

    def on_log(self, args, state, control, **kwargs):
        known, self.rows = len(self.rows), history_rows(state)
        for row in self.rows[known:]:
            self.logs.numbers(row["step"], {name: value for name, value in row.items() if name != "step"})

    def on_save(self, args, state, control, **kwargs):
        (Path(args.output_dir) / f"checkpoint-{state.global_step}" / COMPLETE).touch()

    def on_train_end(self, args, state, control, **kwargs):
        self.progress.finish()

COMPLETE = "complete"
OUR_NAMES = {"grad_norm": "gradient_norm"}  # as in PPO's history
# Differ from run to run, or restart when a run resumes: not part of the result.
UNREPEATABLE = ("runtime", "per_second", "total_flos", "train_loss")


def save_trained(model, path: Path) -> None:
    with atomic_path(path) as draft:
        save_file({name: p.detach().cpu().clone() for name, p in model.named_parameters() if p.requires_grad}, draft)


def load_trained(model, path: Path) -> None:
    saved = load_file(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(saved.pop(name))


def history_rows(state) -> list[dict]:
    """What a state remembers, of what repeats: step, then the rest by name."""
    rows = [{OUR_NAMES.get(key, key): value for key, value in sorted(entry.items())
             if not any(word in key for word in UNREPEATABLE)} for entry in state.log_history]
    return [{"step": row["step"]} | row for row in rows if set(row) - {"step", "epoch"}]
