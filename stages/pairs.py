"""Pairs: questions with scored answers to preference pairs in Markdown, split by question.

    python -m stages.pairs --recipe configs/demo.yaml --posts results/demo/posts --out results/demo/pairs

Writes finetune, reward, rl and evaluation `.parquet`: one row a pair, with the columns of stack-exchange-paired and the
two scores. A question is in one of them only; consumers of prompts take each (site, qid) once.
"""

from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stages.recipe import Pairs
from stages.text import questions
from stages.text.markdown import NotConvertedError, markdown_of
from stages.text.pairing import pairs_of, split_of
from stages.text.tables import SPLITS

ROW_GROUP_PAIRS = 2000
DROPPED_IDS = 20  # named for each reason; all are counted
SCHEMA = pa.schema([
    ("qid", pa.int64()), ("site", pa.string()), ("question", pa.string()), ("response_j", pa.string()),
    ("response_k", pa.string()), ("score_j", pa.int64()), ("score_k", pa.int64()), ("date", pa.string()),
    ("metadata", pa.list_(pa.string())),
])


def run(config: Pairs, out: Path, *, posts: Path) -> dict:
    """Fill `out` and return counts: pairs_drawn = the pairs written + the sum of `dropped_pairs`.

    response_j is the better answer (score_j > score_k); metadata is [url of the question, site, author of the question,
    author of response_j, author of response_k]. Raises ValueError when no pair comes of what `posts` holds.
    """
    tally = Tally()
    with ExitStack() as stack:
        writers = {name: stack.enter_context(PairWriter(out / f"{name}.parquet")) for name in SPLITS}
        for question in questions.read(posts):
            split = split_of(question["site"], question["question_id"], _shares(config), config.seed)
            pairs = _pairs(question, config, tally)
            writers[split].add(pairs)
            tally.questions[split] += bool(pairs)
            tally.pairs[split] += len(pairs)
    metrics = tally.metrics()
    if not metrics["pairs"]:
        raise ValueError(f"{posts}: no pair comes of its questions; dropped: {metrics['dropped_questions']}")
    return metrics


def _shares(config: Pairs) -> dict[str, float]:
    return {name: getattr(config, f"{name}_share") for name in SPLITS}


class Tally:
    """What was counted, and the first few ids behind each reason for which a post was dropped."""

    def __init__(self):
        self.questions, self.pairs = Counter(dict.fromkeys(SPLITS, 0)), Counter(dict.fromkeys(SPLITS, 0))
        self.dropped_questions, self.dropped_pairs = Counter(), Counter()
        self.drawn = self.conversions = 0
        self.not_converted: dict[str, list[str]] = {}
        self.failures: Counter = Counter()

    def failed(self, reason: str, post: str) -> None:
        """Count one post without Markdown; `post` is its site and id."""
        self.failures[reason] += 1
        named = self.not_converted.setdefault(reason, [])
        if len(named) < DROPPED_IDS:
            named.append(post)

    def metrics(self) -> dict:
        return {"pairs": self.pairs.total(), "questions": self.questions.total(), "pairs_drawn": self.drawn,
                "conversions": self.conversions,
                "pairs_by_split": dict(self.pairs), "questions_by_split": dict(self.questions),
                "dropped_questions": dict(sorted(self.dropped_questions.items())),
                "dropped_pairs": dict(sorted(self.dropped_pairs.items())),
                "posts_not_converted": dict(sorted(self.failures.items())),
                "posts_not_converted_ids": self.not_converted}


def _pairs(question: dict, config: Pairs, tally: Tally) -> list[dict]:
    """Rows of SCHEMA of one question: pairs are drawn first, then each post that they need is converted once."""
    answers, site, qid = question["answers"], question["site"], question["question_id"]
    drawn = pairs_of([a["score"] for a in answers], config.max_pairs_per_question, config.seed, site, qid)
    if not drawn:
        tally.dropped_questions["all scores equal"] += 1
        return []
    tally.drawn += len(drawn)
    prompt = _converted(question["question"], question["markup"], f"{site} {qid}", tally)
    texts = {} if not prompt else {
        number: _converted(answers[number]["text"], question["markup"], f"{site} {answers[number]['id']}", tally)
        for number in sorted({number for pair in drawn for number in pair})}
    rows = []
    for j, k in drawn:
        if reason := _unusable(prompt, texts.get(j), texts.get(k)):
            tally.dropped_pairs[reason] += 1
        else:
            rows.append(_row(question, answers[j], answers[k], prompt, texts[j], texts[k]))
    if not rows:
        tally.dropped_questions["all pairs dropped"] += 1
    return rows


def _converted(text: str, markup: str, post: str, tally: Tally) -> str | None:
    """Markdown; "" where there is nothing but white space; None where the conversion failed."""
    tally.conversions += 1
    try:
        markdown = markdown_of(text, markup)
    except NotConvertedError as reason:
        tally.failed(str(reason), post)
        return None
    return markdown if markdown.strip() else ""


def _unusable(question: str | None, better: str | None, worse: str | None) -> str | None:
    if not question:
        return "question not converted" if question is None else "question empty"
    if better is None or worse is None:
        return "answer not converted"
    if not (better and worse):
        return "answer empty"
    return "answers equal" if better.strip() == worse.strip() else None


def _row(question: dict, better: dict, worse: dict, prompt: str, response_j: str, response_k: str) -> dict:
    return {"qid": question["question_id"], "site": question["site"], "question": prompt, "response_j": response_j,
            "response_k": response_k, "score_j": better["score"], "score_k": worse["score"], "date": question["date"],
            "metadata": [question["url"], question["site"], question["author"], better["author"], worse["author"]]}


class PairWriter:
    """One parquet file, with one row group in memory; written even when it stays empty."""

    def __init__(self, path: Path):
        self.path, self.held = path, []

    def add(self, rows: list[dict]) -> None:
        """Take in rows of SCHEMA."""
        self.held += rows
        while len(self.held) >= ROW_GROUP_PAIRS:
            self._flush()

    def _flush(self) -> None:
        group, self.held = self.held[:ROW_GROUP_PAIRS], self.held[ROW_GROUP_PAIRS:]
        self.writer.write_table(pa.Table.from_pylist(group, schema=SCHEMA))

    def __enter__(self) -> "PairWriter":
        self.writer = pq.ParquetWriter(self.path, SCHEMA, compression="zstd")
        return self

    def __exit__(self, kind, error, trace) -> None:
        if self.held and not error:
            self._flush()
        self.writer.close()


if __name__ == "__main__":
    from stages.plumbing.command import main
    main(run)
