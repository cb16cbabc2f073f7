"""Votes are pairs that can be trained on, whatever happens while they are written."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import datasets
import pyarrow.parquet as pq
import pytest

from stages import reward
from stages.artifacts import artifact
from stages.chat import votes as votes_module
from stages.chat.views import Answer
from stages.chat.votes import TIES, TYPED, VOTES, Comparison, Votes, build_row, parse_models
from stages.command_line import command
from stages.recipe.recipe import load_recipe
from stages.stackexchange.pairs.table import SCHEMA, read_pairs
from tests.helpers import demo_run

HOW = {"temperature": 0.7, "most_tokens": 40, "samples": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return demo_run.save_run(tmp_path_factory.mktemp("runs") / "tiny")


def write(policy: str, text: str) -> Answer:
    return Answer(policy, f"digest of {policy}", text=text, rewards=[0.5], ended=True)


def compare(number: int, row: dict | None = None) -> Comparison:
    """PPO's answer first."""
    question = row["question"] if row else f"which flag {number}"
    return Comparison(question, row, [write("PPO", f"use the flag {number}"), write("SFT", "read the file")], HOW)


def test_votes_are_pairs_and_load_as_a_data_set(tmp_path, run):
    votes, pair = Votes(tmp_path / "votes"), next(read_pairs(run / "pairs", "evaluation"))
    assert votes.add(compare(1), 0) == tmp_path / "votes" / VOTES
    votes.add(compare(2, pair), 0)
    assert votes.add(compare(3), None) == tmp_path / "votes" / TIES
    assert all(pq.read_schema(file).equals(SCHEMA) for file in tmp_path.glob("votes/*/*.parquet"))
    typed, known = read_pairs(tmp_path / "votes", "reward")
    assert typed["site"] == TYPED and typed["qid"] > 0 and typed["score_j"] > typed["score_k"]
    assert (known["site"], known["qid"], known["question"]) == (pair["site"], pair["qid"], pair["question"])
    assert known["authors"][1:] == ["PPO", "SFT"] and len(known["licenses"]) == len(known["author_urls"]) == 3
    assert known["metadata"][1] == "https://tiny"
    assert parse_models(known) == (("PPO", "digest of PPO"), ("SFT", "digest of SFT"))
    assert json.loads(known["metadata"][3])["temperature"] == 0.7
    assert build_row(compare(1), 0)["qid"] == build_row(compare(1), 1)["qid"] != build_row(compare(2), 0)["qid"]
    files = [str(file) for file in (tmp_path / "votes/reward").glob("*.parquet")]
    loaded = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert sorted(loaded["response_j"]) == ["use the flag 1", "use the flag 2"]
    [tie] = read_pairs(tmp_path / "votes", "ties")
    assert tie["score_j"] == tie["score_k"] == 0


def test_votes_of_older_versions_are_counted(tmp_path):
    """All of them are in one file; some lack the dates of the answers."""
    votes, folder = Votes(tmp_path / "votes"), tmp_path / "votes/reward"
    votes.add(compare(1), 0)
    [file] = folder.glob("*.parquet")
    pq.write_table(pq.read_table(file).drop_columns(["date_j", "date_k"]), folder / "part-00000.parquet")
    file.unlink()
    votes.add(compare(2), 1)
    assert votes.count(("PPO", "digest of PPO"), ("SFT", "digest of SFT")) == ([1.0, 0.0], 2)
    assert [row["question"] for row in read_pairs(tmp_path / "votes", "reward")] == ["which flag 1", "which flag 2"]


ADD_MANY = """
import sys
from stages.chat.views import Answer
from stages.chat.votes import Comparison, Votes
answers = [Answer("PPO", "", text="yes", rewards=[0.5]), Answer("SFT", "", text="no", rewards=[0.5])]
for number in range(20):
    Votes(sys.argv[1]).add(Comparison(f"{sys.argv[2]} {number}", None, answers, {}), 0)
"""


def test_two_pages_at_once_lose_no_vote(tmp_path):
    """In two processes, and two threads of this one."""
    writers = [subprocess.Popen([sys.executable, "-c", ADD_MANY, str(tmp_path / "votes"), name]) for name in "ab"]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda number: Votes(tmp_path / "votes").add(compare(number), 0), range(40)))
    assert [writer.wait(60) for writer in writers] == [0, 0]
    recorded = {recorded["question"] for recorded in read_pairs(tmp_path / "votes", VOTES)}
    assert recorded == {f"which flag {n}" for n in range(40)} | {f"{name} {n}" for name in "ab" for n in range(20)}


@pytest.mark.parametrize("fails", ["write_table", "replace"])
def test_a_crash_while_a_vote_is_written_leaves_the_old_ones(tmp_path, monkeypatch, fails):
    votes = Votes(tmp_path / "votes")
    votes.add(compare(1), 0)

    def torn(table, path, **_):
        path.write_bytes(b"PAR1 half")
        raise OSError("the disk is full")

    def crash(*_):
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        if fails == "write_table":
            patched.setattr(votes_module.pq, "write_table", torn)
        else:
            patched.setattr(os, "replace", crash)
        with pytest.raises(OSError, match="full"):
            votes.add(compare(2), 0)
    assert [recorded["question"] for recorded in read_pairs(tmp_path / "votes", VOTES)] == ["which flag 1"]
    votes.add(compare(3), 0)
    assert len(list(read_pairs(tmp_path / "votes", "reward"))) == 2


def test_what_is_no_table_of_votes_is_left_alone(tmp_path):
    votes = Votes(tmp_path / "votes")
    votes.add(compare(1), 0)
    part = tmp_path / "votes/reward/part-00000.parquet"
    part.write_bytes(b"something of somebody")
    votes.add(compare(2), 0)
    with pytest.raises(ValueError, match="cannot be read"):
        votes.count(("PPO", "a"), ("SFT", "b"))
    assert part.read_bytes() == b"something of somebody"


def test_the_reward_stage_trains_on_votes(run, tmp_path):
    for number in range(8):
        Votes(tmp_path / "votes").add(compare(number), 0)
    config = replace(load_recipe("configs/tiny.yaml").reward, validation_share=0.25)
    inputs = {"base": run / "sft-merged", "pairs": tmp_path / "votes"}
    command.make(reward.run, config, tmp_path / "reward", inputs)
    manifest = json.loads((tmp_path / "reward/manifest.json").read_text())
    assert manifest["metrics"]["pairs"] == 6 and "adapter_model.safetensors" in manifest["files"]
    before = manifest["inputs"]["pairs"]["sha256"]
    Votes(tmp_path / "votes").add(compare(9), 0)
    assert artifact.digest(tmp_path / "votes") != before, "another vote is another input"
