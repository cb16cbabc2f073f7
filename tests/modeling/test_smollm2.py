"""The real base against llama.cpp: tokens of 1,000 real posts, and probabilities after 20 prompts."""

import re
import xml.etree.ElementTree as ET

import py7zr
import pytest
import torch

from stages import export_gguf
from stages.evaluation.llama_cpp import load_llama_cpp
from stages.modeling.load import load_causal
from stages.modeling.tokenizer import load_tokenizer
from tests.helpers.gguf_answers import count_differences
from tests.helpers.real_base import BASE, DUMP, GGUF, NEEDS_BASE, NEEDS_DUMP

pytestmark = [NEEDS_BASE, NEEDS_DUMP]
POSTS, PROMPTS = 1000, 20
LONG_PROMPTS, LONG_TOKENS, SHORT_TOKENS = 1, 200, 30  # the first ones have so many tokens at most, the others fewer
ANSWERED, ANSWER_TOKENS, ANSWERED_CHARACTERS = 5, 16, 120
# Nats between log-probabilities: llama.cpp rounds the input of a matrix to 8 bits, the folder its weights to bf16.
# Measured over the 10 likeliest tokens after 20 prompts of beer: mean 0.078, at most 0.40; 19 first ones are the same.
MEAN_NATS, MOST_NATS = 0.1, 0.6


@pytest.fixture(scope="module")
def posts(tmp_path_factory) -> list[str]:
    """Bodies of posts, as they are in the dump (HTML), every second one without its tags."""
    folder = tmp_path_factory.mktemp("dump")
    with py7zr.SevenZipFile(DUMP) as archive:
        archive.extract(folder, targets=["Posts.xml"])
    bodies = [row.get("Body") for _, row in ET.iterparse(folder / "Posts.xml") if row.get("Body")][:POSTS]
    assert len(bodies) == POSTS
    return [re.sub("<[^>]+>", "", body) if number % 2 else body for number, body in enumerate(bodies)]


@pytest.fixture(scope="module")
def reference():
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: make extras")
    with load_llama_cpp(GGUF) as model:
        yield model


def test_tokens_of_real_posts_are_those_of_llama_cpp(posts, reference):
    tokenizer = load_tokenizer(BASE)
    assert tokenizer.tokenize("\n\n1. Boil")[:2] == ["ĊĊ", "1"]
    assert not [text for text in posts if tokenizer(text).input_ids != reference.tokenize(text)]


@pytest.fixture(scope="module")
def model():
    return load_causal(BASE)


@torch.no_grad()
def test_probabilities_are_those_of_llama_cpp(posts, reference, model):
    tokenizer = load_tokenizer(BASE)
    differences, tops = [], 0
    for number, text in enumerate(posts[1:2 * PROMPTS:2]):
        ids = tokenizer(f"Question: {text}").input_ids[:LONG_TOKENS if number < LONG_PROMPTS else SHORT_TOKENS]
        ours = torch.log_softmax(model(input_ids=torch.tensor([ids]), logits_to_keep=1).logits[0, -1], -1)
        theirs = reference.next_logprobs(ids, 10)
        tops += ours.argmax().item() == max(theirs, key=theirs.get)
        differences += [abs(ours[token].item() - nats) for token, nats in theirs.items()]
    print(f"mean {sum(differences) / len(differences):.4f}, at most {max(differences):.4f} nats; {tops} of {PROMPTS}")
    assert sum(differences) / len(differences) < MEAN_NATS and max(differences) < MOST_NATS and tops >= PROMPTS - 2


@pytest.mark.parametrize("type_name", ["f32", "f16", "q8_0"])
def test_tokens_and_answers_of_the_exported_base_are_those_of_llama_cpp(type_name, posts, model, tmp_path):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: make extras")
    file = tmp_path / "base.gguf"
    assert export_gguf.main([str(BASE), "--type", type_name, "--out", str(file)]) == 0
    texts = posts if type_name == "f32" else posts[:100]  # the type is that of the weights alone
    answered = 1 if type_name == "q8_0" else ANSWERED  # its answers may be others
    questions = [text[:ANSWERED_CHARACTERS] for text in posts[1:2 * answered:2]]
    other_tokens, other_answers = count_differences(BASE, file, texts, questions, ANSWER_TOKENS, model)
    print(f"{type_name}: {other_answers} of {answered} answers differ")
    assert other_tokens == 0 and (type_name == "q8_0" or other_answers == 0)
