"""Say what a command line runs side by side: seeds, and the processes of a training stage on one node or several.

Seeds (`--config 'seeds=[0, 1, 2]'`): questions are made once, in results/NAME/posts. Everything from the split on is
made once a seed, in results/NAME/seed-N, which is a run of its own with a recipe.yaml. Without seeds there is one run,
results/NAME.

Processes: on one node the stage starts them itself (--processes). On several nodes of one Slurm job, srun starts
torchrun once on each.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stages.recipe.ranges import SEED
from stages.recipe.recipe import Recipe
from stages.recipe.schema import SettingsError
from stages.runtime.processes import DRIVER

SEEDS = "seeds"  # key of --config
WILDCARD = "{seed}"
MAX_SEEDS = 1000
GPUS = re.compile(r"gpu(?::[\w.]+)?:(\d+)")  # of a job's resource gres: gpu:8, gpu:a100:8
FIRST_PORT, PORTS = 20_000, 10_000  # below those that Linux gives to outgoing connections; jobs of one node differ
# After SIGTERM a stage finishes its iteration and saves a checkpoint. Slurm sets the real limit.
SHUTDOWN_SECONDS = 86_400


@dataclass(frozen=True)
class SeededRuns:
    """The runs of one command line.

    root: results/NAME. recipes: by seed; empty if there is one run.
    """

    root: str
    recipes: dict[int, Recipe] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Return the folder of a run; of several, with Snakemake's wildcard for the seed."""
        return f"{self.root}/seed-{WILDCARD}" if self.recipes else self.root

    @property
    def pattern(self) -> str:
        """Return what the wildcard matches."""
        return "|".join(map(str, self.recipes)) or r"\d+"

    def list_runs(self) -> dict[Path, Recipe]:
        """Return the recipe of each seed by the folder of its run."""
        return {Path(self.folder.replace(WILDCARD, str(seed))): recipe for seed, recipe in self.recipes.items()}

    def every(self, *paths: str) -> list[str]:
        """Return the paths for every seed; one without the wildcard stands for itself."""
        return list(dict.fromkeys(path.replace(WILDCARD, str(seed)) for path in paths
                                  for seed in self.recipes or ("",)))

    def share_cores(self, cores: int | None, processes: int | None, runs_here: bool) -> int | None:
        """Return the threads of a job: all cores for one run, a share of them where seeds run side by side.

        A cluster runs each job on a machine of its own.

        Args:
            processes: that a stage starts, each with a thread at least.
        """
        if not (self.recipes and runs_here and cores):
            return cores
        return min(cores, max(cores // len(self.recipes), processes or 1))


def find_start_models(manifests: dict[str, str]) -> Callable:
    """Return Snakemake's input function for the model that an adapter is merged into.

    Args:
        manifests: by stage, with the wildcard for the seed.
    """
    return lambda wildcards: manifests[wildcards.stage].replace(WILDCARD, wildcards.get("seed", ""))


def parse_seeds(config: dict) -> list[int]:
    """Return the seeds of --config; none: one run, with the seeds of its recipe."""
    if SEEDS not in config:
        return []
    values = config[SEEDS] if isinstance(config[SEEDS], list) else []
    seeds = [int(str(value)) for value in values if re.fullmatch(r"\d{1,10}", str(value), re.ASCII)]
    if not 0 < len(values) == len(set(seeds)) <= MAX_SEEDS or not all(seed in SEED for seed in seeds):
        raise SettingsError(f"--config: seeds must be a list of 1 to {MAX_SEEDS:,} whole numbers {SEED}, none twice, "
                            f"as in 'seeds=[0, 1, 2]', not {str(config[SEEDS])!r}")
    if "seed" in config:
        raise SettingsError("--config: give seed=N for one run, or seeds=[...] for several, not both")
    return sorted(seeds)  # the order changes nothing


@dataclass(frozen=True)
class Placement:
    """Nodes, and processes on each of them; None: one a GPU of the rule, or as many as the stage chooses.

    The methods are what Snakemake calls for the parameters of a rule.
    """

    nodes: int = 1
    processes: int | None = None

    @property
    def resources(self) -> dict[str, int | str]:
        """Return resources for Slurm's executor: it writes them into the sbatch command."""
        if self.nodes == 1:
            return {}
        # mpi: the rule's own command calls srun. tasks_per_gpu: otherwise the number of tasks, for each GPU.
        return {"nodes": self.nodes, "mpi": "srun", "tasks": self.nodes, "tasks_per_gpu": 0}

    @property
    def params(self) -> dict[str, Callable]:
        """Return what the shell command of a rule needs: its launcher, and the options that start processes."""
        return {"launcher": self.launcher, "processes": self.options}

    def launcher(self, wildcards, resources: Mapping, threads: int) -> str:
        """Return what comes before `python -m stages.NAME` in the shell: nothing on one node."""
        if self.nodes == 1:
            return ""
        count = self._count(resources) or 1
        own_threads = max(1, threads // count)
        # The shell of the job is on its first node. A node whose processes have stopped does not end the others, which
        # may be saving a checkpoint: they notice by themselves (stages/distributed).
        return (f"srun --nodes={self.nodes} --ntasks={self.nodes} --ntasks-per-node=1 --cpus-per-task={threads} "
                f"--kill-on-bad-exit=0 env OMP_NUM_THREADS={own_threads} MKL_NUM_THREADS={own_threads} "
                f"torchrun --nnodes={self.nodes} --nproc-per-node={count} --shutdown-timeout={SHUTDOWN_SECONDS} "
                f'--rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" '
                f'--rdzv-endpoint="$(hostname):$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))" --no-python')

    def options(self, wildcards, resources: Mapping) -> list[str]:
        """Return the options of a stage that starts its processes itself."""
        count = self._count(resources)
        return ["--processes", str(count)] if self.nodes == 1 and count else []

    def _count(self, resources: Mapping) -> int | None:
        """Return the number of processes on each node; None: the stage chooses it."""
        gpus = GPUS.fullmatch(str(resources.get("gres", "")))
        return self.processes or (gpus and int(gpus[1])) or None


def share_cores(run: str, threads: int, processes: int | None, targets: Callable) -> dict[str, Callable]:
    """Return the threads of the reward model and of the judge, as functions of Snakemake's wildcards.

    Each has half of the cores: a process that waits for no other does more in the same time. One has all of them if
    the other one is made already or not wanted, and on a GPU, whose memory they would share. The number of processes
    does not change what is made.

    Args:
        run: folder of the run, with the wildcard for the seed.
        threads: of the machine.
        processes: that a stage starts, each with a thread at least.
        targets: returns those of the command line, which Snakemake knows once it has read its rules.
    """
    def count_threads(other: str, share: int) -> Callable:
        def count(wildcards) -> int:
            is_made = Path(f"{run}/{other}/manifest.json".format(**wildcards)).exists()
            return threads if is_made or DRIVER.exists() or _names_one(targets()) else share
        share = min(threads, max(share, processes or 1))
        return count

    return {"reward": count_threads("judge", (threads + 1) // 2),
            "judge": count_threads("reward", max(1, threads // 2))}


def _names_one(targets: Collection[str]) -> bool:
    """Return whether the command line wants the reward model or the judge alone; without a target, it wants all."""
    return any(targets and set(targets) <= {stage, f"{stage}_merged"} for stage in ("reward", "judge"))


def parse_shares(config: dict) -> int:
    """Return the number of jobs that the pairs are split over (key: shares)."""
    return _parse_count(config, "shares", 9999)


def parse_placement(config: dict, runs_here: bool = False) -> Placement:
    """Return where the processes of the training stages run (keys: nodes, processes).

    Args:
        runs_here: whether this machine does the work; it is one node.
    """
    nodes = _parse_count(config, "nodes", 999)
    if nodes > 1 and runs_here:
        raise SettingsError(f"--config: nodes={nodes} needs Slurm: add --profile profiles/slurm")
    return Placement(nodes, _parse_count(config, "processes", 999) if "processes" in config else None)


def _parse_count(config: dict, key: str, most: int) -> int:
    text = str(config.get(key, 1))
    if not re.fullmatch(r"[1-9]\d{0,3}", text, re.ASCII) or int(text) > most:
        raise SettingsError(f"--config: {key} must be a whole number from 1 to {most}, not {text!r}")
    return int(text)
