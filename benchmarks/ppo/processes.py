"""Run ours and the peers in turns, each in its own process and environment, and take medians over steps."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.common.tables import ROOT
from benchmarks.data.stage_runs import say
from benchmarks.ppo.flop_floor import Rates, floor_seconds, flops
from benchmarks.ppo.workload import Shape, prompts

OURS, LEGACY, PUBLISHED, TUNED = "ours", "legacy TRL", "published script", "tuned legacy TRL"
MODERN, TORCHTUNE = "TRL 1.12", "torchtune"


@dataclass(frozen=True)
class Contender:
    """An implementation to time: its name, the module that runs it, and its Python interpreter."""

    name: str
    python: Path
    module: str
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def our_contender(precision: str, profile: bool = False) -> Contender:
    arguments = ("--precision", precision, "--profile", str(int(profile)))
    return Contender(OURS, Path(sys.executable), "benchmarks.ppo.ours", arguments)


def peer_contenders(folder: Path, shape: Shape, precision: str = "fp32") -> list[Contender]:
    """List the peers: legacy TRL in three configurations, the last TRL with PPO, torchtune; each may be missing.

    precision: of legacy TRL on a CPU; the others have their own.
    """
    def python(name: str) -> Path:
        return folder / name / "bin" / "python"

    def legacy(name: str, batch: int, **environment: str) -> Contender:
        return Contender(name, python("legacy_trl"), "benchmarks.ppo.peers.trl_0_11",
                         ("--generation_batch", str(batch), "--precision", precision), environment)

    return [legacy(LEGACY, shape.batch), legacy(PUBLISHED, 4),
            legacy(TUNED, shape.batch, PEER_F32="medium", PEER_ATTN="eager"),
            Contender(MODERN, python("modern_trl"), "benchmarks.ppo.peers.trl_1_12"),
            Contender(TORCHTUNE, python("torchtune"), "benchmarks.ppo.peers.torchtune")]


@dataclass(frozen=True)
class RunSettings:
    """Settings common to all contenders: steps after a warm-up, rounds of processes, threads, device."""

    steps: int = 2
    rounds: int = 2
    threads: int = 1
    gpu: bool = False

    @property
    def basis(self) -> str:
        """Name the seconds that ratios compare: CPU seconds of one thread hardly depend on other processes."""
        return "cpu" if self.threads == 1 and not self.gpu else "wall"

    def environment(self) -> dict[str, str]:
        variables = {"OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads),
                     "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
                     "TRL_EXPERIMENTAL_SILENCE": "1"}
        return variables if self.gpu else variables | {"CUDA_VISIBLE_DEVICES": ""}


class ContenderFailedError(Exception):
    """A contender did not run; the message is one line."""


def run_once(contender: Contender, shape: Shape, setting: RunSettings) -> dict:
    """Run one process of a contender and return the JSON that its worker wrote."""
    if not contender.python.exists():
        raise ContenderFailedError(f"not installed: there is no {contender.python}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = [contender.python, "-W", "ignore", "-m", contender.module, "--shape", shape.to_json(),
                   "--steps", str(setting.steps), "--out", out, *contender.arguments]
        process = subprocess.run(command, cwd=ROOT, env=os.environ | setting.environment() | contender.environment,
                              capture_output=True, text=True, check=False)
        if process.returncode:
            last_lines = process.stderr.strip().splitlines()[-1:] or [""]
            raise ContenderFailedError(f"failed with {process.returncode}: {last_lines[0]}")
        return json.loads(out.read_text(encoding="utf-8"))


def run_in_turns(
    contenders: list[Contender], shape: Shape, setting: RunSettings
) -> tuple[dict[str, list], dict[str, str]]:
    """Run the contenders in turns, A B A B; return runs by name, and the reasons of missing ones.

    Raises SystemExit if ours fails.
    """
    runs: dict[str, list] = {}
    missing: dict[str, str] = {}
    for number in range(setting.rounds):
        for contender in contenders:
            if contender.name in missing:
                continue
            try:
                run = run_once(contender, shape, setting)
            except ContenderFailedError as error:
                if contender.name.startswith(OURS):
                    raise SystemExit(f"{contender.name}: {error}") from None
                missing[contender.name] = str(error)
                say(f"{contender.name}: {error}")
                continue
            runs.setdefault(contender.name, []).append(run)
            medians = take_medians(run["steps"])
            phases = ", ".join(f"{name} {seconds['wall']:.2f}" for name, seconds in medians["phases"].items())
            say(f"{number + 1}/{setting.rounds} {contender.name}: {medians['cpu']:.2f} CPU s, {medians['wall']:.2f} s "
                f"a step ({phases})")
    return {name: results for name, results in runs.items() if name not in missing}, missing


def take_medians(steps: list[dict]) -> dict:
    """Take medians of the steps' seconds: in all, and by phase."""
    names = dict.fromkeys(name for step in steps for name in step["phases"])
    medians = {kind: median(step[kind] for step in steps) for kind in ("cpu", "wall", "foreign_cores")}
    phases = {name: {kind: median(step["phases"].get(name, {}).get(kind, 0.0) for step in steps)
                     for kind in ("cpu", "wall")} for name in names}
    return medians | {"phases": phases}


def summarise_runs(runs: list[dict], shape: Shape) -> dict:
    """Take medians over the steps of all runs of a contender, and the highest peak; tokens are those of responses."""
    steps = [step for run in runs for step in run["steps"]]
    medians, tokens = take_medians(steps), shape.batch * shape.response
    return medians | {"peak_mb": max(run["peak_mb"] for run in runs), "steps": len(steps),
                    "tokens_a_cpu_second": tokens / medians["cpu"], "tokens_a_second": tokens / medians["wall"],
                    "versions": runs[0]["versions"]}


def measure_machine(precision: str, setting: RunSettings) -> Rates:
    """Measure the machine's rates in a process with the contenders' settings."""
    process = subprocess.run([sys.executable, "-m", "benchmarks.ppo.flop_floor", "--precision", precision], cwd=ROOT,
                          env=os.environ | setting.environment(), stdout=subprocess.PIPE, text=True, check=True)
    return Rates(**json.loads(process.stdout))


def median_floor(shape: Shape, rates: Rates, steps: int) -> dict:
    """Compute the floor of our steps after the warm-up: median seconds in all and by phase, and GFLOP by phase."""
    lengths = [[len(prompt) for prompt in step] for step in prompts(shape, 1 + steps)[1:]]
    by_phase = [floor_seconds(shape, one, rates) for one in lengths]
    counts = [flops(shape, one) for one in lengths]
    return {"seconds": median(sum(one.values()) for one in by_phase),
            "phases": {name: median(one[name] for one in by_phase) for name in by_phase[0]},
            "gflop": {name: median(one[name] for one in counts) / 1e9 for name in counts[0]}}
