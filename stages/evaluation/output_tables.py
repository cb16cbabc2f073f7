"""Write the tables of an evaluation: each question with its answers, and each held-out pair with its scores."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def write_samples(path: Path, rows: list[dict], texts: dict[str, list[str]], numbers: dict[str, np.ndarray]) -> None:
    """Write samples.parquet; rows: of the pairs table, one a question. texts: by writer. numbers: further columns."""
    columns = {"site": [row["site"] for row in rows], "qid": [row["qid"] for row in rows],
               "question": [row["question"] for row in rows], "url": [row["metadata"][0] for row in rows],
               **{name: [row.get(name, [])[:2] for row in rows]  # of the question, of the best answer
                  for name in ("authors", "author_urls", "licenses")}, **texts}
    columns |= {name: _nullable(values) for name, values in numbers.items()}
    pq.write_table(pa.table(columns), path, compression="zstd")


def write_question_scores(path: Path, rows: list[dict], scores: dict[str, dict[str, np.ndarray]]) -> None:
    """Write per_question.parquet: a row for each policy and question, with the scores that are known.

    Args:
        rows: of the pairs table, one a question.
        scores: by policy and by name [N].
    """
    names = dict.fromkeys(name for columns in scores.values() for name in columns)
    unknown = np.full(len(rows), np.nan)
    columns = {"policy": [policy for policy in scores for _ in rows],
               **{key: [row[key] for _ in scores for row in rows] for key in ("site", "qid")},
               **{name: _nullable(np.concatenate([columns.get(name, unknown) for columns in scores.values()]))
                  for name in names}}
    pq.write_table(pa.table(columns), path, compression="zstd")


def write_pairs(
    path: Path, rows: list[dict], better: np.ndarray, worse: np.ndarray, scores: dict[str, np.ndarray | None]
) -> None:
    """Write per_pair.parquet; rows: of the pairs table. better, worse: indices of their answers into the scores."""
    columns = {name: [row[name] for row in rows] for name in ("site", "qid", "score_j", "score_k")}
    for name, values in scores.items():
        if values is not None:
            columns |= {f"{name}_j": _nullable(values[better]), f"{name}_k": _nullable(values[worse])}
    pq.write_table(pa.table(columns), path, compression="zstd")


def _nullable(values) -> pa.Array:
    return pa.array(np.asarray(values, float), pa.float64(), from_pandas=True)  # NaN, "does not apply", becomes null
