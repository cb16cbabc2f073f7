"""Question records to rows of pairs: draw, convert each needed post once, drop what cannot be used, count all of it."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stages.render.markdown_tables import bin_of
from stages.stackexchange.markdown.convert import Converter, Limits, NotConvertedError, converter
from stages.stackexchange.pairs.counts import PairsTally
from stages.stackexchange.pairs.draw import pairs_of, split_of
from stages.stackexchange.pairs.table import SCHEMA, SPLITS


@dataclass(frozen=True)
class Lengths:
    """What lengths may be; None: any. `unit` is "characters", or "tokens" of `tokenizer` (a folder or hub id)."""

    unit: str
    tokenizer: str | None
    question: tuple[int, int | None]
    answer: tuple[int, int | None]


@dataclass(frozen=True)
class Rules:
    """How pairs are made."""

    max_pairs: int
    min_gap: int
    seed: int
    shares: tuple[tuple[str, float], ...]  # of the splits
    markdown: str
    limits: Limits
    lengths: Lengths


@dataclass(frozen=True)
class Group:
    """One piece of work: a row group of a part of the posts artifact."""

    part: Path
    number: int
    rules: Rules


def paired(group: Group) -> tuple[dict[str, pa.Table], dict]:
    """(pairs by split, what was counted) of one row group."""
    tally, rules = PairsTally(), group.rules
    shares, rows = dict(rules.shares), {name: [] for name in SPLITS}
    for question in pq.ParquetFile(group.part).read_row_group(group.number).to_pylist():
        split = split_of(question["site"], question["question_id"], shares, rules.seed)
        found = _pairs(question, rules, tally)
        rows[split] += found
        if found:
            tally.counts["questions_by_split"][split] += 1
            tally.counts["pairs_by_split"][split] += len(found)
    return {name: pa.Table.from_pylist(held, schema=SCHEMA) for name, held in rows.items()}, tally.as_dict()


def _pairs(question: dict, rules: Rules, tally: PairsTally) -> list[dict]:
    """Rows of SCHEMA of one question: pairs are drawn first, then each post that they need is converted once."""
    answers, site, qid = question["answers"], question["site"], question["question_id"]
    tally.counts["posts_in"].update(questions=1, answers=len(answers))
    drawn = pairs_of([a["score"] for a in answers], rules.max_pairs, rules.seed, site, qid, rules.min_gap)
    if not drawn:
        tally.drop("no two scores differ enough", 1 + len(answers))
        return []
    tally.counts["done"]["pairs_drawn"] += len(drawn)
    texts = Texts(question, rules, tally)
    if texts.question_fault:
        tally.drop(f"question {texts.question_fault}", 1 + len(answers))
        tally.counts["dropped_pairs"][f"question {texts.question_fault}"] += len(drawn)
        return []
    kept = [pair for pair in drawn if not _dropped(pair, texts, tally)]
    _count(question, drawn, kept, texts, tally)
    return [_row(question, answers[j], answers[k], texts.question, texts.answers[j], texts.answers[k])
            for j, k in kept]


class Texts:
    """A question's Markdown and, by their place, that of the answers asked for; what is at fault has a reason."""

    def __init__(self, question: dict, rules: Rules, tally: PairsTally):
        self.of, self.rules, self.tally = question, rules, tally
        self.answers: dict[int, str] = {}
        self.faults: dict[int, str | None] = {}
        self.question, self.question_fault = self._usable(question["question"], question["question_id"],
                                                          rules.lengths.question)

    def fault(self, number: int) -> str | None:
        """Why this answer cannot be used; None when it can."""
        if number not in self.faults:
            answer = self.of["answers"][number]
            self.answers[number], self.faults[number] = self._usable(answer["text"], answer["id"],
                                                                     self.rules.lengths.answer)
        return self.faults[number]

    def _usable(self, text: str, post: int, allowed: tuple[int, int | None]) -> tuple[str, str | None]:
        self.tally.counts["done"]["conversions"] += 1
        try:
            markdown = _converter(self.rules.markdown, self.rules.limits)(text, self.of["markup"])
        except NotConvertedError as reason:
            self.tally.failed(str(reason), f"{self.of['site']} {post}")
            return "", "not converted"
        return markdown, "empty" if not markdown.strip() else _misfit(markdown, allowed, self.rules.lengths)


def _misfit(text: str, allowed: tuple[int, int | None], lengths: Lengths) -> str | None:
    least, most = allowed
    if not least and most is None:
        return None
    length = len(text) if lengths.unit == "characters" else len(_tokenizer(lengths.tokenizer).encode(text).ids)
    if length < least:
        return "too short"
    return "too long" if most is not None and length > most else None


def _dropped(pair: tuple[int, int], texts: Texts, tally: PairsTally) -> bool:
    faults = [fault for fault in map(texts.fault, pair) if fault]
    reason = f"answer {faults[0]}" if faults else None
    if not reason and texts.answers[pair[0]].strip() == texts.answers[pair[1]].strip():
        reason = "answers equal"
    if reason:
        tally.counts["dropped_pairs"][reason] += 1
    return reason is not None


def _count(question: dict, drawn: list, kept: list, texts: Texts, tally: PairsTally) -> None:
    """One reason for each post of a question that is in no pair; and what is in pairs, by its kinds."""
    answers, counts = question["answers"], tally.counts
    used, needed = ({number for pair in pairs for number in pair} for pairs in (kept, drawn))
    for number in range(len(answers)):
        if number not in used:
            fault = texts.faults.get(number)
            counts["dropped_posts"][f"answer {fault}" if fault else "answer in dropped pairs only" if number in needed
                                    else "answer in no drawn pair"] += 1
    if not kept:
        tally.drop("question without a usable pair", 1)
        return
    counts["done"]["posts_out"] += 1 + len(used)
    counts["site_questions"][question["site"]] += 1
    counts["site_pairs"][question["site"]] += len(kept)
    counts["licenses"].update([question["license"], *(answers[number]["license"] for number in used)])
    counts["scores"].update(answers[number]["score"] for number in used)
    counts["score_gaps"].update(answers[j]["score"] - answers[k]["score"] for j, k in kept)
    counts["question_characters"][bin_of(len(texts.question))] += 1
    counts["answer_characters"].update(bin_of(len(texts.answers[number])) for number in used)


def _row(question: dict, better: dict, worse: dict, prompt: str, response_j: str, response_k: str) -> dict:
    posts = (question, better, worse)
    return {"qid": question["question_id"], "site": question["site"], "question": prompt, "response_j": response_j,
            "response_k": response_k, "score_j": better["score"], "score_k": worse["score"], "date": question["date"],
            "metadata": [question["url"], f"https://{question['site']}", question["author_url"]],
            "answer_j": better["id"], "answer_k": worse["id"], "authors": [post["author"] for post in posts],
            "author_urls": [post["author_url"] for post in posts], "licenses": [post["license"] for post in posts]}


@lru_cache(maxsize=1)
def _converter(style: str, limits: Limits) -> Converter:
    return converter(style, limits)


@lru_cache(maxsize=1)
def _tokenizer(place: str):
    from tokenizers import Tokenizer  # needed for lengths in tokens only
    file = Path(place) / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file)) if file.exists() else Tokenizer.from_pretrained(place)
    except Exception as error:  # the library raises bare Exception, for a bad file and for an unreachable hub alike
        raise ValueError(f"tokenizer {place}: no such folder with a tokenizer.json, nor to be had from the hub: "
                         f"{' '.join(str(error).split())[:200]}") from None
