"""SIGKILL of Snakemake alone, or of its group as soon as a stage is made: no finished stage is made again.

Snakemake then has the mark of an unfinished job for a finished artifact.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.snakemake_runs import SnakemakeForks

ROOT = Path(__file__).parents[2]
RUN = Path("results/tiny")
STAGES = {"posts", "pairs", "base", "sft", "sft-merged", "reward"}
BEGUN, MADE = True, False
# What the kill waits for, seconds from then on, and whether all are killed. Without a stage they count from the start.
KILLS = [
    ("posts", BEGUN, 0.0, False), (None, BEGUN, 0.5, False), ("pairs", MADE, 0.0, True), (None, BEGUN, 1.2, False),
    ("base", BEGUN, 0.5, False), ("sft", BEGUN, 0.5, True), ("sft", MADE, 0.0, False), (None, BEGUN, 0.9, False),
    ("sft-merged", MADE, 0.1, True), ("reward", BEGUN, 0.0, False), (None, BEGUN, 0.7, False)]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """The project by links, beside a tiny dump."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("Snakefile", "environment.yml", "workflow", "profiles", "configs", "stages", "data"):
        (folder / name).symlink_to(ROOT / name)
    subprocess.run([sys.executable, "data/demo/generate.py", "--questions", "120", "--seed", "1", "--out", "dump"],
                   cwd=folder, check=True)
    return folder


def words(*options: str) -> list[str]:
    return ["--cores", "1", "reward", *options, "--config", "recipe=configs/tiny.yaml", "dump=dump", "name=tiny",
            "reward={train_pairs: 16}"]


def kill(forks: SnakemakeForks, project: Path, stage: str | None, begun: bool, seconds: float, all_of_them: bool
         ) -> int:
    """Run up to a moment, end Snakemake, and wait for the stage that is left; return Snakemake's exit status."""
    pid = forks.start(words(), project)
    until = time.monotonic() + 60
    while not (stage is None or (project / RUN / stage / "manifest.json").exists()
               or (begun and (project / RUN / f"{stage}.partial/request.json").exists())):
        assert time.monotonic() < until, stage
        time.sleep(0.002)
    time.sleep(seconds)
    for end in (os.killpg, os.kill) if all_of_them else (os.kill,):  # just started, it has no group of its own yet
        with suppress(ProcessLookupError):  # all was made
            end(pid, signal.SIGKILL)
    return forks.wait().code


def list_made(project: Path) -> dict[str, int]:
    """List the finished stages, each with what a second making would change: the inode of its folder."""
    return {file.parent.name: file.parent.stat().st_ino for file in (project / RUN).glob("*/.manifest.json")}


def test_no_finished_stage_is_made_again(snakemake_forks, project):
    made = {}
    for moment in KILLS:
        assert kill(snakemake_forks, project, *moment) == -signal.SIGKILL or moment == KILLS[-1], moment
        assert list_made(project) | made == list_made(project), moment
        made = list_made(project)
    assert "Nothing to be done" in snakemake_forks.run(words(), project).text
    assert list_made(project) == made and set(made) == STAGES


def test_what_the_command_line_forces_is_made_again(snakemake_forks, project):
    for options in (["--forcerun", "reward"], ["--force"], ["--forcerun", str(RUN / "reward/manifest.json")]):
        before = list_made(project)
        assert snakemake_forks.run(words(*options), project).code == 0
        after = list_made(project)
        assert {stage for stage in STAGES if after[stage] != before[stage]} == {"reward"}, options
