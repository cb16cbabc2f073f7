"""TODO docstring."""

from dataclasses import dataclass
from datetime import date
from typing import Literal

from stages.recipe.schema import setting


def _is_day(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


@dataclass(frozen=True)
class Posts:
    """Dump to questions with scored answers."""

    votes: Literal["net", "up"] = setting("net", "up minus down, as the dump's Score [ours: not stated]; 'up': of Votes.xml")
    min_answers: int = setting(2, "questions with fewer answers are dropped [card]")
    sites: tuple[str, ...] = setting((), "only these; empty: all [card]")
    tags: tuple[str, ...] = setting((), "only questions with one of these; empty: all [card]")
    asked_from: str | None = setting(None, "only questions of this day and later, as 2015-01-31 [ours: not limited]")
    asked_before: str | None = setting(None, "only questions of before this day, as 2016-01-31 [ours: not limited]")
    code_languages: tuple[str, ...] = setting(
        (), "only questions with a code block, or an answer's, marked as one of these; empty: all [card]")
    max_questions: int | None = setting(None, "keep so many, drawn by `seed`; null: all [card]")
    max_bad_rows_share: float = setting(0.01, "stop when more than this share of the rows cannot be read [ours]")
    max_row_bytes: int = setting(16_777_216, "rows over this size are set aside [ours]")
    max_question_bytes: int = setting(67_108_864, "questions that with their answers are over this size are dropped [ours]")
    part_bytes: int = setting(67_108_864, "of posts' text, from which one part-*.parquet is made, about [ours]")
    seed: int = setting(42, "of the order of the questions, and so of which `max_questions` are kept [card]")

    def __post_init__(self):
        for name in ("asked_from", "asked_before"):
            if getattr(self, name) is not None and not _is_day(getattr(self, name)):
                raise ValueError(f"{name} must be a day, as 2015-01-31, not {getattr(self, name)!r}")
        if self.max_questions is not None and self.max_questions < 1:
            raise ValueError(f"max_questions must be 1 or more, or null, not {self.max_questions}")


@dataclass(frozen=True)
class Pairs:
    """Questions to preference pairs, split by question."""

    max_pairs_per_question: int = setting(10, "drawn without replacement from all pairs that differ in score [paper]")
    min_score_gap: int = setting(1, "least difference of a pair's scores [paper: any]")
    markdown: Literal["published", "clean"] = setting(
        "published", "'published': markdownify's defaults, blank lines collapsed, in code too [card: notebook]; "
        "'clean': code as it is, nothing escaped")
    length_unit: Literal["characters", "tokens"] = setting("characters", "of the four lengths below, in Markdown [ours]")
    tokenizer: str | None = setting(None, "folder or hub id, when length_unit is tokens [ours]")
    min_question_length: int = setting(0, "shorter questions are dropped [card: none]")
    max_question_length: int | None = setting(None, "longer questions are dropped; null: none [card]")
    min_answer_length: int = setting(0, "pairs with a shorter answer are dropped [card: none]")
    max_answer_length: int | None = setting(None, "pairs with a longer answer are dropped; null: none [card]")
    max_post_characters: int = setting(200_000, "of HTML or of Markdown; posts over this are not converted [ours]")
    max_post_tags: int = setting(5_000, "posts with more '<' are not converted [ours]")
    max_post_depth: int = setting(100, "posts with more nested elements are not converted [ours]")
    max_post_blanks: int = setting(1_000, "posts with more white space in a row are not converted [ours]")
    finetune_share: float = setting(3.0, "part of the questions, relative to the other three [card: millions]")
    reward_share: float = setting(3.0, "as finetune_share [card]")
    rl_share: float = setting(3.0, "as finetune_share [card]")
    evaluation_share: float = setting(1.8, "as finetune_share; never trained on [card]")
    seed: int = setting(42, "of the split and of the draw of pairs [card]")

    def __post_init__(self):
        if self.min_score_gap < 1:
            raise ValueError(f"min_score_gap must be 1 or more, not {self.min_score_gap}")
        if self.length_unit == "tokens" and not self.tokenizer:
            raise ValueError("length_unit tokens needs a tokenizer: a folder or hub id")
