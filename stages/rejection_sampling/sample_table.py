"""Write the table of best-of-n that people open: each question with its best answer and all rewards."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stages.evaluation.statistics import bootstrap_mean
from stages.generation.best_of_n import best_of_kl, best_of_n_weights
from stages.generation.prompts import Prompts
from stages.rejection_sampling.candidates import Candidates
from stages.runtime.files import atomic_path
from stages.stackexchange.prompt import prompt_text

SCHEMA = pa.schema([
    ("site", pa.string()), ("qid", pa.int64()), ("question", pa.string()), ("url", pa.string()),
    ("author", pa.string()), ("prompt", pa.string()), ("winner", pa.string()), ("ended", pa.bool_()),
    ("reward", pa.float32()), ("rewards", pa.list_(pa.float32()))])


def write_samples(path: Path, prompts: Prompts, parts: Iterable[Candidates], tokenizer) -> None:
    """Write a row a prompt, with the candidates of one part in memory at a time."""
    rows = iter(prompts.rows)
    with atomic_path(path) as draft, pq.ParquetWriter(draft, SCHEMA, compression="zstd") as writer:
        for part in parts:
            writer.write_table(pa.Table.from_pylist(_rows(list(islice(rows, len(part.rewards))), part, tokenizer),
                                                    SCHEMA))


def _rows(rows: list[dict], part: Candidates, tokenizer) -> list[dict]:
    best = part.rewards.argmax(1)
    texts = tokenizer.batch_decode([responses[i] for responses, i in zip(part.responses, best, strict=True)],
                                   skip_special_tokens=True)
    return [{"site": row["site"], "qid": row["qid"], "question": row["question"], "url": row["metadata"][0],
             "author": row["authors"][0], "prompt": prompt_text(row["question"]), "winner": text,
             "ended": ended[i], "reward": rewards[i], "rewards": rewards}
            for row, text, ended, rewards, i in zip(rows, texts, part.ended, part.rewards.tolist(), best, strict=True)]


def measure_best_of_n(rewards: np.ndarray, bootstrap_samples: int, seed: int) -> list[dict]:
    """Compute, for n = 1, 2, 4, ... and S, the KL bound in nats and the unbiased mean reward with its 95 % interval.

    The interval is by prompt. rewards: [P, S].
    """
    prompts, samples = rewards.shape
    counts = [n for exponent in range(samples.bit_length()) if (n := 2**exponent) < samples] + [samples]
    expected = {n: (best_of_n_weights(rewards, n) * rewards).sum(1) for n in counts}
    return [{"n": n, "kl": best_of_kl(n), "reward": bootstrap_mean(
        values, np.arange(prompts), samples=bootstrap_samples, seed=seed)} for n, values in expected.items()]
