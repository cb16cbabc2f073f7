"""How much text a run has, and how long its texts are, from a pairs artifact."""

import pyarrow as pa
import pytest

from stages.planning.data_size import DataSize, measure_pairs
from stages.planning.hardware import Card, Hardware
from stages.stackexchange.pairs.table import SCHEMA, SPLITS, PairsWriter

ROWS = [("a" * 400, 1, 40, 2, 120), ("a" * 400, 1, 40, 3, 80), ("b" * 200, 4, 800, 5, 160)]  # of two questions


@pytest.fixture
def pairs(tmp_path):
    for split in SPLITS:
        (tmp_path / split).mkdir()
        writer = PairsWriter(tmp_path / split / "part-0.parquet")
        rows = [dict.fromkeys(SCHEMA.names) | {
            "site": "s", "qid": len(question), "question": question, "answer_j": better, "answer_k": worse,
            "response_j": "j" * better_length, "response_k": "k" * worse_length}
            for question, better, better_length, worse, worse_length in ROWS]
        writer.add(pa.Table.from_pylist(rows, schema=SCHEMA))
        writer.close()
    return tmp_path


def test_texts_have_the_lengths_of_the_pairs(pairs):
    size = measure_pairs(pairs, None)
    assert (size.reward_pairs, size.evaluation_pairs, size.rl_questions) == (3, 3, 2)
    assert size.question_tokens == (400 + 200) / 2 / 4
    assert size.answer_tokens == (40 + 120 + 80 + 800 + 160) / 5 / 4  # the better answer of two pairs is one
    assert size.finetune_tokens == (400 + 40 + 400 + 40 + 200 + 800) / 4
    assert measure_pairs(pairs, 100).finetune_tokens == (400 + 40 + 400 + 40) / 4  # the long answer is left out


def test_a_batch_by_question_has_every_text_once(pairs):
    size = measure_pairs(pairs, None)
    assert size.pair_tokens(512, "question") == (600 + 1200) / 4 / 3
    assert size.pair_tokens(512, "pair") == 2 * (75 + 60) and size.pair_tokens(50, "pair") == 100
    assert size.sample_tokens(32, 512) == (32, 60)
    assert DataSize().pair_tokens(512, "pair") == 512 and DataSize().sample_tokens(100, 50) == (50, 25)


def test_a_processor_has_a_rate_for_each_precision():
    processor, card = (Hardware(Card("", 8, 2.0, 20, fp32), 1, 0.5) for fp32 in (1.0, None))
    assert [processor.compute_seconds(1e12, precision) for precision in ("fp32", None, "bf16", "mixed")] == [2, 2, 1, 1]
    assert card.compute_seconds(1e12, "fp32") == 1
