"""Packing: nothing lost, nothing leaks, EOS labelled (CORRECTNESS S1, S3, S4)."""

import random

import pytest
import tiny
import torch

from stages.learning.language_modelling import IGNORED, collate_blocks, packed


@pytest.fixture(scope="module")
def documents():
    rng = random.Random(0)
    return [[1] + [rng.randrange(3, 300) for _ in range(rng.randint(3, 40))] + [2] for _ in range(60)]


@pytest.mark.parametrize("strategy", ["wrapped", "bfd"])
def test_no_token_is_lost(documents, strategy):
    blocks = packed(documents, 64, strategy)
    packed_tokens = sorted(t for block in blocks for t in block["input_ids"])
    assert packed_tokens == sorted(t for d in documents for t in d)
    assert max(len(block["input_ids"]) for block in blocks) <= 64


def test_wrapped_keeps_the_order_and_makes_the_true_number_of_blocks(documents):
    blocks = packed(documents, 64, "wrapped")
    flat = [t for d in documents for t in d]
    assert [t for block in blocks for t in block["input_ids"]] == flat
    assert len(blocks) == -(-len(flat) // 64)


def test_bfd_cuts_a_document_longer_than_a_block_into_pieces_and_loses_nothing():
    long = list(range(3, 150))
    blocks = packed([long, [1, 5, 2]], 64, "bfd")
    assert sorted(t for block in blocks for t in block["input_ids"]) == sorted(long + [1, 5, 2])


def test_eos_has_a_label_and_padding_has_none(documents):
    batch = collate_blocks(list(packed(documents, 64, "bfd")))
    eos = batch["input_ids"] == 2
    assert eos.sum() == len(documents) and (batch["labels"][eos] == 2).all()
    assert (batch["labels"][batch["input_ids"] == 0] == IGNORED).all()


def test_packed_loss_equals_unpacked_loss(documents):
    tok = tiny.tokenizer()
    model = tiny.llama(tok)
    documents = [[t % len(tok) for t in d] for d in documents]
    with torch.no_grad():
        nats, tokens = 0.0, 0
        for document in documents:
            ids = torch.tensor([document])
            nats += float(model(input_ids=ids, labels=ids).loss) * (len(document) - 1)
            tokens += len(document) - 1
        batch = collate_blocks(list(packed(documents, 96, "bfd")))
        leakless = float(model(**batch).loss)
    assert leakless == pytest.approx(nats / tokens, abs=1e-5)


def test_wrapped_does_attend_across_documents(documents):
    """The other strategy differs, or the equality above would not show a mask."""
    tok = tiny.tokenizer()
    model = tiny.llama(tok)
    documents = [[t % len(tok) for t in d] for d in documents]
    with torch.no_grad():
        bfd = model(**collate_blocks(list(packed(documents, 96, "bfd")))).loss
        wrapped = model(**collate_blocks(list(packed(documents, 96, "wrapped")))).loss
    assert abs(float(bfd) - float(wrapped)) > 1e-3
