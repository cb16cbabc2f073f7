"""Packing: nothing lost, nothing leaks, EOS labelled (CORRECTNESS S1, S3, S4)."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset

from stages.finetuning.packing import PackedBlocks, best_fit_decreasing, collate_blocks, summed_lm_loss
from stages.finetuning.token_store import BATCH_DOCUMENTS, TokenizedDocuments, write_documents
from tests.helpers import tiny_models
from tests.helpers.library_forks import ROOT

PROMPT = 3  # tokens of every prompt here


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(0)
    return [[1] + [rng.randrange(3, 250) for _ in range(rng.randint(3, 40))] + [2] for _ in range(60)]


def documents(folder: Path, texts: list[list[int]]) -> TokenizedDocuments:
    return write_documents(folder / "d.arrow", ((text[:PROMPT], text[PROMPT:]) for text in texts), None)


def blocks_of(folder, texts, size, strategy, answers_only=False, order=None) -> list:
    order = np.arange(len(texts)) if order is None else np.array(order)
    blocks = PackedBlocks(documents(folder, texts), order, size, strategy, answers_only)
    return [blocks[i] for i in range(len(blocks))]


def ids_of(rows) -> list[int]:
    return [token for row in rows for token in row.token_ids.tolist()]


@pytest.mark.parametrize("strategy", ["wrapped", "bfd"])
@pytest.mark.parametrize("size", [16, 64, 1000])
def test_no_token_is_lost_and_no_block_is_too_long(texts, strategy, size, tmp_path):
    blocks = blocks_of(tmp_path, texts, size, strategy)
    assert sorted(t for rows in blocks for t in ids_of(rows)) == sorted(t for text in texts for t in text)
    assert max(len(ids_of(rows)) for rows in blocks) <= size


@pytest.mark.parametrize("size", [16, 64, 1000])
def test_wrapped_keeps_the_order_and_makes_the_true_number_of_blocks(texts, size, tmp_path):
    order = random.Random(1).sample(range(len(texts)), len(texts))
    blocks = blocks_of(tmp_path, texts, size, "wrapped", order=order)
    flat = [t for i in order for t in texts[i]]
    assert [ids_of(rows) for rows in blocks] == [flat[i : i + size] for i in range(0, len(flat), size)]
    assert all(len(rows) == 1 for rows in blocks)


def test_bfd_keeps_documents_whole_and_cuts_only_what_is_longer_than_a_block(texts, tmp_path):
    blocks = blocks_of(tmp_path, texts, 30, "bfd")
    rows = [tuple(row.token_ids.tolist()) for block in blocks for row in block]
    pieces = [tuple(text[i : i + 30]) for text in texts for i in range(0, len(text), 30)]
    assert sorted(rows) == sorted(pieces)


def test_best_fit_is_the_textbooks():
    """Against a plain loop: longest first, each into the fullest block that still holds it."""
    rng = random.Random(3)
    for _ in range(30):
        lengths = [rng.randint(1, 20) for _ in range(rng.randint(1, 40))]
        left, expected = [], []
        for piece in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            holds = [b for b, room in enumerate(left) if room >= lengths[piece]]
            if not holds:
                left.append(20)
                holds = [len(left) - 1]
            left[min(holds, key=lambda b: left[b])] -= lengths[piece]
        expected = sorted(left)
        blocks = best_fit_decreasing(np.array(lengths), 20)
        assert sorted(20 - sum(lengths[i] for i in block) for block in blocks) == expected
        assert sorted(i for block in blocks for i in block) == list(range(len(lengths)))


@pytest.mark.parametrize("strategy", ["wrapped", "bfd"])
def test_every_token_but_a_rows_first_is_labelled_eos_among_them(texts, strategy, tmp_path):
    rows = [row for block in blocks_of(tmp_path, texts, 64, strategy) for row in block]
    assert all(not row.is_label[0] and row.is_label[1:].all() for row in rows)
    eos = sum(int((row.is_label & (row.token_ids == 2)).sum()) for row in rows)
    begins_with_eos = sum(int(row.token_ids[0]) == 2 for row in rows)
    assert eos == len(texts) - begins_with_eos


@pytest.mark.parametrize("strategy", ["wrapped", "bfd"])
def test_loss_on_the_answer_labels_answers_and_their_ends_alone(texts, strategy, tmp_path):
    rows = [row for block in blocks_of(tmp_path, texts, 64, strategy, answers_only=True) for row in block]
    actual = sorted(int(t) for row in rows for t in row.token_ids[row.is_label])
    firsts = [int(row.token_ids[0]) for row in rows] if strategy == "wrapped" else []
    every = [t for text in texts for t in text[PROMPT:]]
    assert len(every) - len(firsts) <= len(actual) <= len(every)
    assert strategy == "wrapped" or actual == sorted(every)
    assert actual.count(1) == 0 and actual.count(2) >= len(texts) - len(firsts)


def one_by_one(model, texts, first=1) -> float:
    """Summed loss of documents alone, in float64, by Transformers' own forward pass."""
    total = 0.0
    for text in texts:
        logits = model(torch.tensor([text])).logits[0].double().log_softmax(-1)
        total -= sum(float(logits[t - 1, text[t]]) for t in range(first, len(text)))
    return total


