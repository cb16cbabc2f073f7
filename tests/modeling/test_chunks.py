"""Rows of one forward pass: similar in length, and bounded in rows and in tokens."""

import random
from itertools import pairwise

from stages.modeling.packed.forward import chunk_by_length


def test_chunks_are_bounded_in_rows_and_tokens():
    rng = random.Random(0)
    lengths = [rng.randint(1, 60) for _ in range(200)] + [900, 500]
    chunks = list(chunk_by_length(lengths, max_rows=7, max_tokens=200))
    assert sorted(index for chunk in chunks for index in chunk) == list(range(len(lengths)))
    assert [lengths[i] for chunk in chunks for i in chunk] == sorted(lengths)
    totals = [sum(lengths[i] for i in chunk) for chunk in chunks]
    assert max(map(len, chunks)) == 7 and all(total <= 200 or len(chunk) == 1
                                              for total, chunk in zip(totals, chunks, strict=True))
    for (total, chunk), following in pairwise(zip(totals, chunks, strict=True)):  # none ends before it is full
        assert len(chunk) == 7 or total + lengths[following[1][0]] > 200


def test_without_a_bound_there_is_one_chunk():
    assert list(chunk_by_length([3, 1, 2])) == [[1, 2, 0]]
    assert list(chunk_by_length([3, 1, 2], 2)) == [[1, 2], [0]]
    assert list(chunk_by_length([], 2, 2)) == []
