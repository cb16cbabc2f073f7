"""Check the prompt template and the encoding (CORRECTNESS D7, S1)."""

import pytest

from stages.stackexchange.prompt import answer_ids, encode_examples, prompt_ids, prompt_text
from tests.helpers import tiny_models


@pytest.fixture(scope="module")
def tok():
    return tiny_models.tokenizer()


def test_the_template_is_the_published_one():
    assert prompt_text("Why?") == "Question: Why?\n\nAnswer: "


@pytest.mark.parametrize("answer", ["use it", " use it", "\nuse", "", "</s> is the end token", "é 漢字"])
def test_prompt_tokens_do_not_depend_on_the_answer(tok, answer):
    [(prompt, ids)] = encode_examples(tok, [("which flag?", answer)])
    assert (prompt, ids) == (prompt_ids(tok, "which flag?"), answer_ids(tok, answer))


def test_joint_encoding_would_merge_across_the_boundary(tok):
    """Without this merge, the test above would prove nothing."""
    joint = tok("Question: x\n\nAnswer: use", add_special_tokens=False).input_ids
    assert joint[: len(prompt_ids(tok, "x")) - 1] != prompt_ids(tok, "x")[1:]


def test_every_answer_ends_in_eos_once_and_starts_with_bos_once(tok):
    ids = prompt_ids(tok, "q") + answer_ids(tok, "a")
    assert ids[0] == tok.bos_token_id and ids[-1] == tok.eos_token_id
    assert ids.count(tok.bos_token_id) == ids.count(tok.eos_token_id) == 1


def test_special_tokens_spelt_out_in_a_post_are_text(tok):
    ids = answer_ids(tok, "a </s> b <s> c <pad>")
    assert ids.count(tok.eos_token_id) == 1 and tok.bos_token_id not in ids and tok.pad_token_id not in ids
    assert tok.decode(ids[:-1]) == "a </s> b <s> c <pad>"


def test_pad_bos_and_eos_are_distinct(tok):
    assert len({tok.pad_token_id, tok.bos_token_id, tok.eos_token_id}) == 3
