"""Compute tensors, unless an earlier evaluation of the run has computed the same."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load, save

from stages.artifacts.artifact import digest
from stages.distributed import group
from stages.evaluation.cached_results.files import ResultFiles
from stages.modeling.load import resolve_cpu_kernels
from stages.runtime.environment import describe_environment, digest_code
from stages.runtime.stage_lines import print_line

CACHE = ".cache"  # in the run's folder
ENVIRONMENT = ("device", "cpu_kernels", "threads", "processes", "versions")  # which change the rounding


class CachedResults:
    """Results of models, which depend on the model's digest, the inputs, the settings, the code and the environment.

    files: None computes everything.
    """

    def __init__(self, files: ResultFiles | None = None, **depends_on: object):
        self.files, self.depends_on = files, depends_on
        self._digests: dict[Path, str] = {}
        self.used = self.computed = 0

    @classmethod
    def of_run(cls, run_folder: Path, cpu_kernels: str) -> "CachedResults":
        """Use the results that are stored in a run's folder."""
        resolve_cpu_kernels(cpu_kernels)  # so that the environment has them
        environment = describe_environment()
        return cls(ResultFiles(run_folder / CACHE), code=digest_code(), cpu_kernels=cpu_kernels,
                   environment={name: environment.get(name) for name in ENVIRONMENT})

    def compute(self, kind: str, model: Path, compute: Callable[[], dict[str, torch.Tensor]], **depends_on: object
                ) -> dict[str, torch.Tensor]:
        """Return the tensors of `compute`, which is not called if all processes can read them.

        Args:
            model: folder of the model that computes them.
            depends_on: what else decides the result; values that JSON can express.
        """
        if self.files is None:
            return compute()
        key = {"kind": kind, "model": self._digest(model)} | self.depends_on | depends_on
        data = self.files.read(key)
        if not group.any_process(data is None):
            self.used += 1
            return load(data)
        self.computed += 1
        tensors = compute()
        if group.rank() == 0:
            self.files.write(key, save({name: tensor.contiguous() for name, tensor in tensors.items()}))
        return tensors

    def finish(self) -> None:
        """Delete results that have not been used for long, and say how many were used."""
        if self.files is not None and group.rank() == 0:
            self.files.delete_excess()
            if self.used:
                print_line(f"evaluate: {self.used} of {self.used + self.computed} results of models were taken from "
                           f"{self.files.folder}")

    def _digest(self, folder: Path) -> str:
        if folder not in self._digests:
            self._digests[folder] = digest(folder)
        return self._digests[folder]


def join_rows(rows: list) -> dict[str, torch.Tensor]:
    """Join rows (lists of token ids, or 1-D tensors) of any lengths to two tensors."""
    tensors = [torch.as_tensor(row, dtype=None if isinstance(row, torch.Tensor) else torch.long) for row in rows]
    return {"flat": torch.cat(tensors) if tensors else torch.zeros(0),
            "lengths": torch.tensor([len(row) for row in rows], dtype=torch.long)}


def split_rows(joined: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Split what `join_rows` has joined."""
    return list(joined["flat"].split(joined["lengths"].tolist()))
