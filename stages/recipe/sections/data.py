"""Settings of the data stages: posts and pairs."""

from dataclasses import dataclass
from datetime import date
from typing import Literal

from stages.recipe.ranges import BYTES, COEFFICIENT, COUNT, COUNT_OR_NONE, SEED, SHARE, Range
from stages.recipe.schema import setting


def _is_day(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


@dataclass(frozen=True)
class Posts:
    """Dump to questions with scored answers."""

    votes: Literal["net", "up"] = setting(
        "net", "score of an answer: 'net', up votes minus down votes, as Score in the dump [ours: not stated]; 'up', "
        "up votes alone, counted from Votes.xml")
    min_answers: int = setting(2, "drop questions with fewer answers [card]", within=COUNT_OR_NONE)
    sites: tuple[str, ...] = setting((), "use only these sites; empty: all [card]")
    tags: tuple[str, ...] = setting((), "use only questions with one of these tags; empty: all [card]")
    asked_from: str | None = setting(
        None, "use only questions asked on this day or later, as 2015-01-31; null: no limit [ours: no limit]")
    asked_before: str | None = setting(
        None, "use only questions asked before this day, as 2016-01-31; null: no limit [ours: no limit]")
    code_languages: tuple[str, ...] = setting(
        (), "use only questions with a code block, in the question or an answer, in one of these languages; empty: "
        "all [card]")
    max_questions: int | None = setting(
        None, "maximum number of questions, drawn at random by `seed`; null: all [card]", within=COUNT)
    drop_watermarks: bool = setting(
        True, "drop the two made-up posts by which the dumps of June 2025 are marked, ids 1000000001 and 1000000010 "
        "[ours]")
    drop_answer_bot: bool = setting(True, "drop the posts of Stack Exchange's Answer Bot, user -2 [ours]")
    max_bad_rows_share: float = setting(
        0.01, "stop if more than this share of the rows cannot be read [ours]", within=SHARE)
    max_row_bytes: int = setting(16_777_216, "quarantine larger rows [ours]", within=BYTES)
    max_question_bytes: int = setting(
        67_108_864, "drop questions that are larger, answers included [ours]", within=BYTES)
    part_bytes: int = setting(
        67_108_864, "approximate text size of the posts in one part-*.parquet [ours]", within=Range(10_000, 10**15))
    seed: int = setting(
        42, "seed of the order of the questions, and so of the draw of `max_questions` [card]", within=SEED)

    def __post_init__(self):
        for name in ("asked_from", "asked_before"):
            if getattr(self, name) is not None and not _is_day(getattr(self, name)):
                raise ValueError(f"{name} must be a day, as 2015-01-31, not {getattr(self, name)!r}")


@dataclass(frozen=True)
class Pairs:
    """Questions to preference pairs, split by question."""

    max_pairs_per_question: int = setting(
        10, "maximum pairs per question, drawn without replacement from all pairs whose scores differ [paper]",
        within=COUNT)
    min_score_gap: int = setting(1, "minimum difference between the scores of a pair [paper: any]", within=COUNT)
    later_wins: bool = setting(
        False, "draw only pairs whose better answer was written later than the other one: an older answer had more "
        "time to get votes [SHP; paper: no]")
    markdown: Literal["published", "clean"] = setting(
        "published", "'published': markdownify with its defaults, blank lines collapsed even in code [card: "
        "notebook]; 'clean': code unchanged, nothing escaped")
    length_unit: Literal["characters", "tokens"] = setting(
        "characters", "unit of the four length limits below, measured in Markdown [ours]")
    tokenizer: str | None = setting(None, "folder or hub id of the tokenizer, if length_unit is tokens [ours]")
    min_question_length: int = setting(0, "drop shorter questions [card: none]", within=COUNT_OR_NONE)
    max_question_length: int | None = setting(None, "drop longer questions; null: no limit [card]", within=COUNT)
    min_answer_length: int = setting(0, "drop pairs with a shorter answer [card: none]", within=COUNT_OR_NONE)
    max_answer_length: int | None = setting(
        None, "drop pairs with a longer answer; null: no limit [card]", within=COUNT)
    finetune_share: float = setting(
        3.0, "size of the finetune split, relative to the other three [card: millions]", within=COEFFICIENT)
    reward_share: float = setting(3.0, "relative size of the reward split [card]", within=COEFFICIENT)
    rl_share: float = setting(3.0, "relative size of the rl split [card]", within=COEFFICIENT)
    evaluation_share: float = setting(
        1.8, "relative size of the evaluation split, which is never trained on [card]", within=COEFFICIENT)
    seed: int = setting(42, "seed of the split and of the draw of pairs [card]", within=SEED)

    def __post_init__(self):
        if not self.finetune_share + self.reward_share + self.rl_share + self.evaluation_share:
            raise ValueError("finetune_share, reward_share, rl_share and evaluation_share are all 0: one must be above")
        if self.length_unit == "tokens" and not self.tokenizer:
            raise ValueError("length_unit tokens needs a tokenizer: a folder or hub id")
