"""Extend Transformers' Trainer by callbacks: log metrics, show progress, evaluate, keep the best state, save, stop."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from stages.distributed import group, sharding
from stages.runtime import processes
from stages.runtime.files import atomic_path, link_or_copy
from stages.runtime.stopping import StopRequest
from stages.training.checkpoint import PREFIX, seal_checkpoint
from stages.training.checkpoint_plan import CheckpointTimer
from stages.training.loggers import TrainingLogger

RENAMED_METRICS = {"grad_norm": "gradient_norm"}  # as in PPO's history
# These differ from run to run, or restart when a run resumes: they are not part of the result.
UNREPEATABLE = ("runtime", "per_second", "total_flos", "train_loss")


@dataclass(frozen=True)
class Evaluation:
    """Evaluate a model while it trains, every `every_steps` and at the last step; with `at_start`, before it, too.

    measure: computes metrics at a step; the model is in eval mode and gradients are off.
    score: rates these metrics, higher is better; the best state becomes the result. None: the last state does.
    """

    measure: Callable[[int], dict]
    every_steps: int
    score: Callable[[dict], float] | None = None
    at_start: bool = False


class HistoryCallback(TrainerCallback):
    """Write the history, show progress, evaluate, save the best state, and seal checkpoints."""

    def __init__(
        self, best: Path, label: str, evaluation: Evaluation | None, patience: int | None, logger: TrainingLogger
    ):
        self.best, self.label, self.patience, self.logger = best, label, patience, logger
        self.evaluation = evaluation
        self.rows: list[dict] = []
        self.progress = None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.rows = select_history(state)
        if state.global_step and (saved := self._checkpoint(args, state) / self.best.name).exists():
            link_or_copy(saved, self.best)  # under the checkpoint's seal, unlike the file beside the checkpoints
        self.logger.resume(state.global_step or -1, self.rows)  # at step 0 there is no checkpoint
        self.progress = self.logger.progress(self.label, state.max_steps, done=state.global_step)
        if self.evaluation and self.evaluation.at_start and state.global_step == 0:
            self._evaluate(state, control, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        note = f"loss {self.rows[-1]['loss']:.3f}" if self.rows and "loss" in self.rows[-1] else ""
        self.progress.advance(note=note)
        last = state.global_step == state.max_steps
        if self.evaluation and (last or state.global_step % self.evaluation.every_steps == 0):
            self._evaluate(state, control, model)

    @staticmethod
    def _checkpoint(args, state) -> Path:
        return Path(args.output_dir) / f"{PREFIX}{state.global_step}"

    def _evaluate(self, state, control, model) -> None:
        model.eval()
        with torch.no_grad():
            metrics = self.evaluation.measure(state.global_step)
        model.train()
        state.log_history.append(metrics | {"step": state.global_step})
        if self.evaluation.score:
            scores = [self.evaluation.score(row) for row in state.log_history if set(metrics) <= set(row)]
            since_best = len(scores) - 1 - scores.index(max(scores))
            if since_best == 0:
                save_trainable(model, self.best)
            control.should_training_stop |= self.patience is not None and since_best >= self.patience
        self.on_log(None, state, control)

    def on_log(self, args, state, control, **kwargs):
        logged, self.rows = len(self.rows), select_history(state)
        for row in self.rows[logged:]:
            self.logger.log_metrics(row["step"], {name: value for name, value in row.items() if name != "step"})

    def on_save(self, args, state, control, **kwargs):
        if not processes.is_main():
            return
        folder = self._checkpoint(args, state)
        if self.best.exists():
            link_or_copy(self.best, folder / self.best.name)
        seal_checkpoint(folder)

    def on_train_end(self, args, state, control, **kwargs):
        self.progress.finish()


class StepCallback(TrainerCallback):
    """Call a function with the number of each step when its update is done, before evaluations and checkpoints."""

    def __init__(self, function: Callable[[int], None]):
        self.function = function

    def on_step_end(self, args, state, control, **kwargs):
        self.function(state.global_step)


class SaveCallback(TrainerCallback):
    """Save a checkpoint after a step if one is due by time, or if a signal asks to stop; then end the training, too.

    Neither happens after a step that is the last one anyway. A checkpoint beside those of `save_every_steps` evaluates
    nothing: the best state, and when training stops early, stay those of the evaluations.

    Of several processes, all stop after the step in which one has the request, and the first one saves.

    stopped_at: the step that was saved; None if the training was not stopped.
    """

    def __init__(self, request: StopRequest, timer: CheckpointTimer, all_save: bool):
        self.request, self.timer, self.all_save, self.stopped_at = request, timer, all_save, None

    def on_step_end(self, args, state, control, **kwargs):
        stops, is_due = group.any_process_each([self.request.signal is not None, self.timer.is_due()])
        if control.should_training_stop or not (stops or is_due):
            return
        control.should_save = self.all_save or processes.is_main()  # all take part in saving a sharded model
        if stops:
            control.should_training_stop, self.stopped_at = True, state.global_step

    def on_save(self, args, state, control, **kwargs):
        """Count the time until the next checkpoint from this one, whatever asked for it."""
        self.timer.restart()


def save_trainable(model, path: Path) -> None:
    """Save the parameters that require gradients, whole ones, as every process does in a folder of its own."""
    trained = ((name, p.detach()) for name, p in model.named_parameters() if p.requires_grad)
    tensors = {name: sharding.whole(tensor).cpu().clone() for name, tensor in trained}
    with atomic_path(path) as draft:
        save_file(tensors, draft)


def load_trainable(model, path: Path) -> None:
    """Load what `save_trainable` saved into the model."""
    saved = load_file(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(sharding.split_like(saved.pop(name), parameter))


def select_history(state) -> list[dict]:
    """Select the repeatable metrics of a Trainer's state: a row per entry, the step first, then the rest by name."""
    rows = [{RENAMED_METRICS.get(key, key): value for key, value in sorted(entry.items())
             if not any(word in key for word in UNREPEATABLE)} for entry in state.log_history]
    return [{"step": row["step"]} | row for row in rows if set(row) - {"step", "epoch"}]
