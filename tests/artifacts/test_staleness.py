"""Staleness by content: what Snakemake plans for a copied, cloned or touched run is what the digests say."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stages.artifacts import staleness
from stages.artifacts.manifest import read_record
from stages.command_line import command
from stages.recipe.recipe import load_recipe
from stages.runs.run_folder import start_run

ROOT = Path(__file__).parents[2]
STAGES = ("posts", "pairs", "base", "sft", "sft-merged")
RUN = Path("results/tiny")
DAY_NS = 86_400 * 10**9


def make(stage: str, name: str, **inputs) -> None:
    def run(config, out, **_):
        (out / "data").write_text(name)
        return {}

    command._make(stage, lambda: run, getattr(RECIPE, stage), RUN / name, inputs, {}, force=False, verify=False)


RECIPE = replace(load_recipe(ROOT / "configs/tiny.yaml"), dump=("a dump.xml",))


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A project with finished artifacts up to sft-merged, made by nothing but their requests."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("Snakefile", "environment.yml", "workflow", "profiles", "configs", "stages", "data"):
        Path(name).symlink_to(ROOT / name)
    Path("a dump.xml").write_text("posts")
    make("posts", "posts", dump=["a dump.xml"])
    make("pairs", "pairs", posts=RUN / "posts")
    make("base", "base", pairs=RUN / "pairs")
    make("sft", "sft", base=RUN / "base", pairs=RUN / "pairs")
    make("merge", "sft-merged", base=RUN / "base", adapter=RUN / "sft", pairs=RUN / "pairs")
    return folder


def times() -> dict[str, int]:
    return {name: (RUN / name / "manifest.json").stat().st_mtime_ns for name in STAGES}


def stale(recipe=RECIPE) -> dict[str, str]:
    reasons = staleness.align_times(RUN, recipe)
    marked = {name for name, value in times().items() if value == staleness.STALE_NS}
    assert marked == {reason.split(":")[0] for reason in reasons}
    fresh = [value for value in times().values() if value != staleness.STALE_NS]
    assert fresh == sorted(fresh) and all(value <= time.time_ns() for value in fresh), "inputs first, never the future"
    return dict(reason.split(": ", 1) for reason in reasons)


def touch(name: str, offset_ns: int) -> None:
    os.utime(name, ns=(time.time_ns() + offset_ns,) * 2)


@pytest.mark.parametrize("offset_ns", [-DAY_NS, 0, DAY_NS])
@pytest.mark.parametrize("name", ["a dump.xml", *(f"{RUN}/{stage}/manifest.json" for stage in STAGES)])
def test_times_make_nothing_stale(project, name, offset_ns):
    touch(name, offset_ns)
    assert stale() == {}


def test_a_copy_in_any_order_of_times_is_finished(project, tmp_path, monkeypatch):
    shutil.copytree(project, tmp_path / "copy", symlinks=True)
    monkeypatch.chdir(tmp_path / "copy")
    for number, stage in enumerate(STAGES):
        touch(RUN / stage / "manifest.json", -number * DAY_NS)
    assert stale() == {}


def test_contents_and_settings_make_stale_whatever_the_times(project):
    Path("a dump.xml").write_text("other posts")
    touch("a dump.xml", -DAY_NS)
    assert stale() == {"posts": "its input dump[0], a dump.xml, has changed"}
    Path("a dump.xml").write_text("posts")
    assert stale() == {}
    changed = replace(RECIPE, sft=replace(RECIPE.sft, learning_rate=0.5, log_to=("jsonl",)))
    assert stale(changed) == {"sft": "sft.learning_rate is 0.001, recipe.yaml says 0.5"}
    assert stale() == {}
    assert stale(replace(RECIPE, dump=("other.xml",))) == {"posts": "it was made from a dump.xml"}
    make_base_again()
    assert list(stale()) == ["sft", "sft-merged"]
    (RUN / "pairs/manifest.json").write_text("{")
    assert "pairs" in stale()


def make_base_again() -> None:
    shutil.rmtree(RUN / "base")
    time.sleep(0.01)  # its manifest has its seconds
    command._make("base", lambda: lambda config, out, **_: {"another": 1}, RECIPE.base, RUN / "base",
                  {"pairs": RUN / "pairs"}, {}, force=False, verify=False)


def test_a_large_dump_is_read_only_where_it_is_newer(project, monkeypatch):
    monkeypatch.setattr("stages.artifacts.lineage.MAX_HASHED_BYTES", 3)
    Path("a dump.xml").write_text("other")
    touch("a dump.xml", -DAY_NS)
    assert stale() == {}
    touch("a dump.xml", 0)
    assert list(stale()) == ["posts"]


def test_inputs_dated_in_the_future_are_no_inputs(project):
    posts, sft = ["posts: its input dump[0], a dump.xml, has changed"], ["sft: sft.seed is 0, recipe.yaml says 1"]
    for reasons in ([], posts, sft):
        assert staleness.dated_inputs(["a dump.xml"], reasons, "Snakefile") == ["a dump.xml"]
    touch("a dump.xml", DAY_NS)
    for files in (["a dump.xml"], []):  # none: of the hub
        assert staleness.dated_inputs(files, [], "Snakefile") == staleness.dated_inputs(files, sft, "Snakefile") == []
        assert staleness.dated_inputs(files, posts, "Snakefile") == ["Snakefile"]


def test_manifests_that_somebody_has_edited_raise_nothing(project):
    path = RUN / "pairs/manifest.json"
    manifest = json.loads(path.read_text())
    for inputs in ({"posts": {"path": str(RUN / "pairs"), "sha256": "0"}}, {"dump": ["x"]}, {"posts": 7}):
        path.write_text(json.dumps(manifest | {"inputs": inputs, "files": {"../../../a dump.xml": {}, "no": 3}}))
        assert "base: its input pairs, results/tiny/pairs, has changed" in staleness.align_times(RUN, RECIPE)


def test_nothing_is_touched_while_another_process_is_at_work(project):
    touch(RUN / "posts/manifest.json", 0)
    before = times()
    with open(RUN / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert staleness.align_times(RUN, replace(RECIPE, dump=("x",))) == [] and times() == before
    assert len(staleness.align_times(RUN, replace(RECIPE, dump=("x",)))) == 1


def test_a_run_marks_what_is_forced(project):
    start_run(RECIPE, [f"{RUN}/base/manifest.json", f"{RUN}/report/report.html"])
    assert [path.parent.name for path in RUN.glob("*/.forced")] == ["base"]
    assert all(read_record(RUN / name).state == "finished" for name in STAGES)


def plan(*words: str) -> list[str]:
    done = subprocess.run([sys.executable, "-m", "snakemake", "--cores", "1", "-n", "sft_merged", *words, "--config",
                           "recipe=tiny", "dump=a dump.xml", "name=tiny"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"^(?:local)?rule (\w+):", done.stdout + done.stderr, re.MULTILINE)


def test_snakemake_plans_by_content(project):
    """Without any record of its own, as after a clone."""
    for number, name in enumerate(["a dump.xml", *(RUN / stage / "manifest.json" for stage in STAGES)]):
        touch(name, (number % 2) * 2 * DAY_NS - number * DAY_NS)
    assert plan() == []
    assert plan("--forcerun", "sft") == ["sft", "merge", "sft_merged"]
    Path("a dump.xml").write_text("other posts")
    touch("a dump.xml", -DAY_NS)
    assert plan() == ["posts", "pairs", "base", "sft", "merge", "sft_merged"]