@torch.no_grad()
def test_packed_loss_equals_unpacked_loss(texts, tmp_path):
    model = tiny_models.llama(tiny_models.tokenizer())
    batch = collate_blocks(blocks_of(tmp_path, texts, 96, "bfd"))
    assert batch["items"] == sum(len(text) - 1 for text in texts)
    assert float(summed_lm_loss(model, batch["content"], "fp32")) == pytest.approx(one_by_one(model, texts), rel=1e-5)
    batch = collate_blocks(blocks_of(tmp_path, texts, 96, "bfd", answers_only=True))
    alone = one_by_one(model, texts, first=PROMPT)
    assert float(summed_lm_loss(model, batch["content"], "fp32")) == pytest.approx(alone, rel=1e-5)


@torch.no_grad()
def test_wrapped_blocks_attend_across_documents_as_published(texts, tmp_path):
    model = tiny_models.llama(tiny_models.tokenizer())
    blocks = blocks_of(tmp_path, texts, 96, "wrapped")
    batch = collate_blocks(blocks)
    whole = one_by_one(model, [ids_of(rows) for rows in blocks])
    assert float(summed_lm_loss(model, batch["content"], "fp32")) == pytest.approx(whole, rel=1e-5)
    assert abs(whole - one_by_one(model, texts)) > 1


def test_gradients_are_those_of_transformers_own_loss(texts, tmp_path):
    """All weights learn, the tied output layer among them."""
    model = tiny_models.llama(tiny_models.tokenizer()).train()
    blocks = blocks_of(tmp_path, texts[:6], 96, "bfd")
    summed_lm_loss(model, collate_blocks(blocks)["content"], "fp32").backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for text in texts[:6]:
        ids = torch.tensor([text])
        (model(input_ids=ids, labels=ids).loss * (len(text) - 1)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, atol=1e-4, rtol=1e-4)


def test_documents_come_back_whole_through_the_map_and_through_datasets(tmp_path):
    texts = [[i % 7, *range(i % 5), 2] for i in range(2 * BATCH_DOCUMENTS + 10)]
    actual = write_documents(tmp_path / "d.arrow", ((text[:1], text[1:]) for text in texts), None)
    assert len(actual) == len(texts) and actual.lengths.tolist() == [len(text) for text in texts]
    for i in (0, 1, BATCH_DOCUMENTS - 1, BATCH_DOCUMENTS, 2 * BATCH_DOCUMENTS + 9):
        assert actual.tokens(i, 0, 99).tolist() == texts[i] and actual.tokens(i, 1, 2).tolist() == texts[i][1:2]
    assert Dataset.from_file(str(tmp_path / "d.arrow"))["input_ids"][:3] == texts[:3]


def test_documents_stop_when_there_are_enough_and_are_written_once(tmp_path):
    def read_documents(count):
        for i in range(count):
            read.append(i)
            yield [1], [5, 2]

    read: list[int] = []
    written = write_documents(tmp_path / "d.arrow", read_documents(10 * BATCH_DOCUMENTS), 4 * BATCH_DOCUMENTS)
    assert len(written) == 2 * BATCH_DOCUMENTS
    assert len(read) == 2 * BATCH_DOCUMENTS
    assert len(write_documents(tmp_path / "d.arrow", read_documents(5), None)) == len(written)  # as written before


def test_memory_is_not_that_of_the_text(tmp_path, library_forks):
    """25 M tokens more, 100 MB of ids, may add 15 MB (lengths, offsets and the order of packing)."""
    program = """
import numpy as np, sys
from pathlib import Path
from stages.finetuning.token_store import write_documents
from stages.finetuning.packing import PackedBlocks
def held():
    return int([l for l in open("/proc/self/status") if l.startswith("RssAnon")][0].split()[1])
def read(count):
    path = Path(sys.argv[1]) / f"{count}.arrow"
    documents = write_documents(path, (([1] * 100, [2] * 900) for _ in range(count)), None)
    blocks = PackedBlocks(documents, np.random.default_rng(0).permutation(len(documents)), 1024, "wrapped", False)
    return sum(len(row.token_ids) for i in range(0, len(blocks), 50) for row in blocks[i]), held()
print(-read(5_000)[1], *read(30_000))
"""
    (tmp_path / "probe.py").write_text(program)
    probe = library_forks.start(["probe", str(tmp_path)], tmp_path, os.environ | {"PYTHONPATH": str(ROOT)})
    before, read, after = map(int, probe.communicate()[0].split())
    assert read > 500_000 and after + before < 15_000, after + before
