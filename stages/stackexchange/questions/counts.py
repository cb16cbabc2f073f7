"""What is counted while posts become questions: names, and under each, values; all of it adds up over parts."""

from collections import Counter

from stages.render.markdown_tables import bin_of


def in_order(counts: dict[str, int]) -> dict[str, int]:
    """By number where the names are numbers, which come first."""
    return dict(sorted(counts.items(), key=lambda item: _place(item[0])))


def _place(name: str) -> tuple[bool, int, str]:
    number = name.removeprefix("-").isdecimal()
    return not number, int(name) if number else 0, name


class Tally:
    """Every post of a part is in a kept question, or in `dropped` under one reason."""

    NAMES = ("dropped", "dropped_questions", "questions", "answers", "accepted_not_in_the_file", "licenses", "scores",
             "years", "question_characters", "answer_characters")

    def __init__(self):
        self.counts: dict[str, Counter] = {name: Counter() for name in self.NAMES}

    def drop(self, reason: str, posts: int, questions: int = 1) -> None:
        self.counts["dropped"][reason] += posts
        if questions:
            self.counts["dropped_questions"][reason] += questions

    def keep(self, question: dict) -> None:
        counts, answers = self.counts, question["answers"]
        counts["questions"][question["site"]] += 1
        counts["answers"][question["site"]] += len(answers)
        counts["licenses"][question["license"]] += 1
        counts["licenses"].update(answer["license"] for answer in answers)
        counts["scores"].update(answer["score"] for answer in answers)
        counts["years"][question["date"][:4]] += 1
        counts["question_characters"][bin_of(len(question["question"]))] += 1
        counts["answer_characters"].update(bin_of(len(answer["text"])) for answer in answers)

    def as_dict(self) -> dict[str, dict]:
        return {name: {str(key): counter[key] for key in sorted(counter)} for name, counter in self.counts.items()}
