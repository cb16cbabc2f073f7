"""The short form of benchmarks/soak: a run that is disturbed ends with the bytes of an undisturbed one."""

import os
import random
import sys

from benchmarks.soak import run
from benchmarks.soak.disturbances import flip_byte
from tests.helpers.library_forks import IMPORT_VARIABLES

# Its first word is the Python that runs the stages.
SNAKEMAKE = "import sys; sys.executable = sys.argv.pop(1); from snakemake.cli import main; main()"


def test_a_disturbed_run_finishes_with_the_same_artifacts(tmp_path, capfd, monkeypatch, library_forks):
    monkeypatch.setattr(run, "SNAKEMAKE", (sys.executable, "-c", SNAKEMAKE, str(library_forks.shims / "python")))
    for name, value in IMPORT_VARIABLES.items():
        monkeypatch.setenv(name, value)
    words = ["--kills", "3", "--fills", "1", "--flips", "1", "--target", "base", "--folder", str(tmp_path / "soak")]
    code = run.main(words)
    said = capfd.readouterr().out
    assert code == 0 and said.endswith("6 disturbances, 0 problems\n"), said
    for name in ("SIGKILL to all", "SIGINT to all", "byte changed", "dated in the future"):
        assert name in said, said


def test_signals_take_turns_and_every_disturbance_is_planned():
    steps = run.plan(9, 2, 3, random.Random(1))
    assert [step for step in steps if step.startswith("SIG")] == [*run.KILLS, *list(run.KILLS)[:3]]
    assert [steps.count(name) for name in ("fill", "flip", "clock")] == [2, 3, 1]


def test_a_flip_changes_one_bit_of_a_checkpoint(tmp_path):
    assert flip_byte(tmp_path, random.Random(0)) is None
    checkpoint = tmp_path / "sft.partial/checkpoints/checkpoint-5"
    checkpoint.mkdir(parents=True)
    (checkpoint / "optimizer.pt").write_bytes(bytes(100))
    assert flip_byte(tmp_path, random.Random(0)) == checkpoint / "optimizer.pt"
    assert sum(byte.bit_count() for byte in (checkpoint / "optimizer.pt").read_bytes()) == 1


def test_checkpoints_are_listed_while_folders_vanish(tmp_path, monkeypatch):
    soak = run.Soak(tmp_path, "base", random.Random(0))
    gone, checkpoint = (tmp_path / run.RUN / name for name in ("pairs.partial/scratch", "sft.partial/x/checkpoint-5"))
    for folder in (gone, checkpoint):
        folder.mkdir(parents=True)
    (checkpoint / "complete.json").touch()
    scandir = os.scandir

    def scan(folder="."):
        if os.fspath(folder).rstrip("/") == str(gone):
            raise FileNotFoundError(gone)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", scan)
    assert soak._list_checkpoints() == {str(checkpoint / "complete.json")}


def test_a_finished_stage_that_is_made_again_is_a_problem(tmp_path):
    soak = run.Soak(tmp_path, "base", random.Random(0))
    for name in ("base", "base.new"):
        (tmp_path / run.RUN / name).mkdir(parents=True)
    (tmp_path / run.RUN / "base/.manifest.json").touch()
    soak.check_made()
    soak.check_made()
    assert soak.problems == []
    (tmp_path / run.RUN / "base").rename(tmp_path / run.RUN / "base.old")
    (tmp_path / run.RUN / "base.new").rename(tmp_path / run.RUN / "base")
    (tmp_path / run.RUN / "base/.manifest.json").touch()
    soak.check_made()
    assert soak.problems == ["base was finished, and is made again or gone"]


def test_a_difference_is_a_problem(tmp_path):
    for name, text in (("quiet", "1"), ("disturbed", "2")):
        folder = tmp_path / name / run.RUN / "base"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text('{"metrics": {}}')
        (folder / "weights").write_text(text)
    soak = run.Soak(tmp_path / "disturbed", "base", random.Random(0))
    soak.compare(tmp_path / "quiet")
    assert soak.problems == ["base/weights: differs"]
