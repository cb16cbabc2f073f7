"""Runs of ours and of the peers: each in a process and an environment of its own, in turns; medians over steps."""

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
from benchmarks.ppo.flop_floor import Rates, flops, seconds
from benchmarks.ppo.workload import Shape, prompts

OURS, LEGACY, PUBLISHED, TUNED = "ours", "legacy TRL", "published script", "tuned legacy TRL"
MODERN, TORCHTUNE = "TRL 1.12", "torchtune"


@dataclass(frozen=True)
class Contender:
    """What is timed: the module that runs it, in which Python."""

    name: str
    python: Path
    module: str
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def ours(precision: str, profile: bool = False) -> Contender:
    arguments = ("--precision", precision, "--profile", str(int(profile)))
    return Contender(OURS, Path(sys.executable), "benchmarks.ppo.ours", arguments)


def peers(folder: Path, shape: Shape) -> list[Contender]:
    """Legacy TRL in three ways, the last TRL with PPO, torchtune; whether they are there is seen when they run."""
    def python(name: str) -> Path:
        return folder / name / "bin" / "python"

    def legacy(name: str, batch: int, **environment: str) -> Contender:
        return Contender(name, python("legacy_trl"), "benchmarks.ppo.peers.trl_0_11",
                         ("--generation_batch", str(batch)),
                         environment)

    return [legacy(LEGACY, shape.batch), legacy(PUBLISHED, 4),
            legacy(TUNED, shape.batch, PEER_F32="medium", PEER_ATTN="eager"),
            Contender(MODERN, python("modern_trl"), "benchmarks.ppo.peers.trl_1_12"),
            Contender(TORCHTUNE, python("torchtune"), "benchmarks.ppo.peers.torchtune")]


@dataclass(frozen=True)
class Setting:
    """How all contenders run alike: steps after a warm-up, processes of each in turns, threads, on which device."""

    steps: int = 2
    rounds: int = 2
    threads: int = 1
    gpu: bool = False

    @property
    def basis(self) -> str:
        """Which seconds ratios are of: those of one thread do not depend on who else works on the machine."""
        return "cpu" if self.threads == 1 and not self.gpu else "wall"

    def environment(self) -> dict[str, str]:
        own = {"OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads), "OMP_WAIT_POLICY": "PASSIVE",
               "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
        return own if self.gpu else own | {"CUDA_VISIBLE_DEVICES": ""}


class FailedError(Exception):
    """A contender that did not run, and why, in a line."""


def once(contender: Contender, shape: Shape, setting: Setting) -> dict:
    """One process of one contender: what its worker wrote."""
    if not contender.python.exists():
        raise FailedError(f"not here: there is no {contender.python}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = [contender.python, "-W", "ignore", "-m", contender.module, "--shape", shape.written(),
                   "--steps", str(setting.steps), "--out", out, *contender.arguments]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | setting.environment() | contender.environment,
                              capture_output=True, text=True, check=False)
        if done.returncode:
            words = done.stderr.strip().splitlines()[-1:] or [""]
            raise FailedError(f"failed with {done.returncode}: {words[0]}")
        return json.loads(out.read_text(encoding="utf-8"))


def in_turns(contenders: list[Contender], shape: Shape, setting: Setting) -> tuple[dict[str, list], dict[str, str]]:
    """Runs of each by name, A B A B; and why those that are missing are. SystemExit when one of ours fails."""
    runs: dict[str, list] = {}
    missing: dict[str, str] = {}
    for number in range(setting.rounds):
        for one in contenders:
            if one.name in missing:
                continue
            try:
                run = once(one, shape, setting)
            except FailedError as error:
                if one.name.startswith(OURS):
                    raise SystemExit(f"{one.name}: {error}") from None
                missing[one.name] = str(error)
                say(f"{one.name}: {error}")
                continue
            runs.setdefault(one.name, []).append(run)
            cpu, wall = (median(step[kind] for step in run["steps"]) for kind in ("cpu", "wall"))
            say(f"{number + 1}/{setting.rounds} {one.name}: {cpu:.2f} CPU s, {wall:.2f} s a step")
    return {name: found for name, found in runs.items() if name not in missing}, missing


def summary(runs: list[dict], shape: Shape) -> dict:
    """Medians over the steps of all runs of one contender; the highest peak; tokens are those of responses."""
    steps = [step for run in runs for step in run["steps"]]
    found = {kind: median(step[kind] for step in steps) for kind in ("cpu", "wall", "foreign_cores")}
    names = dict.fromkeys(name for step in steps for name in step["phases"])
    phases = {name: {kind: median(step["phases"].get(name, {}).get(kind, 0.0) for step in steps)
                     for kind in ("cpu", "wall")} for name in names}
    tokens = shape.batch * shape.response
    return found | {"peak_mb": max(run["peak_mb"] for run in runs), "steps": len(steps), "phases": phases,
                    "tokens_a_cpu_second": tokens / found["cpu"], "tokens_a_second": tokens / found["wall"],
                    "versions": runs[0]["versions"]}


def rates(precision: str, setting: Setting) -> Rates:
    """The machine's, measured as the contenders run."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.ppo.flop_floor", "--precision", precision], cwd=ROOT,
                          env=os.environ | setting.environment(), stdout=subprocess.PIPE, text=True, check=True)
    return Rates(**json.loads(done.stdout))


def floor_of(shape: Shape, rates: Rates, steps: int) -> dict:
    """The floor of the steps that ours takes after its warm-up: seconds and GFLOP by phase, medians; their sum."""
    lengths = [[len(prompt) for prompt in step] for step in prompts(shape, 1 + steps)[1:]]
    by_phase = [seconds(shape, one, rates) for one in lengths]
    counts = [flops(shape, one) for one in lengths]
    return {"seconds": median(sum(one.values()) for one in by_phase),
            "phases": {name: median(one[name] for one in by_phase) for name in by_phase[0]},
            "gflop": {name: median(one[name] for one in counts) / 1e9 for name in counts[0]}}
