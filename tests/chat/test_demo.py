"""What is behind the demo page: answers as they are written, blind comparisons, what it says when it cannot.

The page itself, in a browser, is in test_demo_page.py, votes in test_votes.py, the command in test_demo_command.py.
"""

import random
from pathlib import Path

import pytest
import torch

gradio = pytest.importorskip("gradio", reason="the page needs gradio: make extras")

from stages.chat import views  # noqa: E402
from stages.chat.page import BLIND, SIDE, ChatPage  # noqa: E402
from stages.chat.streaming import BEST_OF_N, ChatModels, SamplingSettings  # noqa: E402
from stages.chat.views import TextPiece  # noqa: E402
from stages.chat.votes import Votes, parse_models  # noqa: E402
from stages.generation.best_of_n import best_of_kl  # noqa: E402
from stages.generation.sampler import sample  # noqa: E402
from stages.modeling.load import AutoModelForCausalLM  # noqa: E402
from stages.modeling.packed.token_logprobs import response_logprobs  # noqa: E402
from stages.reward_modeling.load import load_reward_models  # noqa: E402
from stages.stackexchange.pairs.table import read_pairs  # noqa: E402
from tests.helpers import demo_run  # noqa: E402

QUESTION = "which flag do I use to open the port"
HOW = 0.7, 40, 4  # temperature, most tokens, samples


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return demo_run.save_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture(scope="module")
def models(run):
    return ChatModels(run)


@pytest.fixture
def chat(models, run, tmp_path):
    return ChatPage(models, run / "pairs", Votes(tmp_path / "votes"))


def ask(models, sampling: SamplingSettings, name: str, seed: int = 0):
    """The prompt, and every number of tokens that an answer had while it grew, with the answer."""
    prompt, grown = models.encode_prompt(QUESTION, sampling.most_tokens), []
    for answer in models.stream(name, prompt, sampling, seed):
        grown.append(len(answer.tokens))
    return prompt, grown, answer


def draw(models, name: str, prompts: list, sampling: SamplingSettings, seed: int) -> list[list[int]]:
    return sample(models.policies[name], prompts, max_new_tokens=sampling.most_tokens, temperature=sampling.temperature,
                  stop_ids=[models.tokenizer.eos_token_id],
                  generator=torch.Generator().manual_seed(seed)).responses


