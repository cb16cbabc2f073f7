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
from stages.chat import votes as votes_module
from stages.chat.votes import TIES, TYPED, VOTES, Question, VotedAnswer, Votes, parse_vote_models, vote_row
from stages.command_line import command
from stages.recipe.recipe import load_recipe
from stages.runtime import artifact
from stages.stackexchange.pairs.table import SCHEMA, read_pairs
from tests.helpers import demo_run

HOW = {"temperature": 0.7, "most_tokens": 40, "samples": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return demo_run.save_run(tmp_path_factory.mktemp("runs") / "tiny")


def written(policy: str, text: str) -> VotedAnswer:
    return VotedAnswer(policy, f"digest of {policy}", text, 0.5, True)


def row(number: int, question: Question | None = None, tie: bool = False) -> dict:
    question = question or Question(f"which flag {number}")
    return vote_row(question, written("PPO", f"use the flag {number}"), written("SFT", "read the file"), HOW, tie)


def test_votes_are_pairs_and_load_as_a_data_set(tmp_path, run):
    votes, pair = Votes(tmp_path / "votes"), next(read_pairs(run / "pairs", "evaluation"))
    votes.add(VOTES, row(1))
    votes.add(VOTES, row(2, Question(pair["question"], pair)))
    votes.add(TIES, row(3, tie=True))
    assert pq.read_schema(tmp_path / "votes/reward/part-00000.parquet").equals(SCHEMA)
    typed, known = read_pairs(tmp_path / "votes", "reward")
    assert typed["site"] == TYPED and typed["qid"] > 0 and typed["score_j"] > typed["score_k"]
    assert (known["site"], known["qid"], known["question"]) == (pair["site"], pair["qid"], pair["question"])
    assert known["authors"][1:] == ["PPO", "SFT"] and len(known["licenses"]) == len(known["author_urls"]) == 3
    assert known["metadata"][1] == "https://tiny"
    assert parse_vote_models(known) == (("PPO", "digest of PPO"), ("SFT", "digest of SFT"))
    assert json.loads(known["metadata"][3])["temperature"] == 0.7
    assert Question("one").columns()["qid"] == Question("one").columns()["qid"] != Question("two").columns()["qid"]
    loaded = datasets.load_dataset(str(tmp_path / "votes"), cache_dir=str(tmp_path / "cache"))
    assert {name: len(split) for name, split in loaded.items()} == {"reward": 2, "ties": 1}
    assert loaded["reward"][0]["response_j"] == "use the flag 1" and loaded["ties"][0]["score_j"] == 0


def test_votes_of_older_versions_are_continued(tmp_path):
    votes, file = Votes(tmp_path / "votes"), tmp_path / "votes/reward/part-00000.parquet"
    votes.add(VOTES, row(1))
    pq.write_table(pq.read_table(file).drop_columns(["date_j", "date_k"]), file)
    votes.add(VOTES, row(2))
    assert pq.read_schema(file).equals(SCHEMA) and len(votes.rows(VOTES)) == 2


ADD_MANY = """
import sys
from stages.chat.votes import Question, VOTES, Votes, VotedAnswer, vote_row
one, other = VotedAnswer("PPO", "", "yes", 0.5, True), VotedAnswer("SFT", "", "no", 0.5, True)
for number in range(20):
    Votes(sys.argv[1]).add(VOTES, vote_row(Question(f"{sys.argv[2]} {number}"), one, other, {}))
"""


def test_two_pages_at_once_lose_no_vote(tmp_path):
    """In two processes, and two threads of this one."""
    writers = [subprocess.Popen([sys.executable, "-c", ADD_MANY, str(tmp_path / "votes"), name]) for name in "ab"]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda number: Votes(tmp_path / "votes").add(VOTES, row(number)), range(40)))
    assert [writer.wait(60) for writer in writers] == [0, 0]
    recorded = {recorded["question"] for recorded in Votes(tmp_path / "votes").rows(VOTES)}
    assert recorded == {f"which flag {n}" for n in range(40)} | {f"{name} {n}" for name in "ab" for n in range(20)}


@pytest.mark.parametrize("fails", ["write_table", "replace"])
def test_a_crash_while_a_vote_is_written_leaves_the_old_ones(tmp_path, monkeypatch, fails):
    votes = Votes(tmp_path / "votes")
    votes.add(VOTES, row(1))

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
            votes.add(VOTES, row(2))
    assert [recorded["question"] for recorded in votes.rows(VOTES)] == ["which flag 1"]
    votes.add(VOTES, row(3))
    assert len(list(read_pairs(tmp_path / "votes", "reward"))) == 2


def test_what_is_no_table_of_votes_is_left_alone(tmp_path):
    votes = Votes(tmp_path / "votes")
    votes.add(VOTES, row(1))
    part = tmp_path / "votes/reward/part-00000.parquet"
    part.write_bytes(b"something of somebody")
    with pytest.raises(ValueError, match="left alone"):
        votes.add(VOTES, row(2))
    assert part.read_bytes() == b"something of somebody"


def test_the_reward_stage_trains_on_votes(run, tmp_path):
    for number in range(8):
        Votes(tmp_path / "votes").add(VOTES, row(number))
    config = replace(load_recipe("configs/tiny.yaml").reward, validation_share=0.25)
    inputs = {"base": run / "sft-merged", "pairs": tmp_path / "votes"}
    command.make(reward.run, config, tmp_path / "reward", inputs)
    manifest = json.loads((tmp_path / "reward/manifest.json").read_text())
    assert manifest["metrics"]["pairs"] == 6 and "adapter_model.safetensors" in manifest["files"]
    before = manifest["inputs"]["pairs"]["sha256"]
    Votes(tmp_path / "votes").add(VOTES, row(9))
    assert artifact.digest(tmp_path / "votes") != before, "another vote is another input"
