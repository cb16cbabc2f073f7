"""Train with Transformers' Trainer, with resumable checkpoints and a history that repeats bit for bit.

The Trainer provides optimizer, schedule, data order, gradient accumulation and checkpoints. This module adds: a step's
loss that is the mean over all its items, however they are split into microbatches; checkpoints that count only if they
are complete, so that training survives kill -9; logs that hold each step once; the best state; one progress line.
"""

import math
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import chain, pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

from stages.distributed import group, sharding
from stages.runtime.files import read_json_object, write_json
from stages.runtime.stage_lines import print_line
from stages.runtime.stopping import Stopped, deferred
from stages.training.callbacks import Evaluation, HistoryCallback, SaveCallback, StepCallback, load_trainable
from stages.training.checkpoint import PREFIX, check_checkpoint_space, checkpoint_number, find_newest_intact
from stages.training.checkpoint_timer import CheckpointTimer
from stages.training.disk_plan import check_training_space, count_saves
from stages.training.loggers import TrainingLogger
from stages.training.optimizers import MuonWithAdamW, clip_gradients
from stages.training.partial_state import PartialState

CHECKPOINTS = "checkpoints"
BEST = "best.safetensors"
LOSS_SINCE_ROW = "loss_since_row.json"  # of a checkpoint between two rows of the history
KEEP_CHECKPOINTS = 2
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
        collate: maps a list of its items to {"content": a batch, "items": the count that the loss is a mean of}. With
            several processes, each of which computes its rows of a step, the content is a list, and "lengths" are its
            rows' tokens.
        loss_fn: maps a batch to the sum of its items' losses, a scalar computed with `model`.
        logger: left open; None: log to `out` and the terminal.
        after_step: called with the number of each step after its update, before it is evaluated or saved.

    Raises ValueError, before anything is trained, if the disk has no room for the checkpoints.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > group.world_size():
        raise ValueError(f"{label} was started as one of several processes that have not met: start it by its command")
    check_training_space(
        out, _saved_parameters(model), optimizer=settings.optimizer, keep_checkpoints=KEEP_CHECKPOINTS,
        saves=count_saves(len(dataset), settings.batch, settings.epochs, settings.max_steps,
                          1 if settings.save_every_minutes else settings.save_every_steps),
        keeps_best=evaluation is not None and evaluation.score is not None, checkpoints=out / CHECKPOINTS)
    set_seed(settings.seed)
    callback = HistoryCallback(
        out / BEST, label, evaluation, settings.patience_evaluations, logger or TrainingLogger(out, label))
    trainer = _build_trainer(model, dataset, collate, loss_fn, settings, out,
                             [*([StepCallback(after_step)] if after_step else []), callback])
    checkpoint = find_newest_intact(out / CHECKPOINTS)
    if checkpoint:
        print_line(f"{label}: resumed at {checkpoint.name}")
        trainer.add_callback(_RestoreLoss(trainer, checkpoint))
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


def _saved_parameters(model) -> list[torch.nn.Parameter]:
    """List the parameters of a checkpoint: of a PEFT model, those that are trained."""
    if isinstance(model, PartialState):
        return list(model.saved_parameters().values())
    return [p for p in model.parameters() if p.requires_grad or not hasattr(model, "peft_config")]


