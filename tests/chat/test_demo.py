"""What is behind the demo page: answers as they are written, blind comparisons, what it says when it cannot.

The page itself, in a browser, is in test_demo_page.py, votes in test_votes.py, the command in test_demo_command.py.
"""

import math
import random
from pathlib import Path

import pytest
import torch

from stages.chat import views
from stages.chat.controller import ChatController
from stages.chat.streaming import BEST_OF_N, ChatModels, SamplingSettings
from stages.chat.token_text import StreamingDecoder
from stages.chat.votes import TIES, VOTES, Question, Votes, parse_vote_models, vote_row
from stages.generation.best_of_n import best_of_kl
from stages.generation.sampler import sample
from stages.modeling.load import AutoModelForCausalLM
from stages.modeling.packed.token_logprobs import response_logprobs
from stages.reward_modeling.load import load_reward_models
from tests.helpers import demo_run

QUESTION = "which flag do I use to open the port"
HOW = {"temperature": 0.7, "most_tokens": 40, "samples": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return demo_run.save_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture(scope="module")
def models(run):
    return ChatModels({"SFT": run / "sft-merged", "PPO": run / "ppo-merged"}, run / "reward-merged")


@pytest.fixture
def controller(models, run, tmp_path):
    digests = {"SFT": "aa", "PPO": "bb", BEST_OF_N: "aa by cc"}
    return ChatController(models, run / "pairs", Votes(tmp_path / "votes"), digests)


def asked(models, sampling: SamplingSettings, name: str):
    """The prompt, and every number that an answer had while it grew, with the answer."""
    prompt, grown = models.encode_prompt(QUESTION, sampling), []
    for answer in models.stream(name, prompt, sampling):
        grown.append(len(answer.tokens))
    return prompt, grown, answer


def sampled(models, name: str, prompts: list, sampling: SamplingSettings) -> list[list[int]]:
    return sample(models.policies[name], prompts, max_new_tokens=sampling.most_tokens, temperature=sampling.temperature,
                  stop_ids=[models.tokenizer.eos_token_id],
                  generator=torch.Generator().manual_seed(sampling.seed)).responses


@pytest.mark.parametrize("name", ["SFT", "PPO"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_what_is_streamed_is_what_a_rollout_draws(models, name, temperature):
    sampling = SamplingSettings(temperature, 40, seed=3)
    prompt, grown, answer = asked(models, sampling, name)
    assert answer.tokens == sampled(models, name, [prompt], sampling)[0]
    assert grown == [*range(1, 1 + len(answer.tokens)), len(answer.tokens)] and answer.done
    whole = models.tokenizer.decode(answer.tokens, skip_special_tokens=True)
    assert answer.text.rstrip("\ufffd") == whole.rstrip("\ufffd")
    assert answer.sampled_tokens == len(answer.tokens) and answer.seconds > 0
    assert answer.ended == (answer.tokens[-1] == models.tokenizer.eos_token_id)


@torch.no_grad()
def exact_logprobs(folder: Path, prompt: list[int], tokens: list[int], temperature: float) -> list[float]:
    """By Transformers' own forward pass over the whole text, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1:-1]
    return torch.log_softmax(logits / temperature, -1)[range(len(tokens)), tokens].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_log_ratios_are_those_of_an_independent_forward_pass(models, run, temperature):
    prompt, _, answer = asked(models, SamplingSettings(temperature, 40, seed=5), "PPO")
    own, sft = (exact_logprobs(run / name, prompt, answer.tokens, temperature or 1.0)
                for name in ("ppo-merged", "sft-merged"))
    expected = [a - b for a, b in zip(own, sft, strict=True)]
    assert answer.log_ratios == pytest.approx(expected, abs=1e-4) and max(map(abs, expected)) > 0.1
    assert answer.kl == pytest.approx(sum(expected), abs=1e-3)
    assert sum(piece.log_ratio for piece in answer.decoder.pieces) == pytest.approx(answer.kl, abs=1e-6)


def test_each_piece_has_its_own_tokens_log_ratio(models):
    pieces, number = StreamingDecoder(models.tokenizer), 0
    for word in ("flag", "é", "port"):
        for token in models.tokenizer(word, add_special_tokens=False).input_ids:
            number += 1
            pieces.add(token, float(number))
    parts = [len(models.tokenizer(word, add_special_tokens=False).input_ids) for word in ("flag", "é", "port")]
    assert parts[1] == 2 and len(pieces.pieces) == number - 1, "a character of two tokens is one piece"
    assert [piece.log_ratio for piece in pieces.pieces if piece.text == "é"] == [2 * parts[0] + 3]
    assert sum(piece.log_ratio for piece in pieces.pieces) == number * (number + 1) / 2


def test_the_reward_is_the_scorers(models, run):
    prompt, _, answer = asked(models, SamplingSettings(1.0, 30, seed=1), "PPO")
    (scorer,) = load_reward_models(run / "reward-merged", "fp32")
    assert answer.reward == pytest.approx(float(scorer([prompt], [answer.tokens])), abs=1e-5)


def test_sft_has_no_log_ratio_to_itself(models):
    _, _, answer = asked(models, SamplingSettings(1.0, 20, seed=2), "SFT")
    assert answer.kl == 0 and not any(piece.log_ratio for piece in answer.decoder.pieces)


def test_best_of_n_is_the_sample_of_the_highest_reward(models, run):
    sampling = SamplingSettings(1.0, 20, samples=5, seed=7)
    prompt, grown, answer = asked(models, sampling, BEST_OF_N)
    drawn = sampled(models, "SFT", [prompt] * 5, sampling)
    (scorer,) = load_reward_models(run / "reward-merged", "fp32")
    rewards = scorer([prompt] * 5, drawn)
    assert answer.tokens == drawn[int(rewards.argmax())] and set(grown[:-1]) == {0}
    assert answer.rewards == pytest.approx(sorted(rewards.tolist(), reverse=True), abs=1e-5)
    assert answer.reward == pytest.approx(answer.rewards[0], abs=1e-5) and answer.finished_samples == 5
    assert answer.kl == answer.kl_bound == best_of_kl(5) and answer.policy == "best of 5"
    assert answer.sampled_tokens == sum(map(len, drawn))


def test_answers_grow_side_by_side(models):
    sampling, seen = SamplingSettings(1.0, 12, samples=2, seed=0), []
    prompt = models.encode_prompt(QUESTION, sampling)
    for answers in models.stream_side_by_side(["SFT", "PPO", "SFT"], prompt, sampling):
        seen.append(tuple(len(actual.tokens) for actual in answers))
    assert seen[:3] == [(1, 1, 1), (2, 2, 2), (3, 3, 3)]
    assert all(actual.done for actual in answers) and answers[0].tokens != answers[2].tokens, "seeds of their own"


def test_a_stream_that_is_left_leaves_no_trace(models):
    """Between two tokens gradients are as the caller has them, and a stream that is dropped restores the model."""
    sampling = SamplingSettings(1.0, 12)
    stream = models.stream("PPO", models.encode_prompt(QUESTION, sampling), sampling)
    next(stream)
    assert torch.is_grad_enabled()
    stream.close()
    assert asked(models, sampling, "PPO")[2].done


@pytest.mark.parametrize("text", ["naïve café", "שלום עולם", "😀👩‍👧 €uro", "a\n\n  b\tc", ""])
def test_pieces_never_break_a_character(models, text):
    tokenizer = models.tokenizer
    pieces, ids = StreamingDecoder(tokenizer), tokenizer(text, add_special_tokens=False).input_ids
    for place, token in enumerate([*ids, tokenizer.eos_token_id]):
        pieces.add(token, 0.5)
        assert "\ufffd" not in pieces.text and text.startswith(pieces.text), place
    pieces.finish()
    assert pieces.text == text
    assert sum(piece.log_ratio for piece in pieces.pieces) == 0.5 * (1 + len(ids)), "no token's share is lost"


def test_bytes_that_make_no_character_do_not_stop_what_follows(models):
    tokenizer = models.tokenizer
    start, rest = tokenizer("é", add_special_tokens=False).input_ids[:1], tokenizer("flag", add_special_tokens=False)
    pieces = StreamingDecoder(tokenizer)
    for token in [*start, *rest.input_ids, *start]:
        pieces.add(token, 1.0)
    pieces.finish()
    assert pieces.text == "\ufffdflag", "broken in the middle is shown, cut off at the end is not"


def test_any_bytes_at_all_come_out_as_the_whole_text_would(models):
    tokenizer, rng = models.tokenizer, random.Random(0)
    single = [token for token in tokenizer.get_vocab().values() if token > 2 and len(tokenizer.decode([token])) == 1]
    for _ in range(300):
        pieces, ids = StreamingDecoder(tokenizer), rng.choices(single, k=rng.randint(1, 12))
        for token in ids:
            pieces.add(token, 1.0)
        pieces.finish()
        whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert pieces.text.rstrip("\ufffd") == whole.rstrip("\ufffd")
        assert sum(piece.log_ratio for piece in pieces.pieces) == len(ids)


@pytest.mark.parametrize(("question", "says"), [
    ("  \n", "Type a question"), ("port " * 300, r"The question has [\d,]+ tokens, .* of the 256 that the models"),
    ("x" * 100_001, "The question has 100,001 characters; at most 100,000 are read: shorten it")])
def test_a_question_that_cannot_be_asked_is_refused_in_one_sentence(controller, question, says):
    with pytest.raises(ValueError, match=says):
        controller.models.encode_prompt(question, SamplingSettings(**HOW))
    [(notice, *panels)] = controller.stream_side_by_side("page", question, HOW, ["SFT", "PPO"])
    assert notice.startswith('<p class="notice"') and len(panels) == 2
    [(notice, _, _, can_vote)] = controller.stream_blind("page", question, HOW, ["SFT", "PPO"])
    assert "notice" in notice and not can_vote


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"temperature": math.nan}, {"temperature": math.inf},
                                   {"most_tokens": 0}, {"samples": 0}, {"samples": 1000}])
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError):
        SamplingSettings(**wrong)


def test_stop_ends_what_is_being_written(controller):
    shown = controller.stream_side_by_side("page", QUESTION, HOW | {"most_tokens": 150}, ["SFT", "PPO"])
    next(shown)
    controller.stop("another page")
    assert controller.sessions.get("page").stopped is False
    controller.stop("page")
    *_, (_, sft, _) = shown
    assert 'class="end"' not in sft and "<dd>–</dd>" in sft, "not finished, no reward"
    controller.start("page")
    *_, (_, sft, _) = controller.stream_side_by_side("page", QUESTION, HOW, ["SFT", "PPO"])
    assert 'class="end"' in sft


def test_the_next_question_stops_the_one_that_is_being_answered(controller):
    shown = controller.stream_side_by_side("page", QUESTION, HOW | {"most_tokens": 150}, ["SFT", "PPO"])
    next(shown)
    controller.start("page")
    *_, (_, sft, _) = shown
    assert 'class="end"' not in sft
    *_, (_, sft, _) = controller.stream_side_by_side("page", QUESTION, HOW, ["SFT", "PPO"])
    assert 'class="end"' in sft


def test_a_model_that_is_not_chosen_is_one_sentence(controller):
    [(notice, *_)] = controller.stream_side_by_side("page", QUESTION, HOW, ["SFT", None])
    assert "Choose a model" in notice


EVIL = '<script>alert(1)</script> "quoted" \'q\' ${alert(2)} שלום'


def test_foreign_text_is_text(models):
    _, _, answer = asked(models, SamplingSettings(0.0, 5), "PPO")
    answer.decoder.pieces = [piece._replace(text=EVIL, log_ratio=ratio)
                          for piece, ratio in zip(answer.decoder.pieces, (2.0, -2.0, 0.0), strict=False)]
    human = {"response_j": EVIL, "score_j": 3}
    shown = views.render_answer(answer, "SFT") + views.render_blind_answer(EVIL) + views.render_human_answer(human)
    assert "<script" not in shown and shown.count("&lt;script&gt;alert(1)&lt;/script&gt; &quot;quoted&quot;") == 8
    assert 'class="more" style="--w:60%" title="+2.00 nats to SFT"' in shown
    assert 'class="less" style="--w:60%" title="−2.00 nats to SFT"' in shown
    assert shown.count('dir="auto"') == 4


# Blind


def duel(controller: ChatController, how: dict = HOW) -> tuple:
    *_, last = controller.stream_blind("page", QUESTION, how, ["SFT", "PPO"])
    return last


def test_a_blind_vote_is_kept_as_it_was_meant_and_counted_once(controller):
    for choice in (0, 1, 1, 0):
        _, *shown, can_vote = duel(controller)
        assert can_vote
        assert not any(word in text for text in shown for word in ("SFT", "PPO", "nats", "reward"))
        answers = controller.sessions.get("page").comparison.answers
        assert [views.render_blind_answer(answer.text) for answer in answers] == shown
        result = controller.vote("page", choice)
        recorded = controller.votes.rows(VOTES)[-1]
        assert (recorded["response_j"], recorded["response_k"]) == (answers[choice].text, answers[1 - choice].text)
        assert recorded["authors"][1:] == [answers[choice].policy, answers[1 - choice].policy]
        assert answers[0].policy in result.lines[0] and "not chosen" in result.lines[1 - choice]
    assert "nothing to vote on" in controller.vote("page", 0).notice
    assert len(controller.votes.rows(VOTES)) == 4 and not controller.votes.rows(TIES)


def test_the_order_is_random(controller):
    firsts = set()
    for _ in range(20):
        duel(controller, how=HOW | {"most_tokens": 3})
        if comparison := controller.sessions.take_comparison("page"):  # two equal answers, by chance, make none
            firsts.add(comparison.answers[0].policy)
    assert firsts == {"SFT", "PPO"}


def test_nothing_is_shown_before_both_are_done(controller):
    *before, last = controller.stream_blind("page", QUESTION, HOW, ["SFT", BEST_OF_N])
    assert before and all(a == b and "answer" not in a and not can_vote for _, a, b, can_vote in before)
    vote = vote_row(Question("q"), *controller.sessions.take_comparison("page").answers, HOW)
    assert last[3] and parse_vote_models(vote) in (
        (("SFT", "aa"), ("best of 4", "aa by cc")), (("best of 4", "aa by cc"), ("SFT", "aa")))


def test_two_equal_answers_cannot_be_voted_on(controller):
    *_, (notice, _, _, can_vote) = controller.stream_blind("page", QUESTION, HOW | {"temperature": 0.0}, ["PPO", "PPO"])
    assert "the very same" in notice and not can_vote and controller.sessions.get("page").comparison is None


def test_a_tie_is_no_pair_and_counts_half(controller):
    def voted(better: str, choice: int | None) -> None:
        duel(controller)
        shown = [answer.policy for answer in controller.sessions.get("page").comparison.answers]
        controller.vote("page", None if choice is None else shown.index(better))

    assert "No vote yet" in controller.tally_votes(["SFT", "PPO"], 4)
    voted("PPO", 1)
    voted("PPO", 1)
    voted("PPO", None)
    assert len(controller.votes.rows(VOTES)) == 2 and len(controller.votes.rows(TIES)) == 1
    assert "PPO preferred to SFT: <strong>0.83 [" in controller.tally_votes(["PPO", "SFT"], 4)
    assert "SFT preferred to PPO: <strong>0.17 [" in controller.tally_votes(["SFT", "PPO"], 4)
    assert "3 votes on 1 question; 1 tie, counted half" in controller.tally_votes(["SFT", "PPO"], 4)
    controller.digests["PPO"] = "another"
    assert "No vote yet" in controller.tally_votes(["SFT", "PPO"], 4), "votes on a model that is no longer there"


def test_a_vote_that_cannot_be_kept_says_so(controller):
    duel(controller)
    (controller.votes.folder / VOTES).mkdir(parents=True)
    (controller.votes.folder / VOTES / "part-00000.parquet").write_bytes(b"")
    result = controller.vote("page", 0)
    assert "not saved" in result.notice and "left alone" in controller.tally_votes(["SFT", "PPO"], 4)
    assert result.can_retry and not any(result.lines), "still blind"
    (controller.votes.folder / VOTES / "part-00000.parquet").unlink()
    assert "Saved in" in controller.vote("page", 0).notice and len(controller.votes.rows(VOTES)) == 1


def test_log_probabilities_agree_with_the_evaluations(models):
    """KL on the page is what `stages.evaluate` measures: the same two scores of the same tokens."""
    sampling = SamplingSettings(0.8, 30, seed=11)
    prompt, _, answer = asked(models, sampling, "PPO")
    both = [response_logprobs(models.policies[name], [prompt], [answer.tokens], 0.8)[0] for name in ("PPO", "SFT")]
    assert answer.kl == pytest.approx(float((both[0] - both[1]).sum()), abs=1e-3)
