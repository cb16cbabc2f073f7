"""Build pairs from question records: draw, convert each post needed once, drop what cannot be used, count it all."""

from dataclasses import dataclass
from functools import lru_cache
from math import isnan
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stages.render.histogram_bins import bin_start
from stages.stackexchange.markdown.convert import Converter, Limits, NotConvertedError, make_converter
from stages.stackexchange.pairs.counts import PairCounts
from stages.stackexchange.pairs.draw import assign_split, draw_pairs, parse_seconds
from stages.stackexchange.pairs.table import SCHEMA, SPLITS
from stages.stackexchange.questions.table import site_url


@dataclass(frozen=True)
class LengthLimits:
    """Allowed (minimum, maximum) lengths in characters, or in tokens of `tokenizer` (a folder or hub id)."""

    unit: str  # "characters" or "tokens"
    tokenizer: str | None
    question: tuple[int, int | None]
    answer: tuple[int, int | None]


@dataclass(frozen=True)
class PairRules:
    """Settings of the pairs."""

    max_pairs: int
    min_gap: int
    later_wins: bool
    seed: int
    shares: tuple[tuple[str, float], ...]  # of the splits
    markdown: str
    limits: Limits
    lengths: LengthLimits


def build_pairs(row_group: tuple[Path, int], rules: PairRules) -> tuple[dict[str, pa.Table], dict]:
    """Build the pairs of one row group (file, number) of the posts and return them by split, with their counts."""
    file, number = row_group
    counts, shares, rows = PairCounts(), dict(rules.shares), {name: [] for name in SPLITS}
    for question in pq.ParquetFile(file).read_row_group(number).to_pylist():
        split = assign_split(question["site"], question["question_id"], shares, rules.seed)
        pairs = _question_pairs(question, rules, counts)
        rows[split] += pairs
        if pairs:
            counts.counts["questions_by_split"][split] += 1
            counts.counts["pairs_by_split"][split] += len(pairs)
    return {name: pa.Table.from_pylist(pairs, schema=SCHEMA) for name, pairs in rows.items()}, counts.as_dict()


def _question_pairs(question: dict, rules: PairRules, counts: PairCounts) -> list[dict]:
    """Build one question's rows of SCHEMA: draw the pairs, then convert each post that they need once."""
    answers, site, qid = question["answers"], question["site"], question["question_id"]
    counts.counts["posts_in"].update(questions=1, answers=len(answers))
    times = [parse_seconds(answer.get("date")) for answer in answers] if rules.later_wins else None
    drawn = draw_pairs([a["score"] for a in answers], rules.max_pairs, rules.seed, site, qid, rules.min_gap, times)
    if not drawn:
        counts.drop(_no_pair_reason(times), 1 + len(answers))
        return []
    counts.counts["done"]["pairs_drawn"] += len(drawn)
    posts = ConvertedPosts(question, rules, counts)
    if posts.question_fault:
        counts.drop(f"question {posts.question_fault}", 1 + len(answers))
        counts.counts["dropped_pairs"][f"question {posts.question_fault}"] += len(drawn)
        return []
    usable = [pair for pair in drawn if _is_usable(pair, posts, counts)]
    _count(question, drawn, usable, posts, counts)
    return [_row(question, answers[j], answers[k], posts.question, posts.answers[j], posts.answers[k])
            for j, k in usable]


def _no_pair_reason(times: list[float] | None) -> str:
    if times is None:
        return "no two scores differ enough"
    return "the source has no dates of answers" if all(map(isnan, times)) else "no later answer scores higher"