def _build_trainer(model, dataset, collate: Callable, loss_fn: Callable, settings: TrainerSettings, out: Path,
                   callbacks: list[TrainerCallback]) -> Trainer:
    sharded = sharding.has_shards(model)
    trainer = (_ShardedTrainer if sharded else _Trainer)(
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


class _Trainer(Trainer):
    """Train on steps whose rows are shared among the processes; each process then has the gradient of the whole step.

    A process takes its share of all rows of a step, in as few microbatches as hold it; others are empty.
    """

    loss_fn: Callable
    own_loss = 0.0  # of this process's rows of the step so far

    def _save_checkpoint(self, model, trial):
        """Save, beside what the Trainer saves, the losses of the next row so far: it would begin that row anew."""
        states = (value for state in self.optimizer.state.values() for value in state.values())
        tensors = chain(_saved_parameters(model), filter(torch.is_tensor, states))
        check_checkpoint_space(Path(self.args.output_dir).parent, tensors)
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial)) / f"{PREFIX}{self.state.global_step}"
        write_json(folder / LOSS_SINCE_ROW, {"sum": self._tr_loss.item(), "row_step": self._globalstep_last_logged})

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        items = sum(batch["items"] for batch in batches)
        if group.world_size() == 1:
            return batches, items
        return share_step(batches, fill=sharding.has_shards(self.model)), items

    def training_step(self, model, inputs, num_items_in_batch=None):
        if group.world_size() == 1:
            return super().training_step(model, inputs, num_items_in_batch)
        if inputs["content"]:
            with torch.random.fork_rng():  # dropout: other masks in each process, the same random state afterwards
                torch.manual_seed(hash((self.args.seed, self.state.global_step, inputs["number"], group.rank())))
                self.own_loss = self.own_loss + super().training_step(model, inputs, num_items_in_batch)
        total = torch.zeros((), device=self.args.device)
        if self.accelerator.sync_gradients:  # the step's last microbatch: before the gradient is clipped
            group.sum_gradients(model.parameters())
            total, self.own_loss = group.sum_tensor(total + self.own_loss), 0.0
        return total

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return inputs.get("weight", 1.0) * self.loss_fn(inputs["content"]) / max(1, num_items_in_batch)

    def floating_point_ops(self, inputs):
        return 0


class _RestoreLoss(TrainerCallback):
    """On a resume, give the Trainer the losses of the next row so far."""

    def __init__(self, trainer: _Trainer, checkpoint: Path):
        self.trainer, self.saved = trainer, read_json_object(checkpoint / LOSS_SINCE_ROW)

    def on_train_begin(self, args, state, control, **kwargs):
        if self.saved:  # a checkpoint of an older version has none, and is on a row
            self.trainer._tr_loss += self.saved["sum"]
            self.trainer._globalstep_last_logged = self.saved["row_step"]


class _ShardedTrainer(_Trainer):
    """Train a model whose layers are sharded; checkpoints are those of a whole model, whatever the number of processes.
    """

    def _clip_grad_norm(self, model):
        return clip_gradients(model.parameters(), self.args.max_grad_norm)

    def _save_checkpoint(self, model, trial):
        self.whole_state = None if hasattr(self.model, "peft_config") else sharding.gather_state(self.model)
        with sharding.whole_optimizer_state(self.optimizer):
            if group.rank() == 0:
                super()._save_checkpoint(model, trial)
        self.whole_state = None

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, self.whole_state)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        if hasattr(self.model, "peft_config"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        parameters = dict(self.model.named_parameters())
        for file in Path(resume_from_checkpoint).glob("model*.safetensors"):
            for name, tensor in load_file(file).items():
                with torch.no_grad():
                    parameters[name].copy_(sharding.split_like(tensor, parameters[name]))

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                state[key] = sharding.split_like(value, parameter)


def share_step(batches: list[dict], fill: bool) -> list[dict]:
    """Return this process's rows of the microbatches of a step, as so many microbatches, of which some are empty.

    fill: processes must have equally many that are not (sharding.py); one with too few takes a row at weight 0.
    """
    rows = [row for batch in batches for row in batch["content"]]
    own = group.own_rows_by_length([length for batch in batches for length in batch["lengths"]])
    used = -(-len(batches) // group.world_size())
    cuts = [number * len(own) // used for number in range(used + 1)] + [len(own)] * (len(batches) - used)
    parts = [{"content": [rows[i] for i in own[start:stop]], "number": number}
             for number, (start, stop) in enumerate(pairwise(cuts))]
    if fill:
        for part in parts[:used]:
            if not part["content"]:
                part.update(content=rows[:1], weight=0.0)
    return parts
