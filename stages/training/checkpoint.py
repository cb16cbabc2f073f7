"""A whole training state on disk: tensors as safetensors, facts as JSON, atomically. No pickle.

A checkpoint is a folder `checkpoint-000020`, numbered by what its caller counts, that appears by one rename: killing at
any instant leaves the one before it usable. What belongs together (the state and the best weights so far) goes into
one checkpoint, so that neither is ever newer than the other.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from stages.runtime.files import sync_to_disk

PREFIX, DRAFT = "checkpoint-", "checkpoint.tmp"
TENSORS, FACTS = "state.safetensors", "state.json"
PLAIN = "optimizer.plain"  # the optimiser's entries that are no tensors, as JSON in bytes


def save(root: Path, tensors: dict[str, torch.Tensor], facts: dict, *, number: int, keep: int) -> None:
    """Add checkpoint `number`, larger than any under `root`, and delete all but the newest `keep`."""
    draft = root / DRAFT
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, draft / TENSORS)
    (draft / FACTS).write_text(json.dumps({"torch": torch.__version__, "facts": facts}), encoding="utf-8")
    for written in (draft / TENSORS, draft / FACTS, draft):
        sync_to_disk(written)
    os.rename(draft, root / f"{PREFIX}{number:06d}")
    sync_to_disk(root)
    for old in _numbered(root)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)  # what stays behind goes at the next save


def load(root: Path) -> tuple[dict[str, torch.Tensor], dict] | None:
    """Tensors and facts of the newest whole checkpoint under `root`, or None; newer damaged ones are deleted."""
    for folder in reversed(_numbered(root)):
        try:
            written = json.loads((folder / FACTS).read_text(encoding="utf-8"))
            tensors = load_file(folder / TENSORS)
        except (FileNotFoundError, json.JSONDecodeError, SafetensorError) as error:
            _say(f"{folder} is damaged ({error}): going back to the one before it")
            shutil.rmtree(folder)
            continue
        if written["torch"] != torch.__version__:
            _say(f"{folder} is of torch {written['torch']}, this is {torch.__version__}: from here on, bits may differ")
        return tensors, written["facts"]
    return None


def remove(root: Path) -> None:
    """Delete every trace of checkpoints, once what they were for is finished."""
    for folder in (root / DRAFT, *_numbered(root)):
        shutil.rmtree(folder, ignore_errors=True)


def optimizer_tensors(optimizer) -> dict[str, torch.Tensor]:
    """The optimiser's state, flat: 'optimizer.<parameter index>.<key>', and the numbers among it in PLAIN."""
    tensors, plain = {}, []
    for index, (parameter, *_) in enumerate(_places(optimizer)):
        for key, value in optimizer.state.get(parameter, {}).items():
            if torch.is_tensor(value):
                tensors[f"optimizer.{index}.{key}"] = value
            else:
                plain.append([index, key, value])
    return tensors | {PLAIN: torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)}


def restore_optimizer(optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Put `optimizer_tensors` back, to the last bit; step sizes and the like stay those of `optimizer`.

    Not by load_state_dict: that casts the state to the parameter's dtype, and unpages what was paged.
    """
    entries = json.loads(bytes(tensors[PLAIN].tolist()))
    for name, tensor in tensors.items():
        if name.startswith("optimizer.") and name != PLAIN:
            _, index, key = name.split(".", 2)
            entries.append([int(index), key, tensor])
    places = _places(optimizer)
    optimizer.state.clear()
    for index, key, value in entries:
        parameter, group, group_index, place = places[index]
        if hasattr(optimizer, "init_state") and parameter not in optimizer.state:
            optimizer.init_state(group, parameter, group_index, place)  # bitsandbytes: buffers that are paged if asked
        _put(optimizer.state[parameter], key, value, parameter.device)


def _put(state: dict, key: str, value, device: torch.device) -> None:
    if not torch.is_tensor(value):
        state[key] = value
    elif torch.is_tensor(state.get(key)):
        state[key].copy_(value)
    else:  # a counter stays on the CPU, where torch's optimisers keep it
        state[key] = value.to(device if value.dim() else "cpu", copy=True)


def _places(optimizer) -> list[tuple]:
    """(parameter, its group, the group's index, its index in the group), in the order of state_dict."""
    return [
        (parameter, group, group_index, place)
        for group_index, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    ]


def _numbered(root: Path) -> list[Path]:
    """Checkpoints, oldest first."""
    found = [folder for folder in root.glob(f"{PREFIX}*") if folder.name.removeprefix(PREFIX).isdigit()]
    return sorted(found, key=lambda folder: int(folder.name.removeprefix(PREFIX)))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
