"""Count what becomes pairs and what is dropped; counts add up over row groups, parts and shares."""

from collections import Counter

from stages.stackexchange.pairs.table import SPLITS
from stages.stackexchange.questions.counts import sort_counts

MAX_IDS = 20  # listed for each reason; all are counted


class PairCounts:
    """Counts of questions, posts and pairs. Every post is in a pair, or in `dropped_posts` under one reason."""

    NAMES = ("questions_by_split", "pairs_by_split", "posts_in", "done", "dropped_questions", "dropped_posts",
             "dropped_pairs", "posts_not_converted", "site_questions", "site_pairs", "licenses", "scores", "score_gaps",
             "question_characters", "answer_characters")

    def __init__(self):
        self.counts: dict[str, Counter] = {name: Counter() for name in self.NAMES}
        self.not_converted: dict[str, list[str]] = {}

    def add_not_converted(self, reason: str, post: str) -> None:
        """Count a post that was not converted to Markdown; `post` is its site and id."""
        self.counts["posts_not_converted"][reason] += 1
        self._list_ids(reason, [post])

    def _list_ids(self, reason: str, posts: list[str]) -> None:
        ids = self.not_converted.setdefault(reason, [])
        ids += posts[:MAX_IDS - len(ids)]

    def drop(self, reason: str, posts: int) -> None:
        """Count a question whose posts are all dropped for one reason."""
        self.counts["dropped_questions"][reason] += 1
        self.counts["dropped_posts"][reason] += posts

    def add(self, other: dict) -> None:
        """Add counts in the form of `as_dict`."""
        for name, counts in other["counts"].items():
            self.counts[name].update(counts)
        for reason, posts in other["not_converted"].items():
            self._list_ids(reason, posts)

    def as_dict(self) -> dict:
        """Return the counts with sorted names, all text, for JSON."""
        return {"counts": {name: {str(key): n for key, n in sorted(counts.items())}
                           for name, counts in self.counts.items()}, "not_converted": self.not_converted}

    def metrics(self) -> dict:
        """Build the stage's metrics: posts_in = posts_out + dropped_posts; pairs_drawn = pairs + dropped_pairs."""
        counts = self.counts
        by_split = {name: {split: counts[name][split] for split in SPLITS}
                    for name in ("pairs_by_split", "questions_by_split")}
        names = ("dropped_questions", "dropped_posts", "dropped_pairs", "posts_not_converted", "licenses", "scores",
                 "score_gaps", "question_characters", "answer_characters")
        return {"pairs": counts["pairs_by_split"].total(), "questions": counts["questions_by_split"].total(),
                "pairs_drawn": counts["done"]["pairs_drawn"], "conversions": counts["done"]["conversions"],
                "posts_in": counts["posts_in"].total(), "posts_out": counts["done"]["posts_out"], **by_split,
                **{name: sort_counts(counts[name]) for name in names},
                "posts_not_converted_ids": dict(sorted(self.not_converted.items())),
                "sites": {site: {"questions": n, "pairs": counts["site_pairs"][site]}
                          for site, n in sorted(counts["site_questions"].items())}}


def sum_metrics(shares: list[dict]) -> dict:
    """Sum the metrics of shares: numbers add up, and lists of ids keep their first entries."""
    names = dict.fromkeys(name for share in shares for name in share)
    return {name: _sum([share[name] for share in shares if name in share]) for name in names}


def _sum(values: list) -> int | dict | list:
    if isinstance(values[0], dict):
        same_names = all(list(value) == list(values[0]) for value in values)
        return sum_metrics(values) if same_names else sort_counts(sum_metrics(values))
    if isinstance(values[0], list):
        return [item for value in values for item in value][:MAX_IDS]
    return sum(values)
