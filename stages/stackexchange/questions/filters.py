"""Filter questions. A question is dropped for the first reason that applies, and counted under it."""

import re
from dataclasses import dataclass

CODE_LANGUAGE = re.compile(r"""<(?:pre|code)\b[^<>]*?class\s*=\s*["'][^"'<>]*?\blang(?:uage)?-([\w+#.-]+)""", re.ASCII)


@dataclass(frozen=True)
class QuestionFilter:
    """Which questions are kept; an empty tuple or None is no restriction. Languages are in lower case."""

    sites: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    asked_from: str | None = None
    asked_before: str | None = None
    code_languages: tuple[str, ...] = ()
    min_answers: int = 0

    def drop_reason(self, question: dict) -> str | None:
        """Return why a record (schema: stages/stackexchange/questions/table.py) is dropped; None if it is kept."""
        date = question["date"].replace("/", "-")  # the published tables write 2015/09/02
        if self.sites and question["site"] not in self.sites:
            return "of another site"
        if self.tags and not set(self.tags) & set(question["tags"]):
            return "without one of the tags"
        if (self.asked_from and date < self.asked_from) or (self.asked_before and date >= self.asked_before):
            return "asked outside the dates"
        if len(question["answers"]) < self.min_answers:
            return "too few answers"
        if self.code_languages and not set(self.code_languages) & _code_languages(question):
            return "no code in one of the languages"
        return None


def _code_languages(question: dict) -> set[str]:
    """Return the languages of code blocks in the question and its answers, in lower case."""
    texts = (question["question"], *(answer["text"] for answer in question["answers"]))
    return {name.lower() for text in texts for name in CODE_LANGUAGE.findall(text)}