class ConvertedPosts:
    """A question's Markdown, that of its answers (converted when first needed, by index), and their faults."""

    def __init__(self, question: dict, rules: PairRules, counts: PairCounts):
        self.record, self.rules, self.counts = question, rules, counts
        self.answers: dict[int, str] = {}
        self.faults: dict[int, str | None] = {}
        self.question, self.question_fault = self._convert_and_check(question["question"], question["question_id"],
                                                                     rules.lengths.question)

    def answer_fault(self, index: int) -> str | None:
        """Convert an answer and return why it cannot be used; None if it can."""
        if index not in self.faults:
            answer = self.record["answers"][index]
            self.answers[index], self.faults[index] = self._convert_and_check(answer["text"], answer["id"],
                                                                              self.rules.lengths.answer)
        return self.faults[index]

    def _convert_and_check(self, text: str, post_id: int, allowed: tuple[int, int | None]) -> tuple[str, str | None]:
        self.counts.counts["done"]["conversions"] += 1
        try:
            markdown = _converter(self.rules.markdown, self.rules.limits)(text, self.record["markup"])
        except NotConvertedError as reason:
            self.counts.add_not_converted(str(reason), f"{self.record['site']} {post_id}")
            return "", "not converted"
        return markdown, "empty" if not markdown.strip() else _length_fault(markdown, allowed, self.rules.lengths)


def _length_fault(text: str, allowed: tuple[int, int | None], lengths: LengthLimits) -> str | None:
    minimum, maximum = allowed
    if not minimum and maximum is None:
        return None
    length = len(text) if lengths.unit == "characters" else len(_tokenizer(lengths.tokenizer).encode(text).ids)
    if length < minimum:
        return "too short"
    return "too long" if maximum is not None and length > maximum else None


def _is_usable(pair: tuple[int, int], posts: ConvertedPosts, counts: PairCounts) -> bool:
    faults = [fault for fault in map(posts.answer_fault, pair) if fault]
    reason = f"answer {faults[0]}" if faults else None
    if not reason and posts.answers[pair[0]].strip() == posts.answers[pair[1]].strip():
        reason = "answers equal"
    if reason:
        counts.counts["dropped_pairs"][reason] += 1
    return reason is None


def _count(question: dict, drawn: list, usable: list, posts: ConvertedPosts, pair_counts: PairCounts) -> None:
    """Count one reason for each post that is in no pair, and the properties of what is in pairs."""
    answers, counts = question["answers"], pair_counts.counts
    used, needed = ({index for pair in pairs for index in pair} for pairs in (usable, drawn))
    for index in range(len(answers)):
        if index not in used:
            fault = posts.faults.get(index)
            counts["dropped_posts"][f"answer {fault}" if fault else "answer in dropped pairs only" if index in needed
                                    else "answer in no drawn pair"] += 1
    if not usable:
        pair_counts.drop("question without a usable pair", 1)
        return
    counts["done"]["posts_out"] += 1 + len(used)
    counts["site_questions"][question["site"]] += 1
    counts["site_pairs"][question["site"]] += len(usable)
    counts["licenses"].update([question["license"], *(answers[index]["license"] for index in used)])
    counts["scores"].update(answers[index]["score"] for index in used)
    counts["score_gaps"].update(answers[j]["score"] - answers[k]["score"] for j, k in usable)
    counts["question_characters"][bin_start(len(posts.question))] += 1
    counts["answer_characters"].update(bin_start(len(posts.answers[index])) for index in used)


def _row(question: dict, better: dict, worse: dict, prompt: str, response_j: str, response_k: str) -> dict:
    posts = (question, better, worse)
    return {"qid": question["question_id"], "site": question["site"], "question": prompt, "response_j": response_j,
            "response_k": response_k, "score_j": better["score"], "score_k": worse["score"], "date": question["date"],
            "metadata": [question["url"], site_url(question["site"]), question["author_url"]],
            "answer_j": better["id"], "answer_k": worse["id"], "date_j": better.get("date"),
            "date_k": worse.get("date"), "authors": [post["author"] for post in posts],
            "author_urls": [post["author_url"] for post in posts], "licenses": [post["license"] for post in posts]}


@lru_cache(maxsize=1)
def _converter(style: str, limits: Limits) -> Converter:
    return make_converter(style, limits)


@lru_cache(maxsize=1)
def _tokenizer(name: str):
    from tokenizers import Tokenizer  # only needed for lengths in tokens
    file = Path(name) / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file)) if file.exists() else Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises bare Exception, for a bad file and for an unreachable hub alike
        raise ValueError(f"tokenizer {name}: no such folder with a tokenizer.json, and it cannot be loaded from the "
                         f"hub: {' '.join(str(error).split())[:200]}") from None
