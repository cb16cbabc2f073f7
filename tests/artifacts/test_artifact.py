"""The artifact contract: published by one rename or not at all; resume, set aside, lock, digest, atomic files."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.artifacts import artifact
from stages.artifacts.artifact import ArtifactError, artifact_folder, build, digest, is_complete, publish
from stages.artifacts.manifest import read_record
from stages.artifacts.run_facts import list_runs
from stages.command_line import command
from stages.recipe.sections.models import Merge
from stages.runtime import files

ROOT = Path(__file__).parents[2]
REQUEST = {"stage": "probe", "config": {"x": 1}, "inputs": {}}


def make(out: Path, request: dict = REQUEST, text: str = "made") -> None:
    with build(out, request) as partial:
        (partial / "data.txt").write_text(text)
        publish(partial, out, request | {"metrics": {}})


def test_published_by_rename_with_the_digest_of_every_file(tmp_path):
    out = tmp_path / "a"
    with build(out, REQUEST) as partial:
        (partial / "sub").mkdir()
        (partial / "sub" / "data.txt").write_text("abc")
        assert partial == tmp_path / "a.partial" and not out.exists()
        publish(partial, out, REQUEST | {"metrics": {"n": 1}})
    assert not partial.exists()
    manifest = artifact.read_manifest(out)
    assert manifest["metrics"] == {"n": 1}
    sha256_of_abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert manifest["files"] == {"sub/data.txt": {"bytes": 3, "sha256": sha256_of_abc}}
    assert is_complete(out, REQUEST)


def test_a_failure_publishes_nothing_and_keeps_what_was_begun(tmp_path):
    with pytest.raises(RuntimeError), build(tmp_path / "a", REQUEST) as partial:
        (partial / "checkpoint").write_text("step 3")
        raise RuntimeError
    assert not (tmp_path / "a").exists()
    with build(tmp_path / "a", REQUEST) as partial:
        assert (partial / "checkpoint").read_text() == "step 3"


def test_another_request_sets_the_begun_work_aside(tmp_path):
    with build(tmp_path / "a", REQUEST) as partial:
        (partial / "checkpoint").write_text("of x=1")
    with build(tmp_path / "a", REQUEST | {"config": {"x": 2}}) as partial:
        assert not (partial / "checkpoint").exists()
    assert (tmp_path / "a.set-aside-1" / "checkpoint").read_text() == "of x=1"


def test_mistakes_that_left_no_work_are_not_set_aside(tmp_path):
    for x in range(4):
        with pytest.raises(ValueError), build(tmp_path / "a", REQUEST | {"config": {"x": x}}) as partial:
            (partial / "traceback.txt").write_text("ValueError")
            raise ValueError
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["a.partial"]


def test_a_finished_artifact_of_another_request_is_not_overwritten(tmp_path):
    make(tmp_path / "a")
    with pytest.raises(ArtifactError, match=r"finished probe of other settings or inputs.*--force"):
        is_complete(tmp_path / "a", REQUEST | {"config": {"x": 2}})


OTHER = REQUEST | {"config": {"x": 2}}


@pytest.mark.parametrize("damage", [None, "", "{}", '{"stage": "pro'])
def test_a_finished_artifact_is_taken_up_again_whatever_became_of_its_manifest(tmp_path, damage):
    """Snakemake deletes the manifest of a job that it counts as failed, even if only its log was not written."""
    make(tmp_path / "a")
    before = digest(tmp_path / "a")
    (tmp_path / "a/manifest.json").unlink() if damage is None else (tmp_path / "a/manifest.json").write_text(damage)
    assert is_complete(tmp_path / "a", REQUEST)
    assert digest(tmp_path / "a") == before and not (tmp_path / "a.partial").exists()


@pytest.mark.parametrize("damage", ["data.txt is gone", "data.txt is cut", "no copy", "another request", "forced"])
def test_without_its_manifest_an_artifact_that_is_not_whole_or_not_wanted_is_made_anew(tmp_path, damage):
    make(tmp_path / "a", text="old")
    (tmp_path / "a/manifest.json").unlink()
    {"data.txt is gone": lambda: (tmp_path / "a/data.txt").unlink(),
     "data.txt is cut": lambda: (tmp_path / "a/data.txt").write_text("o"),
     "no copy": lambda: (tmp_path / "a/.manifest.json").unlink(),  # as of older versions
     "another request": lambda: None, "forced": lambda: artifact.force(tmp_path / "a")}[damage]()
    request = OTHER if damage == "another request" else REQUEST
    assert not is_complete(tmp_path / "a", request)
    make(tmp_path / "a", request, text="new")
    assert (tmp_path / "a" / "data.txt").read_text() == "new" and is_complete(tmp_path / "a", request)
    is_old_whole = damage == "another request"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a.lock", *[".old"] * is_old_whole, "a"]


@pytest.mark.parametrize("by_snakemake", [True, False])
def test_a_finished_artifact_of_other_settings_is_moved_and_comes_back_with_them(tmp_path, by_snakemake):
    out = tmp_path / "a"
    digests = []
    for request in (REQUEST, OTHER):
        if by_snakemake and out.exists():
            (out / "manifest.json").unlink()
        make(out, request, text=str(request["config"]))
        digests.append(digest(out))
    for number, request in ((0, REQUEST), (1, OTHER), (0, REQUEST)):
        if by_snakemake:
            (out / "manifest.json").unlink()
        assert artifact.restore(out, request) and is_complete(out, request) and digest(out) == digests[number]
        assert (out / "data.txt").read_text() == str(request["config"])
        assert len(list((tmp_path / ".old").iterdir())) == 1
    assert not artifact.restore(out, REQUEST | {"config": {"x": 3}})
    (old,) = (tmp_path / ".old").iterdir()
    record = read_record(old)
    assert record.state == "replaced" and record.manifest["config"] == OTHER["config"]
    (tmp_path / "recipe.yaml").write_text("{}")
    ((_, stages),) = (run.values() for run in list_runs(tmp_path))
    assert {stage["name"]: stage["state"] for stage in stages} == {"a": "finished", f".old/{old.name}": "replaced"}


def test_one_of_the_same_request_is_replaced_without_a_trace(tmp_path):
    make(tmp_path / "a", text="old")
    make(tmp_path / "a", text="new")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a.lock", "a"]


def test_a_cut_artifact_in_old_is_not_restored(tmp_path):
    make(tmp_path / "a", text="first")
    make(tmp_path / "a", OTHER)
    next((tmp_path / ".old").glob("a-*/data.txt")).write_text("cut")
    assert not artifact.restore(tmp_path / "a", REQUEST)


def test_the_last_few_of_a_name_stay_in_old_whatever_the_clock(tmp_path, capsys):
    def run(config, out, **_):
        (out / "data.txt").write_text(str(config.max_perplexity_change))
        return {}

    def make_number(number):
        command.make(run, Merge(max_perplexity_change=number), tmp_path / "a", {}, force=True)

    def numbers(pattern):
        return {path.read_text() for path in (tmp_path / ".old").glob(f"{pattern}/data.txt")}

    make(tmp_path / "a-merged", text="other")
    make(tmp_path / "a-merged", OTHER)
    for number in range(1, 5):
        make_number(number / 10)
    assert numbers("a-*") == {"0.1", "0.2", "0.3", "other"} and "deleting" not in capsys.readouterr().err
    for old in (tmp_path / ".old").iterdir():  # as if the clock had been set back since
        os.utime(old, ns=(10**19, 10**19) if (old / "data.txt").read_text() != "0.2" else (10**18, 10**18))
    make_number(0.5)
    assert numbers("*") == {"0.1", "0.3", "0.4", "other"}
    assert capsys.readouterr().err.count(f"deleting {tmp_path}/.old/a-") == 1
    cut = tmp_path / ".old" / "a-0123456789ab"  # as a kill in the midst of deleting leaves it
    (cut / "sub").mkdir(parents=True)
    assert artifact.list_old(tmp_path / "a")[0] == cut, "the next one to go"
    shutil.rmtree(cut)
    (tmp_path / "a" / "manifest.json").unlink()  # as Snakemake does
    command.make(run, Merge(max_perplexity_change=0.1), tmp_path / "a", {})
    assert numbers("*") == {"0.3", "0.4", "0.5", "other"} and "restored from .old/" in capsys.readouterr().err


def test_a_foreign_folder_is_refused_and_an_empty_one_is_not(tmp_path):
    (tmp_path / "home").mkdir()
    assert not is_complete(tmp_path / "home", REQUEST)  # Snakemake makes the folder of a declared output
    (tmp_path / "home" / "figures").mkdir()
    assert not is_complete(tmp_path / "home", REQUEST)  # however deep it lies
    (tmp_path / "home" / "figures" / "mine.png").write_text("years")
    with pytest.raises(ArtifactError, match="in the way"):
        is_complete(tmp_path / "home", REQUEST)
    (tmp_path / "home" / "figures" / "mine.png").unlink()
    (tmp_path / "home" / "thesis.doc").write_text("years")
    with pytest.raises(ArtifactError, match="in the way"):
        is_complete(tmp_path / "home", REQUEST)
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="in the way"):
        is_complete(tmp_path / "file", REQUEST)


def test_digest_names_the_ancestry(tmp_path):
    def chain(root: Path, text: str) -> str:
        make(root / "parent", text=text)
        make(root / "child", REQUEST | {"inputs": {"parent": digest(root / "parent")}}, text="same")
        return digest(root / "child")
    same, again, other = (chain(tmp_path / name, text) for name, text in (("1", "x"), ("2", "x"), ("3", "y")))
    assert same == again != other


def test_a_file_of_a_dump_is_read_once_for_each_state_of_it(tmp_path, monkeypatch):
    file, read, hash_file = tmp_path / "Posts.xml", [], files.hash_file
    monkeypatch.setattr(files, "hash_file", lambda path: read.append(path) or hash_file(path))
    file.write_text("1")
    before = digest(file)
    assert files.hash_input(file) == digest(file) == before and len(read) == 1
    assert digest(tmp_path) and len(read) == 1
    file.write_text("22")
    assert digest(file) != before and len(read) == 2


def test_digest_of_plain_files_and_folders(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a").write_text("1")
    before = digest(tmp_path / "d")
    (tmp_path / "d" / "a").rename(tmp_path / "d" / "b")
    assert digest(tmp_path / "d") != before
    assert digest(tmp_path / "d" / "b") == files.hash_file(tmp_path / "d" / "b")
    with pytest.raises(ArtifactError, match="make it first"):
        digest(tmp_path / "nothing")
    with build(tmp_path / "begun", REQUEST) as partial, pytest.raises(ArtifactError, match="not finished"):
        digest(partial)


def test_an_artifact_is_named_by_its_folder_or_its_manifest():
    assert artifact_folder("results/x/sft") == artifact_folder("results/x/sft/manifest.json") == Path("results/x/sft")


def test_json_is_written_whole(tmp_path):
    files.write_json(tmp_path / "x.json", {"ü": 1})
    assert json.loads((tmp_path / "x.json").read_text()) == {"ü": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


SLOW = """
import sys, time
from pathlib import Path
from stages.artifacts.artifact import build, publish
request = {"stage": "probe", "config": {"x": 1}, "inputs": {}}
with build(Path(sys.argv[1]), request) as partial:
    (partial / "checkpoint").write_text("half")
    time.sleep(60)
    publish(partial, Path(sys.argv[1]), request)
