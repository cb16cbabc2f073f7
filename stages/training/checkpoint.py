"""Save and load a training state atomically: tensors as safetensors, facts as JSON, no pickle.

A checkpoint is a folder `checkpoint-000020`, numbered by its caller, that appears by one rename: a kill at any instant
leaves the previous one usable. What belongs together (the state and the best weights so far) goes into one checkpoint,
so that neither is ever newer than the other.

A seal, the digests of its files, marks a checkpoint as whole; those of Transformers' Trainer get one, too (trainer.py).
"""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from stages.distributed.sharding import split_like
from stages.runtime.files import atomic_path, check_free_space, hash_files, list_files, sync_to_disk
from stages.runtime.processes import is_main
from stages.runtime.stage_lines import print_line

PREFIX, DRAFT = "checkpoint-", "checkpoint.tmp"
TENSORS, FACTS = "state.safetensors", "state.json"
SEAL = "complete.json"
NON_TENSORS = "optimizer.plain"  # entries of the optimizer's state that are no tensors, as the bytes of a JSON text


def save_checkpoint(root: Path, tensors: dict[str, torch.Tensor], facts: dict, *, number: int, keep: int) -> None:
    """Add checkpoint `number`, larger than any in `root`, and delete all but the newest `keep`.

    Of several processes, all of which have the same state, only the first one does. Raises ValueError, before anything
    is written, if the disk has no room for it.
    """
    if not is_main():
        return
    draft = root / DRAFT
    shutil.rmtree(draft, ignore_errors=True)
    check_checkpoint_space(root, tensors.values())
    draft.mkdir(parents=True)
    save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, draft / TENSORS)
    (draft / FACTS).write_text(json.dumps({"torch": torch.__version__, "facts": facts}), encoding="utf-8")
    seal_checkpoint(draft)
    os.rename(draft, root / f"{PREFIX}{number:06d}")
    sync_to_disk(root)
    for old in list_checkpoints(root)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)  # what remains is deleted by the next save


def check_checkpoint_space(root: Path, tensors: Iterable[torch.Tensor]) -> None:
    """Raise ValueError if the disk has no room for a checkpoint of these tensors."""
    check_free_space("the next checkpoint", root, sum(tensor.nbytes for tensor in tensors))


def load_checkpoint(root: Path) -> tuple[dict[str, torch.Tensor], dict] | None:
    """Load tensors and facts of the newest intact checkpoint in `root`, if any; delete newer damaged ones."""
    folder = find_newest_intact(root)
    if folder is None:
        return None
    saved = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    if saved["torch"] != torch.__version__:
        print_line(f"{folder} is of torch {saved['torch']}, this is {torch.__version__}: from here on, bits may differ")
    return load_file(folder / TENSORS), saved["facts"]


def find_newest_intact(root: Path) -> Path | None:
    """Return the newest intact checkpoint in `root`, if any; delete newer damaged ones, and say so."""
    for folder in reversed(list_checkpoints(root)):
        if (problem := find_damage(folder)) is None:
            return folder
        state = f"damaged ({problem})" if (folder / SEAL).exists() else "unfinished, as a kill leaves it"
        print_line(f"{folder} is {state}: going back to the one before it")
        shutil.rmtree(folder)
    return None


def seal_checkpoint(folder: Path) -> None:
    """Mark a checkpoint as whole: flush its files to the disk, then write their SHA-256 atomically."""
    files = [path for path in list_files(folder) if path.name != SEAL]
    digests = {str(path.relative_to(folder)): sha256 for path, sha256 in hash_files(files)}
    for path in files:
        sync_to_disk(path)
    with atomic_path(folder / SEAL, sync=True) as draft:
        draft.write_text(json.dumps(digests), encoding="utf-8")


def find_damage(folder: Path) -> str | None:
    """Describe what is wrong with a checkpoint, compared with its seal; None: nothing."""
    try:
        digests = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        if not isinstance(digests, dict):
            return f"{SEAL} holds no JSON object"
        actual = {path.relative_to(folder): sha256 for path, sha256 in hash_files([folder / name for name in digests])}
    except FileNotFoundError as error:
        return f"there is no {error.filename}"
    except (OSError, ValueError, RecursionError) as error:
        return str(error)
    return next((f"{name} has changed" for name, sha256 in digests.items() if actual[Path(name)] != sha256), None)


def delete_checkpoints(root: Path) -> None:
    """Delete all checkpoints in `root`, once training is finished."""
    for folder in (root / DRAFT, *list_checkpoints(root)):
        shutil.rmtree(folder, ignore_errors=True)


def list_checkpoints(root: Path) -> list[Path]:
    """List the checkpoint folders in `root`, oldest first."""
    folders = [folder for folder in root.glob(f"{PREFIX}*") if folder.name.removeprefix(PREFIX).isdigit()]
    return sorted(folders, key=checkpoint_number)


def checkpoint_number(folder: Path) -> int:
    return int(folder.name.removeprefix(PREFIX))


def flatten_optimizer_state(optimizer) -> dict[str, torch.Tensor]:
    """Flatten the state to 'optimizer.<parameter index>.<key>', with what is no tensor in NON_TENSORS."""
    tensors, others = {}, []
    for index, (parameter, *_) in enumerate(_indexed_parameters(optimizer)):
        for key, value in optimizer.state.get(parameter, {}).items():
            if torch.is_tensor(value):
                tensors[f"optimizer.{index}.{key}"] = value
            else:
                others.append([index, key, value])
    return tensors | {NON_TENSORS: torch.frombuffer(bytearray(json.dumps(others).encode()), dtype=torch.uint8)}


def restore_optimizer_state(optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Restore a flattened state bit for bit; learning rates and other settings stay those of `optimizer`.

    load_state_dict would cast the state to the parameter's dtype, and would not page what was paged.
    """
    entries = json.loads(bytes(tensors[NON_TENSORS].tolist()))
    for name, tensor in tensors.items():
        if name.startswith("optimizer.") and name != NON_TENSORS:
            _, index, key = name.split(".", 2)
            entries.append([int(index), key, tensor])
    parameters = _indexed_parameters(optimizer)
    optimizer.state.clear()
    for index, key, value in entries:
        parameter, group, group_index, parameter_index = parameters[index]
        if hasattr(optimizer, "init_state") and parameter not in optimizer.state:
            optimizer.init_state(group, parameter, group_index, parameter_index)  # bitsandbytes allocates, maybe paged
        _restore_entry(optimizer.state[parameter], key, value, parameter, group)


def _restore_entry(state: dict, key: str, value, parameter: torch.Tensor, group: dict) -> None:
    if not torch.is_tensor(value):
        state[key] = value
    elif torch.is_tensor(state.get(key)):
        state[key].copy_(value)
    else:  # torch's optimizers keep counters on the CPU; fused kernels read them on the parameter's device
        beside_parameter = value.dim() or group.get("fused") or group.get("capturable")
        state[key] = split_like(value.to(parameter.device if beside_parameter else "cpu", copy=True), parameter)


def _indexed_parameters(optimizer) -> list[tuple]:
    """List (parameter, its group, the group's index, its index in the group), in the order of state_dict."""
    return [
        (parameter, group, group_index, index)
        for group_index, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
    ]
