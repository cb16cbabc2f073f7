"""Results of earlier evaluations of a run, used again where all that they depend on is the same.

They are in files that are named by the SHA-256 of what they depend on. A file appears by one rename, complete or not at
all, begins with the SHA-256 of its content, and never changes. Two stages may read and write the same folder at once.
It can be deleted at any time: what it held is computed again.
"""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import accumulate
from pathlib import Path

import torch
from safetensors.torch import load, save

from stages.artifacts.artifact import digest
from stages.distributed import group
from stages.modeling.load import resolve_cpu_kernels
from stages.runtime.environment import describe_environment, digest_code
from stages.runtime.files import atomic_path
from stages.runtime.stage_lines import print_line

CACHE = ".cache"  # in the run's folder
ENVIRONMENT = ("device", "cpu_kernels", "threads", "processes", "versions")  # which change the rounding
MAX_BYTES = 2 << 30


class CachedResults:
    """Results of models, which depend on the model's digest, the inputs, the settings, the code and the environment.

    folder: None computes everything.
    """

    def __init__(self, folder: Path | None = None, **depends_on: object):
        self.folder, self.depends_on = folder, depends_on
        self.used = self.computed = 0
        self._digest = cache(digest)

    @classmethod
    def of_run(cls, run_folder: Path, cpu_kernels: str) -> "CachedResults":
        """Use the results that are stored in a run's folder."""
        resolve_cpu_kernels(cpu_kernels)  # so that the environment has them
        environment = describe_environment()
        return cls(run_folder / CACHE, code=digest_code(), cpu_kernels=cpu_kernels,
                   environment={name: environment.get(name) for name in ENVIRONMENT})

    def compute(self, kind: str, model: Path, compute: Callable[[], dict[str, torch.Tensor]], **depends_on: object
                ) -> dict[str, torch.Tensor]:
        """Return the tensors of `compute`, which is not called if all processes can read them.

        Args:
            model: folder of the model that computes them.
            depends_on: what else decides the result; values that JSON can express.
        """
        if self.folder is None:
            return compute()
        name = digest_value({"kind": kind, "model": self._digest(model)} | self.depends_on | depends_on)
        data = self.read(name)
        if not group.any_process(data is None):
            self.used += 1
            return load(data)
        self.computed += 1
        tensors = compute()
        if group.rank() == 0:
            self.write(name, save({name: tensor.contiguous() for name, tensor in tensors.items()}))
        return tensors

    def read(self, name: str) -> bytes | None:
        """Read a result; None if there is none, or if it is damaged, which a line says."""
        path = self.folder / name
        try:
            content = path.read_bytes()
        except OSError:
            return None
        with suppress(OSError):
            os.utime(path)  # the least recently used are deleted first
        size = hashlib.sha256().digest_size
        if hashlib.sha256(content[size:]).digest() == content[:size]:
            return content[size:]
        print_line(f"{path} is damaged: its result is computed again")
        return None

    def write(self, name: str, data: bytes) -> None:
        """Write a result. A full or read-only disk costs the file alone, after one line."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_path(self.folder / name, sync=True) as draft:
                draft.write_bytes(hashlib.sha256(data).digest() + data)
        except OSError as error:
            print_line(f"a result is not stored for later evaluations, in {self.folder}: {error}")

    def delete_excess(self, max_bytes: int = MAX_BYTES) -> None:
        """Delete the least recently used files beyond `max_bytes`, drafts of killed processes among them."""
        with suppress(OSError):  # another process may delete one
            files = sorted(self.folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
            totals = accumulate(path.stat().st_size for path in files)
            for path in [path for path, total in zip(files, totals, strict=True) if total > max_bytes]:
                path.unlink()

    def finish(self) -> None:
        """Delete results that have not been used for long, and say how many were used."""
        if self.folder is not None and group.rank() == 0:
            self.delete_excess()
            if self.used:
                print_line(f"evaluate: {self.used} of {self.used + self.computed} results of models were taken from "
                           f"{self.folder}")


def digest_value(value: object) -> str:
    """Compute the SHA-256 of a value that JSON can express, as hexadecimal text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def join_rows(rows: list) -> dict[str, torch.Tensor]:
    """Join rows (lists of token ids, or 1-D tensors) of any lengths to two tensors."""
    tensors = [torch.as_tensor(row, dtype=None if isinstance(row, torch.Tensor) else torch.long) for row in rows]
    return {"flat": torch.cat(tensors) if tensors else torch.zeros(0),
            "lengths": torch.tensor([len(row) for row in rows], dtype=torch.long)}


def split_rows(joined: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Split what `join_rows` has joined."""
    return list(joined["flat"].split(joined["lengths"].tolist()))
