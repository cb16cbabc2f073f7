"""A Trainer whose steps are shared among processes, and whose checkpoints hold the losses of an unfinished row.

Layers may be sharded; checkpoints are those of a whole model, or hold some of its parameters only (PartialState).
"""

from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer, TrainerCallback

from stages.distributed import group, sharding
from stages.distributed.units import sum_gradients
from stages.runtime.files import read_json_object, write_json
from stages.training.checkpoint import PREFIX, check_checkpoint_space
from stages.training.optimizers import clip_gradients

LOSS_SINCE_ROW = "loss_since_row.json"  # of a checkpoint between two rows of the history


class PartialState(nn.Module):
    """A module whose state is its parameters that are trained, and those that `is_updated` names.

    Parameters that are tied are saved once.
    """

    def is_updated(self, name: str) -> bool:
        """Check whether a parameter changes in training although it has no gradient."""
        return False

    def saved_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of a checkpoint by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad or self.is_updated(name)}

    def state_dict(self, *args, **kwargs) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.saved_parameters().items()}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True, assign: bool = False):
        """Load a state; KeyError or RuntimeError unless it is whole and fits, whatever `strict` is."""
        with torch.no_grad():
            for name, parameter in self.saved_parameters().items():
                parameter.copy_(state_dict[name])
        return nn.modules.module._IncompatibleKeys([], sorted(set(state_dict) - set(self.saved_parameters())))


def saved_parameters(model) -> list[torch.nn.Parameter]:
    """List the parameters of a checkpoint: of a PEFT model, those that are trained."""
    if isinstance(model, PartialState):
        return list(model.saved_parameters().values())
    return [p for p in model.parameters() if p.requires_grad or not hasattr(model, "peft_config")]


class StepTrainer(Trainer):
    """Train on steps whose microbatches the processes share; each then has the gradient of the whole step."""

    loss_fn: Callable

    def _save_checkpoint(self, model, trial):
        """Save, beside what the Trainer saves, the losses of the next row so far: it would begin that row anew."""
        states = (value for state in self.optimizer.state.values() for value in state.values())
        tensors = chain(saved_parameters(model), filter(torch.is_tensor, states))
        check_checkpoint_space(Path(self.args.output_dir).parent, tensors)
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial)) / f"{PREFIX}{self.state.global_step}"
        write_json(folder / LOSS_SINCE_ROW, {"sum": self._tr_loss.item(), "row_step": self._globalstep_last_logged})

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Return as many entries as the step has microbatches, all of them in the last one, and the step's items."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        entries = [{"units": []} for _ in batches[1:]] + [{"units": list(enumerate(batches))} for _ in batches[:1]]
        return entries, sum(batch["items"] for batch in batches)

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Compute gradients and loss of a step, with the microbatches as work units; nothing if there are none."""
        gpus = [self.args.device] if self.args.device.type == "cuda" else []
        parameters = list(model.parameters())

        def backward(unit: tuple[int, dict], weight: float) -> torch.Tensor:
            """Compute the gradients of a microbatch, of which `unit` is number and content; return its loss."""
            number, batch = unit
            with torch.random.fork_rng(gpus):  # dropout: a unit's masks do not depend on the process
                torch.manual_seed(hash((self.args.seed, self.state.global_step, number)))
                return super(StepTrainer, self).training_step(model, {**batch, "weight": weight}, num_items_in_batch)

        units = inputs["units"]
        loss = sum_gradients(units, backward, lambda unit: parameters, width=1)[0] if units else 0.0
        return torch.tensor(float(loss), dtype=torch.float32, device=self.args.device)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Compute a microbatch's share of the mean loss over the items of its step."""
        return inputs["weight"] * self.loss_fn(inputs["content"]) / max(1, num_items_in_batch)

    def _clip_grad_norm(self, model):
        return clip_gradients(model.parameters(), self.args.max_grad_norm)

    def floating_point_ops(self, inputs):
        """Return 0: the Trainer's count needs padded inputs."""
        return 0


class RestoreLoss(TrainerCallback):
    """On a resume, give the Trainer the losses of the next row so far."""

    def __init__(self, trainer: StepTrainer, checkpoint: Path):
        self.trainer, self.saved = trainer, read_json_object(checkpoint / LOSS_SINCE_ROW)

    def on_train_begin(self, args, state, control, **kwargs):
        """Add the losses of the checkpoint to the Trainer's."""
        if self.saved:  # a checkpoint of an older version has none, and is on a row
            self.trainer._tr_loss += self.saved["sum"]
            self.trainer._globalstep_last_logged = self.saved["row_step"]


class ShardedStepTrainer(StepTrainer):
    """Train a model whose layers are sharded; checkpoints are those of a whole model, whatever the number of processes.
    """

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
