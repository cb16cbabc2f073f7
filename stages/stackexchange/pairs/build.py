"""Build pairs from question records: draw, convert each post needed once, drop what cannot be used, count it all."""

from dataclasses import dataclass
from functools import lru_cache
from math import isnan
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from stages.render.histogram_bins import bin_start
from stages.stackexchange.markdown.convert import NotConvertedError, make_converter
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
            counts["questions_by_split"][split] += 1
            counts["pairs_by_split"][split] += len(pairs)
    return {name: pa.Table.from_pylist(pairs, schema=SCHEMA) for name, pairs in rows.items()}, counts.as_dict()


def _question_pairs(question: dict, rules: PairRules, counts: PairCounts) -> list[dict]:
    """Build one question's rows of SCHEMA: draw the pairs, then convert each post that they need once."""
    answers, site, qid = question["answers"], question["site"], question["question_id"]
    counts["posts_in"].update(questions=1, answers=len(answers))
    times = [parse_seconds(answer.get("date")) for answer in answers] if rules.later_wins else None
    drawn = draw_pairs([a["score"] for a in answers], rules.max_pairs, rules.seed, site, qid, rules.min_gap, times)
    if not drawn:
        counts.drop(_no_pair_reason(times), 1 + len(answers))
        return []
    counts["done"]["pairs_drawn"] += len(drawn)
    prompt = _convert(question["question"], question, qid, rules.lengths.question, rules, counts)
    if prompt.fault:
        counts.drop(f"question {prompt.fault}", 1 + len(answers))
        counts["dropped_pairs"][f"question {prompt.fault}"] += len(drawn)
        return []
    needed = dict.fromkeys(index for pair in drawn for index in pair)
    converted = {index: _convert(answers[index]["text"], question, answers[index]["id"], rules.lengths.answer, rules,
                                 counts) for index in needed}
    usable = [(j, k) for j, k in drawn if _is_usable(converted[j], converted[k], counts)]
    _count(question, prompt, converted, usable, counts)
    return [_row(question, answers[j], answers[k], prompt.markdown, converted[j].markdown, converted[k].markdown)
            for j, k in usable]


def _no_pair_reason(times: list[float] | None) -> str:
    if times is None:
        return "no two scores differ enough"
    return "the source has no dates of answers" if all(map(isnan, times)) else "no later answer scores higher"


class ConvertedPost(NamedTuple):
    """Markdown of a question or an answer, and why it cannot be used; None if it can."""

    markdown: str
    fault: str | None


def _convert(text: str, question: dict, post_id: int, allowed: tuple[int, int | None], rules: PairRules,
             counts: PairCounts) -> ConvertedPost:
    counts["done"]["conversions"] += 1
    try:
        markdown = _converter(rules.markdown)(text, question["markup"])
    except NotConvertedError as reason:
        counts.add_not_converted(str(reason), f"{question['site']} {post_id}")
        return ConvertedPost("", "not converted")
    return ConvertedPost(markdown, _length_fault(markdown, allowed, rules.lengths) if markdown.strip() else "empty")


def _length_fault(text: str, allowed: tuple[int, int | None], lengths: LengthLimits) -> str | None:
    minimum, maximum = allowed
    if not minimum and maximum is None:
        return None
    length = len(text) if lengths.unit == "characters" else len(_tokenizer(lengths.tokenizer).encode(text).ids)
    if length < minimum:
        return "too short"
    return "too long" if maximum is not None and length > maximum else None


def _is_usable(better: ConvertedPost, worse: ConvertedPost, counts: PairCounts) -> bool:
    fault = better.fault or worse.fault
    are_equal = better.markdown.strip() == worse.markdown.strip()
    reason = f"answer {fault}" if fault else "answers equal" if are_equal else None
    if reason:
        counts["dropped_pairs"][reason] += 1
    return reason is None


def _count(question: dict, prompt: ConvertedPost, converted: dict[int, ConvertedPost], usable: list[tuple[int, int]],
           counts: PairCounts) -> None:
    """Count one reason for each post that is in no pair, and the properties of what is in pairs."""
    answers, used = question["answers"], {index for pair in usable for index in pair}
    for index in range(len(answers)):
        if index not in converted:
            counts["dropped_posts"]["answer in no drawn pair"] += 1
        elif index not in used:
            counts["dropped_posts"][f"answer {converted[index].fault or 'in dropped pairs only'}"] += 1
    if not usable:
        counts.drop("question without a usable pair", 1)
        return
    counts["done"]["posts_out"] += 1 + len(used)
    counts["site_questions"][question["site"]] += 1
    counts["site_pairs"][question["site"]] += len(usable)
    counts["licenses"].update([question["license"], *(answers[index]["license"] for index in used)])
    counts["scores"].update(answers[index]["score"] for index in used)
    counts["score_gaps"].update(answers[j]["score"] - answers[k]["score"] for j, k in usable)
    counts["question_characters"][bin_start(len(prompt.markdown))] += 1
    counts["answer_characters"].update(bin_start(len(converted[index].markdown)) for index in used)


def _row(question: dict, better: dict, worse: dict, prompt: str, response_j: str, response_k: str) -> dict:
    posts = (question, better, worse)
    return {"qid": question["question_id"], "site": question["site"], "question": prompt, "response_j": response_j,
            "response_k": response_k, "score_j": better["score"], "score_k": worse["score"], "date": question["date"],
            "metadata": [question["url"], site_url(question["site"]), question["author_url"]],
            "answer_j": better["id"], "answer_k": worse["id"], "date_j": better.get("date"),
            "date_k": worse.get("date"), "authors": [post["author"] for post in posts],
            "author_urls": [post["author_url"] for post in posts], "licenses": [post["license"] for post in posts]}


_converter = lru_cache(maxsize=1)(make_converter)


@lru_cache(maxsize=1)
def _tokenizer(name: str):
    from tokenizers import Tokenizer  # only needed for lengths in tokens
    file = Path(name) / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file)) if file.exists() else Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises bare Exception, for a bad file and for an unreachable hub alike
        raise ValueError(f"tokenizer {name}: no such folder with a tokenizer.json, and it cannot be loaded from the "
                         f"hub: {' '.join(str(error).split())[:200]}") from None