"""


def test_killed_in_the_middle_nothing_is_published_and_no_lock_stays(tmp_path):
    out, begun = tmp_path / "a", tmp_path / "a.partial" / "checkpoint"
    with subprocess.Popen([sys.executable, "-c", SLOW, str(out)], cwd=ROOT) as process:
        deadline = time.monotonic() + 30
        while not begun.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        with pytest.raises(ArtifactError, match="another process is making"), build(out, REQUEST):
            pass
        os.kill(process.pid, signal.SIGKILL)
    assert not out.exists()
    with build(out, REQUEST) as partial:
        assert (partial / "checkpoint").read_text() == "half"


def test_the_drafts_of_a_killed_process_are_not_published(tmp_path):
    with build(tmp_path / "a", REQUEST) as partial:
        (partial / "sub").mkdir()
        (partial / "sub" / "x.json.123.tmp").write_text("half")
    make(tmp_path / "a")
    assert not list((tmp_path / "a").rglob("*.tmp"))


def test_an_atomic_write_that_fails_leaves_the_old_file_and_no_draft(tmp_path):
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(RuntimeError), files.atomic_path(path) as draft:
        draft.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with files.atomic_path(path, sync=True) as draft:
        draft.write_text("new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("hard_links", [True, False])
def test_a_file_is_linked_or_where_the_file_system_cannot_copied(tmp_path, monkeypatch, hard_links):
    def refuse(*_):
        raise OSError("no hard links here")

    (tmp_path / "source").write_text("new")
    (tmp_path / "target").write_text("old")
    if not hard_links:
        monkeypatch.setattr(os, "link", refuse)
    files.link_or_copy(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_text() == "new"
    assert (tmp_path / "target").samefile(tmp_path / "source") == hard_links
