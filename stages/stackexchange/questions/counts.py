"""Count questions and posts by name and value; counts add up over parts."""

from collections import Counter, defaultdict

from stages.render.histogram_bins import bin_start

DROPPED = "dropped: "


def sort_counts(counts: dict[str, int]) -> dict[str, int]:
    """Sort by name: numbers first, by value."""
    return dict(sorted(counts.items(), key=lambda item: _sort_key(item[0])))


def _sort_key(name: str) -> tuple[bool, int, str]:
    is_number = name.removeprefix("-").isdecimal()
    return not is_number, int(name) if is_number else 0, name


class Counts(defaultdict):
    """Counters by name. Every post is in a question that is kept, or in `dropped_posts` under one reason."""

    def __init__(self):
        super().__init__(Counter)

    def drop(self, reason: str, posts: int, questions: int = 1) -> None:
        """Count dropped posts and questions."""
        self["dropped_posts"][reason] += posts
        if questions:
            self["dropped_questions"][reason] += questions

    def add(self, other: dict[str, dict]) -> None:
        """Add counts in the form of `as_dict`."""
        for name, counts in other.items():
            self[name].update(counts)

    def as_dict(self) -> dict[str, dict]:
        """Return the counts with names that are text, for JSON."""
        return {name: {str(key): count for key, count in counts.items()} for name, counts in self.items()}


def count_question(question: dict, counts: Counts) -> None:
    """Count a question that is kept, with its answers."""
    answers = question["answers"]
    counts["questions"][question["site"]] += 1
    counts["answers"][question["site"]] += len(answers)
    counts["licenses"].update([question["license"], *(answer["license"] for answer in answers)])
    counts["scores"].update(answer["score"] for answer in answers)
    counts["years"][question["date"][:4]] += 1
    counts["question_characters"][bin_start(len(question["question"]))] += 1
    counts["answer_characters"].update(bin_start(len(answer["text"])) for answer in answers)


def posts_metrics(posts: Counter, votes: Counter, questions: Counts) -> dict:
    """Build the stage's metrics from the scans' counts of rows and the parts' counts of questions."""
    dropped = Counter({name[len(DROPPED):]: count for name, count in posts.items() if name.startswith(DROPPED)})
    sites = {site: {"questions": questions["questions"][site], "answers": questions["answers"][site]}
             for site in sorted(questions["questions"])}
    names = ("dropped_questions", "licenses", "scores", "years", "question_characters", "answer_characters")
    return {"questions": questions["questions"].total(), "answers": questions["answers"].total(),
            "rows_read": posts["rows_read"], "rows_set_aside": posts["rows_set_aside"],
            "votes_read": votes["rows_read"], "votes_set_aside": votes["rows_set_aside"],
            "bytes_read": posts["bytes_read"] + votes["bytes_read"],
            "accepted_answers_not_in_the_file": questions["accepted_not_in_the_file"].total(),
            "dropped": dict(sorted((dropped + questions["dropped_posts"]).items())), "sites": sites,
            **{name: sort_counts(questions[name]) for name in names}}
