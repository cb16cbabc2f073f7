"""A whole training state on disk: tensors as safetensors, facts as JSON, atomically. No pickle.

A checkpoint is a folder that appears by one rename; killing at any instant leaves the previous one usable.
"""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FOLDER = "checkpoint"


def save(root: Path, tensors: dict[str, torch.Tensor], facts: dict) -> None:
    """Replace the checkpoint under `root`."""
    draft, old = root / f"{FOLDER}.tmp", root / f"{FOLDER}.old"
    for leftover in (draft, old):
        shutil.rmtree(leftover, ignore_errors=True)
    draft.mkdir(parents=True)
    save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, draft / "state.safetensors")
    (draft / "state.json").write_text(json.dumps(facts))
    if (root / FOLDER).exists():
        os.rename(root / FOLDER, old)
    os.rename(draft, root / FOLDER)
    shutil.rmtree(old, ignore_errors=True)


def load(root: Path) -> tuple[dict[str, torch.Tensor], dict] | None:
    """The newest whole checkpoint under `root`, or None."""
    for name in (FOLDER, f"{FOLDER}.old"):  # the second: killed between the two renames
        if (root / name / "state.json").exists():
            facts = json.loads((root / name / "state.json").read_text())
            return load_file(root / name / "state.safetensors"), facts
    return None


def remove(root: Path) -> None:
    """Delete every trace of checkpoints, once what they were for is finished."""
    for name in (FOLDER, f"{FOLDER}.tmp", f"{FOLDER}.old"):
        shutil.rmtree(root / name, ignore_errors=True)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimiser's state, flat: 'optimizer.<parameter index>.<key>'."""
    state = optimizer.state_dict()["state"]
    return {
        f"optimizer.{index}.{key}": torch.as_tensor(value)
        for index, entry in state.items()
        for key, value in entry.items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Put `optimizer_tensors` back; step sizes and the like stay those of `optimizer`."""
    state: dict[int, dict] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
