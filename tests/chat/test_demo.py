"""What is behind the demo page: answers as they are written, votes that can be trained on, what it says when it cannot.

The page itself, in a browser, is in test_demo_page.py.
"""

import json
import math
import os
import random
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest
import torch

from stages import demo, reward
from stages.chat import views
from stages.chat import votes as votes_module
from stages.chat.controller import ChatController
from stages.chat.streaming import BEST_OF_N, ChatModels, SamplingSettings
from stages.chat.token_text import Pieces
from stages.chat.votes import TIES, TYPED, VOTES, Question, Votes, Written, models_of, vote_row
from stages.generation.best_of_n import best_of_kl
from stages.generation.sampler import sample
from stages.modeling.load import AutoModelForCausalLM
from stages.modeling.packed.token_logprobs import response_logprobs
from stages.recipe.recipe import load
from stages.reward_modeling.load import load_merged_reward
from stages.runtime import command
from stages.stackexchange.pairs.table import SCHEMA, rows_of
from tests.helpers import demo_run

QUESTION = "which flag do I use to open the port"
HOW = {"temperature": 0.7, "most_tokens": 40, "samples": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return demo_run.save_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture(scope="module")
def speakers(run):
    return ChatModels({"SFT": run / "sft-merged", "PPO": run / "ppo-merged"}, run / "reward-merged")


@pytest.fixture
def talk(speakers, run, tmp_path):
    return ChatController(speakers, run / "pairs", Votes(tmp_path / "votes"), {"SFT": "aa", "PPO": "bb", BEST_OF_N: "aa by cc"})


def asked(speakers, manner: SamplingSettings, name: str):
    """The prompt, and every number that an answer had while it grew, with the answer."""
    prompt, grown = speakers.prompt(QUESTION, manner), []
    for answer in speakers.answer(name, prompt, manner):
        grown.append(len(answer.tokens))
    return prompt, grown, answer


def sampled(speakers, name: str, prompts: list, manner: SamplingSettings) -> list[list[int]]:
    return sample(speakers.models[name], prompts, max_new_tokens=manner.most_tokens, temperature=manner.temperature,
                  stop_ids=[speakers.tokenizer.eos_token_id],
                  generator=torch.Generator().manual_seed(manner.seed)).responses


@pytest.mark.parametrize("name", ["SFT", "PPO"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_what_is_streamed_is_what_a_rollout_draws(speakers, name, temperature):
    manner = SamplingSettings(temperature, 40, seed=3)
    prompt, grown, answer = asked(speakers, manner, name)
    assert answer.tokens == sampled(speakers, name, [prompt], manner)[0]
    assert grown == [*range(1, 1 + len(answer.tokens)), len(answer.tokens)] and answer.done
    whole = speakers.tokenizer.decode(answer.tokens, skip_special_tokens=True)
    assert answer.text.rstrip("\ufffd") == whole.rstrip("\ufffd")
    assert answer.drawn == len(answer.tokens) and answer.seconds > 0
    assert answer.ended == (answer.tokens[-1] == speakers.tokenizer.eos_token_id)


@torch.no_grad()
def exact_log_p(folder: Path, prompt: list[int], tokens: list[int], temperature: float) -> list[float]:
    """By Transformers' own forward pass over the whole text, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1:-1]
    return torch.log_softmax(logits / temperature, -1)[range(len(tokens)), tokens].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_log_ratios_are_those_of_an_independent_forward_pass(speakers, run, temperature):
    prompt, _, answer = asked(speakers, SamplingSettings(temperature, 40, seed=5), "PPO")
    own, sft = (exact_log_p(run / name, prompt, answer.tokens, temperature or 1.0)
                for name in ("ppo-merged", "sft-merged"))
    expected = [a - b for a, b in zip(own, sft, strict=True)]
    assert answer.log_ratios == pytest.approx(expected, abs=1e-4) and max(map(abs, expected)) > 0.1
    assert answer.kl == pytest.approx(sum(expected), abs=1e-3)
    assert sum(piece.log_ratio for piece in answer.pieces.done) == pytest.approx(answer.kl, abs=1e-6)


def test_each_piece_has_its_own_tokens_log_ratio(speakers):
    pieces, number = Pieces(speakers.tokenizer), 0
    for word in ("flag", "é", "port"):
        for token in speakers.tokenizer(word, add_special_tokens=False).input_ids:
            number += 1
            pieces.add(token, float(number))
    parts = [len(speakers.tokenizer(word, add_special_tokens=False).input_ids) for word in ("flag", "é", "port")]
    assert parts[1] == 2 and len(pieces.done) == number - 1, "a character of two tokens is one piece"
    assert [piece.log_ratio for piece in pieces.done if piece.text == "é"] == [2 * parts[0] + 3]
    assert sum(piece.log_ratio for piece in pieces.done) == number * (number + 1) / 2


def test_the_reward_is_the_scorers(speakers, run):
    prompt, _, answer = asked(speakers, SamplingSettings(1.0, 30, seed=1), "PPO")
    expected = float(load_merged_reward(run / "reward-merged", "fp32")([prompt], [answer.tokens]))
    assert answer.reward == pytest.approx(expected, abs=1e-5)


def test_sft_has_no_log_ratio_to_itself(speakers):
    _, _, answer = asked(speakers, SamplingSettings(1.0, 20, seed=2), "SFT")
    assert answer.kl == 0 and not any(piece.log_ratio for piece in answer.pieces.done)


def test_best_of_n_is_the_sample_of_the_highest_reward(speakers, run):
    manner = SamplingSettings(1.0, 20, samples=5, seed=7)
    prompt, grown, answer = asked(speakers, manner, BEST_OF_N)
    drawn = sampled(speakers, "SFT", [prompt] * 5, manner)
    rewards = load_merged_reward(run / "reward-merged", "fp32")([prompt] * 5, drawn)
    assert answer.tokens == drawn[int(rewards.argmax())] and set(grown[:-1]) == {0}
    assert answer.rewards == pytest.approx(sorted(rewards.tolist(), reverse=True), abs=1e-5)
    assert answer.reward == pytest.approx(answer.rewards[0], abs=1e-5) and answer.finished == 5
    assert answer.kl == answer.kl_bound == best_of_kl(5) and answer.speaker == "best of 5"
    assert answer.drawn == sum(map(len, drawn))


def test_answers_grow_side_by_side(speakers):
    manner, seen = SamplingSettings(1.0, 12, samples=2, seed=0), []
    for answers in speakers.together(["SFT", "PPO", "SFT"], speakers.prompt(QUESTION, manner), manner):
        seen.append(tuple(len(found.tokens) for found in answers))
    assert seen[:3] == [(1, 1, 1), (2, 2, 2), (3, 3, 3)]
    assert all(found.done for found in answers) and answers[0].tokens != answers[2].tokens, "seeds of their own"


def test_a_stream_that_is_left_leaves_no_trace(speakers):
    """Between two tokens gradients are as the caller has them, and a stream that is dropped restores the model."""
    manner = SamplingSettings(1.0, 12)
    stream = speakers.answer("PPO", speakers.prompt(QUESTION, manner), manner)
    next(stream)
    assert torch.is_grad_enabled()
    stream.close()
    assert asked(speakers, manner, "PPO")[2].done


@pytest.mark.parametrize("text", ["naïve café", "שלום עולם", "😀👩‍👧 €uro", "a\n\n  b\tc", ""])
def test_pieces_never_break_a_character(speakers, text):
    tokenizer = speakers.tokenizer
    pieces, ids = Pieces(tokenizer), tokenizer(text, add_special_tokens=False).input_ids
    for place, token in enumerate([*ids, tokenizer.eos_token_id]):
        pieces.add(token, 0.5)
        assert "\ufffd" not in pieces.text and text.startswith(pieces.text), place
    pieces.finish()
    assert pieces.text == text
    assert sum(piece.log_ratio for piece in pieces.done) == 0.5 * (1 + len(ids)), "no token's share is lost"


def test_bytes_that_make_no_character_do_not_stop_what_follows(speakers):
    tokenizer = speakers.tokenizer
    start, rest = tokenizer("é", add_special_tokens=False).input_ids[:1], tokenizer("flag", add_special_tokens=False)
    pieces = Pieces(tokenizer)
    for token in [*start, *rest.input_ids, *start]:
        pieces.add(token, 1.0)
    pieces.finish()
    assert pieces.text == "\ufffdflag", "broken in the middle is shown, cut off at the end is not"


def test_any_bytes_at_all_come_out_as_the_whole_text_would(speakers):
    tokenizer, rng = speakers.tokenizer, random.Random(0)
    single = [token for token in tokenizer.get_vocab().values() if token > 2 and len(tokenizer.decode([token])) == 1]
    for _ in range(300):
        pieces, ids = Pieces(tokenizer), rng.choices(single, k=rng.randint(1, 12))
        for token in ids:
            pieces.add(token, 1.0)
        pieces.finish()
        whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert pieces.text.rstrip("\ufffd") == whole.rstrip("\ufffd")
        assert sum(piece.log_ratio for piece in pieces.done) == len(ids)


@pytest.mark.parametrize(("question", "says"), [
    ("  \n", "Type a question"), ("port " * 300, r"The question has [\d,]+ tokens, .* of the 256 that the models")])
def test_a_question_that_cannot_be_asked_is_refused_in_one_sentence(talk, question, says):
    with pytest.raises(ValueError, match=says):
        talk.speakers.prompt(question, SamplingSettings(**HOW))
    [(notice, *panels)] = talk.side_by_side("page", question, HOW, ["SFT", "PPO"])
    assert notice.startswith('<p class="notice"') and len(panels) == 2
    [(notice, _, _, can_vote)] = talk.blind("page", question, HOW, ["SFT", "PPO"])
    assert "notice" in notice and not can_vote


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"temperature": math.nan}, {"temperature": math.inf},
                                   {"most_tokens": 0}, {"samples": 0}, {"samples": 1000}])
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError):
        SamplingSettings(**wrong)


def test_stop_ends_what_is_being_written(talk):
    shown = talk.side_by_side("page", QUESTION, HOW | {"most_tokens": 150}, ["SFT", "PPO"])
    next(shown)
    talk.stop("another page")
    assert talk.sessions.of("page").stopped is False
    talk.stop("page")
    *_, (_, sft, _) = shown
    assert 'class="end"' not in sft and "<dd>–</dd>" in sft, "not finished, no reward"
    talk.begin("page")
    *_, (_, sft, _) = talk.side_by_side("page", QUESTION, HOW, ["SFT", "PPO"])
    assert 'class="end"' in sft


EVIL = '<script>alert(1)</script> "quoted" \'q\' ${alert(2)} שלום'


def test_foreign_text_is_text(speakers):
    _, _, answer = asked(speakers, SamplingSettings(0.0, 5), "PPO")
    answer.pieces.done = [piece._replace(text=EVIL, log_ratio=ratio)
                          for piece, ratio in zip(answer.pieces.done, (2.0, -2.0, 0.0), strict=False)]
    shown = views.answer(answer, "SFT") + views.plain(EVIL) + views.human({"response_j": EVIL, "score_j": 3})
    assert "<script" not in shown and shown.count("&lt;script&gt;alert(1)&lt;/script&gt; &quot;quoted&quot;") == 5
    assert 'class="more" style="--w:60%" title="+2.00 nats to SFT"' in shown
    assert 'class="less" style="--w:60%" title="−2.00 nats to SFT"' in shown
    assert shown.count('dir="auto"') == 3


# Votes


def written(policy: str, text: str) -> Written:
    return Written(policy, f"digest of {policy}", text, 0.5, True)


def row(number: int, question: Question | None = None, tie: bool = False) -> dict:
    question = question or Question(f"which flag {number}")
    return vote_row(question, written("PPO", f"use the flag {number}"), written("SFT", "read the file"), HOW, tie)


def test_votes_are_pairs_and_load_as_a_data_set(tmp_path, run):
    votes, held = Votes(tmp_path / "votes"), next(rows_of(run / "pairs", "evaluation"))
    votes.add(VOTES, row(1))
    votes.add(VOTES, row(2, Question(held["question"], held)))
    votes.add(TIES, row(3, tie=True))
    assert pq.read_schema(tmp_path / "votes/reward/part-00000.parquet").equals(SCHEMA)
    typed, known = rows_of(tmp_path / "votes", "reward")
    assert typed["site"] == TYPED and typed["qid"] > 0 and typed["score_j"] > typed["score_k"]
    assert (known["site"], known["qid"], known["question"]) == (held["site"], held["qid"], held["question"])
    assert known["authors"][1:] == ["PPO", "SFT"] and len(known["licenses"]) == len(known["author_urls"]) == 3
    assert known["metadata"][1] == "https://tiny"
    assert models_of(known) == (("PPO", "digest of PPO"), ("SFT", "digest of SFT"))
    assert json.loads(known["metadata"][3])["temperature"] == 0.7
    assert Question("one").columns()["qid"] == Question("one").columns()["qid"] != Question("two").columns()["qid"]
    loaded = datasets.load_dataset(str(tmp_path / "votes"), cache_dir=str(tmp_path / "cache"))
    assert {name: len(split) for name, split in loaded.items()} == {"reward": 2, "ties": 1}
    assert loaded["reward"][0]["response_j"] == "use the flag 1" and loaded["ties"][0]["score_j"] == 0


ADD_MANY = """
import sys
from stages.chat.votes import Question, VOTES, Votes, Written, vote_row
one, other = Written("PPO", "", "yes", 0.5, True), Written("SFT", "", "no", 0.5, True)
for number in range(20):
    Votes(sys.argv[1]).add(VOTES, vote_row(Question(f"{sys.argv[2]} {number}"), one, other, {}))
"""


def test_two_pages_at_once_lose_no_vote(tmp_path):
    """In two processes, and two threads of this one."""
    writers = [subprocess.Popen([sys.executable, "-c", ADD_MANY, str(tmp_path / "votes"), name]) for name in "ab"]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda number: Votes(tmp_path / "votes").add(VOTES, row(number)), range(40)))
    assert [writer.wait(60) for writer in writers] == [0, 0]
    kept = {kept["question"] for kept in Votes(tmp_path / "votes").rows(VOTES)}
    assert kept == {f"which flag {n}" for n in range(40)} | {f"{name} {n}" for name in "ab" for n in range(20)}


@pytest.mark.parametrize("fails", ["write_table", "replace"])
def test_a_crash_while_a_vote_is_written_leaves_the_old_ones(tmp_path, monkeypatch, fails):
    votes = Votes(tmp_path / "votes")
    votes.add(VOTES, row(1))

    def torn(table, stream, **_):
        stream.write(b"PAR1 half")
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
    assert [kept["question"] for kept in votes.rows(VOTES)] == ["which flag 1"]
    votes.add(VOTES, row(3))
    assert len(list(rows_of(tmp_path / "votes", "reward"))) == 2


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
    config = replace(load("configs/tiny.yaml").reward, validation_share=0.25)
    inputs = {"base": run / "sft-merged", "pairs": tmp_path / "votes"}
    command.make(reward.run, config, tmp_path / "reward", inputs)
    manifest = json.loads((tmp_path / "reward/manifest.json").read_text())
    assert manifest["metrics"]["pairs"] == 6 and "adapter_model.safetensors" in manifest["files"]
    before = manifest["inputs"]["pairs"]["sha256"]
    Votes(tmp_path / "votes").add(VOTES, row(9))
    assert command._described(tmp_path / "votes")["sha256"] != before, "another vote is another input"


# Blind


def duel(talk: ChatController, how: dict = HOW) -> tuple:
    *_, last = talk.blind("page", QUESTION, how, ["SFT", "PPO"])
    return last


def test_a_blind_vote_is_kept_as_it_was_meant_and_counted_once(talk):
    for choice in (0, 1, 1, 0):
        _, *shown, can_vote = duel(talk)
        assert can_vote
        assert not any(word in text for text in shown for word in ("SFT", "PPO", "nats", "reward"))
        answers = talk.sessions.of("page").duel.shown
        assert [views.plain(answer.text) for answer in answers] == shown
        verdict = talk.vote("page", choice)
        kept = talk.votes.rows(VOTES)[-1]
        assert (kept["response_j"], kept["response_k"]) == (answers[choice].text, answers[1 - choice].text)
        assert kept["authors"][1:] == [answers[choice].policy, answers[1 - choice].policy]
        assert answers[0].policy in verdict.lines[0] and "not chosen" in verdict.lines[1 - choice]
    assert "nothing to vote on" in talk.vote("page", 0).notice
    assert len(talk.votes.rows(VOTES)) == 4 and not talk.votes.rows(TIES)


def test_the_order_is_random(talk):
    firsts = set()
    for _ in range(20):
        duel(talk, how=HOW | {"most_tokens": 3})
        firsts.add(talk.sessions.take_duel("page").shown[0].policy)
    assert firsts == {"SFT", "PPO"}


def test_nothing_is_shown_before_both_are_done(talk):
    *before, last = talk.blind("page", QUESTION, HOW, ["SFT", BEST_OF_N])
    assert before and all(a == b and "answer" not in a and not can_vote for _, a, b, can_vote in before)
    assert last[3] and models_of(vote_row(Question("q"), *talk.sessions.take_duel("page").shown, HOW)) in (
        (("SFT", "aa"), ("best of 4", "aa by cc")), (("best of 4", "aa by cc"), ("SFT", "aa")))


def test_two_equal_answers_cannot_be_voted_on(talk):
    *_, (notice, _, _, can_vote) = talk.blind("page", QUESTION, HOW | {"temperature": 0.0}, ["PPO", "PPO"])
    assert "the very same" in notice and not can_vote and talk.sessions.of("page").duel is None


def test_a_tie_is_no_pair_and_counts_half(talk):
    def voted(better: str, choice: int | None) -> None:
        duel(talk)
        shown = [answer.policy for answer in talk.sessions.of("page").duel.shown]
        talk.vote("page", None if choice is None else shown.index(better))

    assert "No vote yet" in talk.tally(["SFT", "PPO"], 4)
    voted("PPO", 1)
    voted("PPO", 1)
    voted("PPO", None)
    assert len(talk.votes.rows(VOTES)) == 2 and len(talk.votes.rows(TIES)) == 1
    assert "PPO preferred to SFT: <strong>0.83 [" in talk.tally(["PPO", "SFT"], 4)
    assert "SFT preferred to PPO: <strong>0.17 [" in talk.tally(["SFT", "PPO"], 4)
    assert "3 votes on 1 question; 1 tie, counted half" in talk.tally(["SFT", "PPO"], 4)
    talk.digests["PPO"] = "another"
    assert "No vote yet" in talk.tally(["SFT", "PPO"], 4), "votes on a model that is no longer there"


def test_a_vote_that_cannot_be_kept_says_so(talk):
    duel(talk)
    (talk.votes.folder / VOTES).mkdir(parents=True)
    (talk.votes.folder / VOTES / "part-00000.parquet").write_bytes(b"")
    verdict = talk.vote("page", 0)
    assert "not kept" in verdict.notice and "left alone" in talk.tally(["SFT", "PPO"], 4)
    assert verdict.open and not any(verdict.lines), "still blind"
    (talk.votes.folder / VOTES / "part-00000.parquet").unlink()
    assert "Kept in" in talk.vote("page", 0).notice and len(talk.votes.rows(VOTES)) == 1


# The command


def test_a_missing_run_says_what_to_do_in_one_line(tmp_path, capsys):
    assert demo.main(["--run", str(tmp_path / "nothing")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("demo: error: ") and "make ppo" in said and said.count("\n") == 1


def test_without_gradio_one_line_says_so(run, capsys, monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert demo.main(["--run", str(run)]) == 1
    said = capsys.readouterr().err
    assert "make extras" in said and said.count("\n") == 1


def test_a_port_that_is_taken_is_said_before_models_are_loaded(run, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert demo.main(["--run", str(run), "--port", str(taken.getsockname()[1])]) == 1
    said = capsys.readouterr()
    assert "give another --port" in said.err and said.err.count("\n") == 1 and not said.out


@pytest.mark.parametrize("port", ["0", "-1", "70000"])
def test_a_port_that_cannot_be_is_one_line(run, capsys, port):
    assert demo.main(["--run", str(run), "--port", port]) == 1
    said = capsys.readouterr().err
    assert said == f"demo: error: --port must be from 1 to 65535, not {port}\n"


def test_a_model_is_named_once_and_is_a_folder(run, capsys):
    asked = demo.parser().parse_args(["--run", str(run), "--model", f"SFT={run / 'ppo-merged'}"])
    with pytest.raises(ValueError, match="already"):
        demo.talk_of(asked)
    with pytest.raises(SystemExit):
        demo.parser().parse_args(["--model", "base"])
    assert "NAME=FOLDER" in capsys.readouterr().err


def test_only_this_machine_is_served_unless_asked_otherwise():
    assert demo.parser().parse_args([]).host == "127.0.0.1"


def test_controls_start_as_the_run_was_evaluated(run):
    assert demo.defaults_of(run) == {"temperature": 1.0, "most_tokens": 128}
    expected = load("configs/demo.yaml").evaluate
    (run / "recipe.yaml").write_text(Path("configs/demo.yaml").read_text())
    assert demo.defaults_of(run)["most_tokens"] == expected.max_response_tokens
    (run / "recipe.yaml").unlink()


def test_log_probabilities_agree_with_the_evaluations(speakers):
    """KL on the page is what `stages.evaluate` measures: the same two scores of the same tokens."""
    manner = SamplingSettings(0.8, 30, seed=11)
    prompt, _, answer = asked(speakers, manner, "PPO")
    both = [response_logprobs(speakers.models[name], [prompt], [answer.tokens], 0.8)[0] for name in ("PPO", "SFT")]
    assert answer.kl == pytest.approx(float((both[0] - both[1]).sum()), abs=1e-3)