@pytest.mark.parametrize("name", ["SFT", "PPO"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_what_is_streamed_is_what_a_rollout_draws(models, name, temperature):
    sampling = SamplingSettings(temperature, 40)
    prompt, grown, answer = ask(models, sampling, name, seed=3)
    assert answer.tokens == draw(models, name, [prompt], sampling, seed=3)[0]
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
    prompt, _, answer = ask(models, SamplingSettings(temperature, 40), "PPO", seed=5)
    own, sft = (exact_logprobs(run / name, prompt, answer.tokens, temperature or 1.0)
                for name in ("ppo-merged", "sft-merged"))
    expected = [a - b for a, b in zip(own, sft, strict=True)]
    ratios = models._log_ratios("PPO", prompt, answer.tokens, temperature or 1.0)
    assert ratios == pytest.approx(expected, abs=1e-4) and max(map(abs, expected)) > 0.1
    assert answer.kl == pytest.approx(sum(expected), abs=1e-3)
    assert sum(piece.log_ratio for piece in answer.pieces) == pytest.approx(answer.kl, abs=1e-6)


def test_each_piece_has_its_own_tokens_log_ratio(models):
    parts = [models.tokenizer(word, add_special_tokens=False).input_ids for word in ("flag", "é", "port")]
    tokens = [token for part in parts for token in part]
    pieces = models.split_text(tokens, [float(number + 1) for number in range(len(tokens))])
    assert len(parts[1]) == 2 and len(pieces) == len(tokens) - 1, "a character of two tokens is one piece"
    assert [piece.log_ratio for piece in pieces if piece.text == "é"] == [2 * len(parts[0]) + 3]
    assert sum(piece.log_ratio for piece in pieces) == len(tokens) * (len(tokens) + 1) / 2


def test_the_reward_is_the_scorers(models, run):
    prompt, _, answer = ask(models, SamplingSettings(1.0, 30), "PPO", seed=1)
    (scorer,) = load_reward_models(run / "reward-merged", "fp32")
    assert answer.rewards == pytest.approx([float(scorer([prompt], [answer.tokens]))], abs=1e-5)


def test_sft_has_no_log_ratio_to_itself(models):
    _, _, answer = ask(models, SamplingSettings(1.0, 20), "SFT", seed=2)
    assert answer.kl == 0 and not any(piece.log_ratio for piece in answer.pieces)


def test_best_of_n_is_the_sample_of_the_highest_reward(models, run):
    sampling = SamplingSettings(1.0, 20, samples=5)
    prompt, grown, answer = ask(models, sampling, BEST_OF_N, seed=7)
    drawn = draw(models, "SFT", [prompt] * 5, sampling, seed=7)
    (scorer,) = load_reward_models(run / "reward-merged", "fp32")
    rewards = scorer([prompt] * 5, drawn)
    assert answer.tokens == drawn[int(rewards.argmax())] and set(grown[:-1]) == {0}
    assert answer.rewards == pytest.approx(sorted(rewards.tolist(), reverse=True), abs=1e-5)
    assert answer.finished_samples == 5 and answer.kl == best_of_kl(5) and answer.policy == "best of 5"
    assert answer.sampled_tokens == sum(map(len, drawn))


def test_answers_grow_side_by_side(models):
    seen = []
    for answers in models.stream_side_by_side(["SFT", "PPO", "SFT"], QUESTION, SamplingSettings(1.0, 12), seed=0):
        seen.append(tuple(len(answer.tokens) for answer in answers))
    assert seen[:3] == [(1, 1, 1), (2, 2, 2), (3, 3, 3)]
    assert all(answer.done for answer in answers) and answers[0].tokens != answers[2].tokens, "seeds of their own"


def test_a_stream_that_is_left_leaves_no_trace(models):
    """Between two tokens gradients are as the caller has them, and a stream that is dropped restores the model."""
    sampling = SamplingSettings(1.0, 12)
    stream = models.stream("PPO", models.encode_prompt(QUESTION, 12), sampling, 0)
    next(stream)
    assert torch.is_grad_enabled()
    stream.close()
    assert ask(models, sampling, "PPO")[2].done


@pytest.mark.parametrize("text", ["naïve café", "שלום עולם", "😀👩‍👧 €uro", "a\n\n  b\tc", ""])
def test_pieces_never_break_a_character(models, text):
    ids = [*models.tokenizer(text, add_special_tokens=False).input_ids, models.tokenizer.eos_token_id]
    for count in range(1, len(ids) + 1):
        pieces = models.split_text(ids[:count], [0.5] * count)
        assert not any("\ufffd" in piece.text for piece in pieces) and text.startswith(joined(pieces)), count
        assert sum(piece.log_ratio for piece in pieces) == 0.5 * count, "no token's share is lost"
    assert joined(pieces) == text


def joined(pieces: list[TextPiece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_bytes_that_make_no_character_do_not_stop_what_follows(models):
    tokenizer = models.tokenizer
    start, rest = tokenizer("é", add_special_tokens=False).input_ids[:1], tokenizer("flag", add_special_tokens=False)
    ids = [*start, *rest.input_ids, *start]
    pieces = models.split_text(ids, [1.0] * len(ids))
    assert joined(pieces) == "\ufffdflag", "broken in the middle is shown, cut off at the end is not"


def test_any_bytes_at_all_come_out_as_the_whole_text_would(models):
    tokenizer, rng = models.tokenizer, random.Random(0)
    single = [token for token in tokenizer.get_vocab().values() if token > 2 and len(tokenizer.decode([token])) == 1]
    for _ in range(300):
        ids = rng.choices(single, k=rng.randint(1, 12))
        pieces = models.split_text(ids, [1.0] * len(ids))
        whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert joined(pieces).rstrip("\ufffd") == whole.rstrip("\ufffd")
        assert sum(piece.log_ratio for piece in pieces) == len(ids)


@pytest.mark.parametrize(("question", "says"), [
    ("  \n", "Type a question"), ("port " * 300, r"The question has [\d,]+ tokens, .* of the 256 that the models")])
@pytest.mark.parametrize("mode", [SIDE, BLIND])
def test_a_question_that_cannot_be_asked_is_refused_in_one_sentence(chat, question, says, mode):
    with pytest.raises(ValueError, match=says):
        chat.models.encode_prompt(question, 40)
    with pytest.warns(match=says):  # where there is no page, Gradio's notice is Python's warning
        [outputs] = chat.answer(mode, question, *HOW, "SFT", "PPO", "PPO")
    assert ["No answer." in panel for panel in outputs[:3]] == [True] * 3 and outputs[3] is None


def test_a_model_that_is_not_chosen_is_one_sentence(chat):
    with pytest.warns(match="Choose a model"):
        list(chat.answer(SIDE, QUESTION, *HOW, "SFT", None, "PPO"))


EVIL = '<script>alert(1)</script> "quoted" \'q\' ${alert(2)} שלום'


def test_foreign_text_is_text(models):
    _, _, answer = ask(models, SamplingSettings(0.0, 5), "PPO")
    answer.pieces, answer.text = [TextPiece(EVIL, ratio) for ratio in (2.0, -2.0, 0.0)], EVIL
    human = {"response_j": EVIL, "score_j": 3}
    shown = views.render_answer(answer, "SFT", EVIL) + views.render_text(EVIL) + views.render_human_answer(human)
    assert "<script" not in shown and shown.count("&lt;script&gt;alert(1)&lt;/script&gt; &quot;quoted&quot;") == 7
    assert 'class="more" style="--w:60%" title="+2.00 nats to SFT"' in shown
    assert 'class="less" style="--w:60%" title="−2.00 nats to SFT"' in shown
    assert shown.count('dir="auto"') == 4


# Blind


def compare(chat: ChatPage, names: tuple = ("SFT", "PPO"), how: tuple = HOW) -> list:
    """The page's last outputs: three panels, the comparison, three buttons."""
    *_, last = chat.answer(BLIND, QUESTION, *how, *names, "PPO")
    return last


def saved(chat: ChatPage, kind: str = "reward") -> list[dict]:
    return list(read_pairs(chat.votes.folder, kind)) if (chat.votes.folder / kind).is_dir() else []


def test_a_blind_vote_is_saved_as_it_was_meant(chat):
    for choice in (0, 1, 1, 0):
        *shown, _, comparison, button, _, _ = compare(chat)
        assert button["interactive"] and [views.render_text(answer.text) for answer in comparison.answers] == shown
        assert not any(word in text for text in shown for word in ("SFT", "PPO", "nats", "reward"))
        *panels, _, closed, button, _, _, _ = chat.vote(choice, comparison, 4, "SFT", "PPO", "PPO")
        answers, recorded = comparison.answers, saved(chat)[-1]
        assert (recorded["response_j"], recorded["response_k"]) == (answers[choice].text, answers[1 - choice].text)
        assert recorded["authors"][1:] == [answers[choice].policy, answers[1 - choice].policy]
        assert answers[0].policy in panels[0] and "not chosen" in panels[1 - choice]
        assert closed is None and not button["interactive"], "a second click votes on nothing"
    chat.vote(0, None, 4, "SFT", "PPO", "PPO")
    assert len(saved(chat)) == 4 and not saved(chat, "ties")


def test_the_order_is_random(chat):
    firsts = set()
    for _ in range(20):
        if comparison := compare(chat, how=(0.7, 3, 4))[3]:  # two equal answers, by chance, make none
            firsts.add(comparison.answers[0].policy)
    assert firsts == {"SFT", "PPO"}


def test_nothing_is_shown_before_both_are_done(chat):
    *before, last = chat.answer(BLIND, QUESTION, *HOW, "SFT", BEST_OF_N, "PPO")
    assert before and all(out[0] == out[1] and "answer" not in out[0] and out[3] is None for out in before)
    chat.vote(0, last[3], 4, "SFT", BEST_OF_N, "PPO")
    digests = chat.models.digests
    assert set(parse_models(saved(chat)[0])) == {("SFT", digests["SFT"]), ("best of 4", digests[BEST_OF_N])}
    assert " by " in digests[BEST_OF_N]


def test_two_equal_answers_cannot_be_voted_on(chat, capsys):
    outputs = compare(chat, ("PPO", "PPO"), (0.0, 40, 4))
    assert outputs[3] is None and "the very same" in capsys.readouterr().out


def test_a_tie_is_no_pair_and_counts_half(chat):
    def vote(choice: str | None) -> None:
        comparison = compare(chat)[3]
        shown = [answer.policy for answer in comparison.answers]
        chat.vote(None if choice is None else shown.index(choice), comparison, 4, "SFT", "PPO", "PPO")

    assert "No vote yet" in chat.tally(4, "SFT", "PPO")
    vote("PPO")
    vote("PPO")
    vote(None)
    assert len(saved(chat)) == 2 and len(saved(chat, "ties")) == 1
    assert "PPO preferred to SFT: <strong>0.83 [" in chat.tally(4, "PPO", "SFT")
    assert "SFT preferred to PPO: <strong>0.17 [" in chat.tally(4, "SFT", "PPO")
    assert "3 votes on 1 question; 1 tie, counted half" in chat.tally(4, "SFT", "PPO")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(chat.models.digests, "PPO", "another")
        assert "No vote yet" in chat.tally(4, "SFT", "PPO"), "votes on a model that is no longer there"


def test_a_vote_that_cannot_be_saved_says_so_and_can_be_repeated(chat):
    comparison = compare(chat)[3]
    chat.votes.folder.write_text("a file where the folder should be")
    with pytest.warns(match="not saved"):
        *_, still_open, button, _, _, _ = chat.vote(0, comparison, 4, "SFT", "PPO", "PPO")
    assert still_open is comparison and button["interactive"], "still blind"
    chat.votes.folder.unlink()
    chat.vote(0, still_open, 4, "SFT", "PPO", "PPO")
    assert len(saved(chat)) == 1


def test_log_probabilities_agree_with_the_evaluations(models):
    """KL on the page is what `stages.evaluate` measures: the same two scores of the same tokens."""
    prompt, _, answer = ask(models, SamplingSettings(0.8, 30), "PPO", seed=11)
    both = [response_logprobs(models.policies[name], [prompt], [answer.tokens], 0.8)[0] for name in ("PPO", "SFT")]
    assert answer.kl == pytest.approx(float((both[0] - both[1]).sum()), abs=1e-3)
