"""Checkpoints: whole or not at all, at whatever instant the process dies (CORRECTNESS M4)."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from stages.training import checkpoint


class Killed(BaseException):
    """The process died here: nothing catches it."""


def tensors(number):
    return {"weight": torch.full((3,), float(number)), "best.weight": torch.full((3,), number / 2)}


def save(root, number, keep=2):
    checkpoint.save_checkpoint(root, tensors(number), {"iteration": number}, number=number, keep=keep)


def newest_number(root):
    """Number of the checkpoint that would be loaded, its tensors checked."""
    actual = checkpoint.load_checkpoint(root)
    if actual is None:
        return None
    number = actual[1]["iteration"]
    assert all(torch.equal(t, actual[0][name]) for name, t in tensors(number).items())
    return number


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_the_newest_few_are_kept_under_their_numbers(tmp_path):
    assert checkpoint.load_checkpoint(tmp_path) is None
    for number in (5, 20, 999_999, 1_000_000):
        save(tmp_path, number)
    assert names(tmp_path) == ["checkpoint-1000000", "checkpoint-999999"] and newest_number(tmp_path) == 1_000_000
    (tmp_path / "checkpoint.tmp").mkdir()
    (tmp_path / "history.jsonl").touch()
    checkpoint.delete_checkpoints(tmp_path)
    assert names(tmp_path) == ["history.jsonl"]


def test_tensors_come_back_bit_for_bit_whatever_their_kind_and_place_in_memory(tmp_path):
    one = torch.randn(4, 6)
    kinds = {"view": one[:, ::2], "shared": one, "half": one.bfloat16(), "bytes": one.byte(), "count": torch.tensor(3)}
    checkpoint.save_checkpoint(tmp_path, kinds, {"best": float("-inf"), "none": None, "share": 0.1}, number=1, keep=1)
    actual, facts = checkpoint.load_checkpoint(tmp_path)
    assert facts == {"best": float("-inf"), "none": None, "share": 0.1} and actual.keys() == kinds.keys()
    assert all(actual[name].dtype == t.dtype and torch.equal(actual[name], t) for name, t in kinds.items())


def steps_of_a_save(monkeypatch, die_at):
    """Count what a save does to the disk; at step `die_at` half of it is done, and the process is gone."""
    count = iter(range(1000))
    real = {name: getattr(owner, name) for owner, name in ((os, "rename"), (os, "fsync"), (shutil, "rmtree"))}
    write, write_text = checkpoint.save_file, Path.write_text

    def dying(half, whole):
        def step(*arguments, **more):
            if next(count) == die_at:
                half(*arguments)
                raise Killed
            return whole(*arguments, **more)

        return step

    def half_a_file(_, path):
        path.write_bytes(b"\x10\x00\x00")

    def half_a_folder(folder, **_):
        for file in sorted(Path(folder).glob("*"))[:1]:
            file.unlink()

    nothing = lambda *_: None  # noqa: E731
    monkeypatch.setattr(os, "rename", dying(nothing, real["rename"]))
    monkeypatch.setattr(os, "fsync", dying(nothing, real["fsync"]))
    monkeypatch.setattr(shutil, "rmtree", dying(half_a_folder, real["rmtree"]))
    monkeypatch.setattr(checkpoint, "save_file", dying(half_a_file, write))
    monkeypatch.setattr(Path, "write_text", dying(lambda path, text: write_text(path, text[:5]), write_text))


@pytest.mark.parametrize("keep", [1, 2])
def test_killed_at_any_step_of_a_save_a_whole_checkpoint_is_loaded_and_the_rest_is_cleaned(tmp_path, monkeypatch, keep):
    died = 0
    for die_at in range(50):
        root = tmp_path / str(die_at)
        for number in (10, 20):
            save(root, number, keep)
        (root / "checkpoint.tmp").mkdir()  # an earlier kill's
        with monkeypatch.context() as patch:
            steps_of_a_save(patch, die_at)
            try:
                save(root, 30, keep)
                break
            except Killed:
                died += 1
        published = (root / "checkpoint-000030").exists()
        assert newest_number(root) == (30 if published else 20)
        save(root, 40, keep)
        assert newest_number(root) == 40 and len(names(root)) == keep and "checkpoint.tmp" not in names(root)
    # draft, tensors, facts, seal, four flushes, rename, flush, an old one
    assert died == 11 and newest_number(root) == 30


def test_a_disk_that_fails_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    save(tmp_path, 10)
    for place, name in ((os, "rename"), (os, "fsync"), (checkpoint, "save_file")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(OSError, match="No space left"):
                save(tmp_path, 20)
        assert newest_number(tmp_path) == 10
    save(tmp_path, 20)
    assert newest_number(tmp_path) == 20 and names(tmp_path) == ["checkpoint-000010", "checkpoint-000020"]


@pytest.mark.parametrize("file", ["state.safetensors", "state.json", "complete.json"])
@pytest.mark.parametrize("harm", ["cut", "gone", "flipped"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it_with_a_word(tmp_path, capsys, file, harm):
    for number in (10, 20):
        save(tmp_path, number)
    damaged = tmp_path / "checkpoint-000020" / file
    if harm == "cut":
        damaged.write_bytes(damaged.read_bytes()[:-2])
    elif harm == "flipped":
        content = damaged.read_bytes()
        damaged.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    else:
        damaged.unlink()
    assert newest_number(tmp_path) == 10
    said = capsys.readouterr().err
    state = "unfinished" if (file, harm) == ("complete.json", "gone") else "damaged"
    assert f"checkpoint-000020 is {state}" in said and said.count("\n") == 1
    save(tmp_path, 20)  # the run comes by again
    assert newest_number(tmp_path) == 20


@pytest.mark.parametrize("content", ["[]", '["state.json"]', "null", "7", '"state.json"', "[" * 100_000, "{"])
def test_a_seal_that_lists_no_digests_is_damage(tmp_path, capsys, content):
    for number in (10, 20):
        save(tmp_path, number)
    (tmp_path / "checkpoint-000020" / "complete.json").write_text(content)
    assert newest_number(tmp_path) == 10
    assert "checkpoint-000020 is damaged" in capsys.readouterr().err


def test_another_torch_is_said(tmp_path, capsys):
    save(tmp_path, 10)
    assert newest_number(tmp_path) == 10 and not capsys.readouterr().err
    facts = tmp_path / "checkpoint-000010" / "state.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"torch": "1.0"}))
    checkpoint.seal_checkpoint(facts.parent)
    assert newest_number(tmp_path) == 10 and "is of torch 1.0, this is" in capsys.readouterr().err


def test_nothing_is_pickled(tmp_path):
    save(tmp_path, 10)
    assert names(tmp_path / "checkpoint-000010") == ["complete.json", "state.json", "state.safetensors"]
