"""Artifacts are verified where they are read: every file against the manifest, hashed once for each change."""

import json
import os

import pytest

from stages import inspect
from stages.artifacts import artifact, manifest
from stages.artifacts.artifact import ArtifactError
from stages.artifacts.manifest import list_damage, verify_artifacts
from stages.command_line.command import check_input_kinds


@pytest.fixture
def run(tmp_path):
    for name in ("base", "pairs"):
        with artifact.build(tmp_path / name, {"stage": name}) as partial:
            (partial / "weights.bin").write_bytes(bytes(range(256)) * 8)
            (partial / "part").mkdir()
            (partial / "part/rows.txt").write_text("rows")
            artifact.publish(partial, tmp_path / name, {"stage": name, "config": {}, "inputs": {}})
    return tmp_path


def flip_byte(path):
    """Change one byte and nothing that a directory listing shows."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def count_hashed(monkeypatch) -> list[str]:
    hashed = []

    def hash_files(files):
        hashed.extend(file.name for file in files)
        return artifact.hash_files(files)

    monkeypatch.setattr(manifest, "hash_files", hash_files)
    return hashed


def test_a_file_is_hashed_once_and_again_when_it_changes(run, monkeypatch):
    hashed, both = count_hashed(monkeypatch), [run / "base", run / "pairs"]
    verify_artifacts(both, run / "logs")
    assert sorted(hashed) == ["rows.txt", "rows.txt", "weights.bin", "weights.bin"]
    verify_artifacts(both, run / "logs")
    assert len(hashed) == 4
    verify_artifacts(both, run / "logs", always=True)
    assert len(hashed) == 8
    os.utime(run / "base/weights.bin")
    verify_artifacts(both, run / "logs")
    assert hashed[8:] == ["weights.bin"]


def test_a_flipped_byte_is_one_line_that_names_the_file(run):
    verify_artifacts([run / "base"], run / "logs")
    flip_byte(run / "base/weights.bin")
    with pytest.raises(ArtifactError, match=r"base is damaged: weights\.bin is not what was published.*run its stage"):
        verify_artifacts([run / "base"], run / "logs")
    with pytest.raises(ArtifactError):  # it is not remembered as verified
        verify_artifacts([run / "base"], run / "logs")


@pytest.mark.parametrize(("damage", "problem"), [
    (lambda base: (base / "weights.bin").write_bytes(b"short"), "has 5 bytes"),
    (lambda base: (base / "weights.bin").unlink(), "weights.bin is gone"),
    (lambda base: (base / "manifest.json").write_text("{}"), "it names no stage"),
    (lambda base: (base / "manifest.json").write_text('{"stage": "base"}'), "lists no files"),
    (lambda base: (base / "manifest.json").write_text("garbage"), "cannot be read")])
def test_what_else_is_damaged(run, damage, problem):
    damage(run / "base")
    with pytest.raises(ArtifactError, match=problem):
        verify_artifacts([run / "pairs", run / "base"], run / "logs")
    assert problem in list_damage(run / "base")[0]


def test_a_damaged_memory_of_what_was_verified_costs_only_time(run, monkeypatch):
    verify_artifacts([run / "base"], run / "logs")
    for text in ("garbage", "[]"):
        (run / "logs" / manifest.VERIFIED).write_text(text)
        hashed = count_hashed(monkeypatch)
        verify_artifacts([run / "base"], run / "logs")
        assert len(hashed) == 2
        assert json.loads((run / "logs" / manifest.VERIFIED).read_text())


def test_folders_that_are_no_artifacts_are_left_alone(run, tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/file").write_text("x")
    verify_artifacts([tmp_path / "plain", tmp_path / "missing"], run / "logs")
    assert not (run / "logs").exists()


def test_inspect_verifies_a_run_and_its_exit_code_says_so(run, capsys):
    assert inspect.main(["--verify", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{run}/base: as published", f"{run}/pairs: as published"]
    flip_byte(run / "pairs/weights.bin")
    assert inspect.main(["--verify", str(run)]) == 1
    assert "weights.bin is not what was published" in capsys.readouterr().out.splitlines()[1]
    assert inspect.main(["--verify", str(run / "logs")]) == 1
    assert "no finished artifact" in capsys.readouterr().err


@pytest.mark.parametrize(("label", "stage", "says"), [
    ("pairs", "base", "--pairs: .* was made by base: give the folder that pairs made"),
    ("posts", "pairs", "--posts: .* was made by pairs: give the folder that posts made"),
    ("base", "pairs", "--base: .* was made by pairs and holds no model"),
    ("policy.ppo", "evaluate", "--policy: .* was made by evaluate and holds no model"),
    ("adapter[0]", "gather", "--adapter: .* holds no model"),
    ("pairs", "gather", None), ("shares[1]", "pairs", None), ("base", "merge", None), ("evaluate", "evaluate", None),
    ("policy.dpo", "dpo", None), ("pairs", None, None)])
def test_an_artifact_of_another_kind_is_refused_before_anything_is_loaded(label, stage, says, tmp_path):
    if stage:
        (tmp_path / "manifest.json").write_text(f'{{"stage": "{stage}"}}')
    sources = {label: {"path": str(tmp_path), "sha256": "0"}}
    if says is None:
        check_input_kinds(sources)
    else:
        with pytest.raises(ArtifactError, match=says):
            check_input_kinds(sources)
