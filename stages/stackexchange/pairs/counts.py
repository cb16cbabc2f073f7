"""What is counted while questions become pairs; all of it adds up over row groups, parts and shares."""

from collections import Counter

from stages.stackexchange.pairs.table import SPLITS
from stages.stackexchange.questions.counts import in_order

DROPPED_IDS = 20  # named for each reason; all are counted


class PairsTally:
    """Every post that comes in is in a pair, or in `dropped_posts` under one reason."""

    NAMES = ("questions_by_split", "pairs_by_split", "posts_in", "done", "dropped_questions", "dropped_posts",
             "dropped_pairs", "posts_not_converted", "site_questions", "site_pairs", "licenses", "scores", "score_gaps",
             "question_characters", "answer_characters")

    def __init__(self):
        self.counts: dict[str, Counter] = {name: Counter() for name in self.NAMES}
        self.not_converted: dict[str, list[str]] = {}

    def failed(self, reason: str, post: str) -> None:
        """Count one post without Markdown; `post` is its site and id."""
        self.counts["posts_not_converted"][reason] += 1
        self.name(reason, [post])

    def name(self, reason: str, posts: list[str]) -> None:
        named = self.not_converted.setdefault(reason, [])
        named += posts[:DROPPED_IDS - len(named)]

    def drop(self, reason: str, posts: int) -> None:
        """Count a question whose posts all go for one reason."""
        self.counts["dropped_questions"][reason] += 1
        self.counts["dropped_posts"][reason] += posts

    def add(self, other: dict) -> None:
        for name, counts in other["counts"].items():
            self.counts[name].update(counts)
        for reason, posts in other["not_converted"].items():
            self.name(reason, posts)

    def as_dict(self) -> dict:
        return {"counts": {name: {str(key): n for key, n in sorted(counts.items())}
                           for name, counts in self.counts.items()}, "not_converted": self.not_converted}

    def metrics(self) -> dict:
        """As in the manifest: posts_in = posts_out + the sum of dropped_posts; pairs_drawn = pairs + dropped_pairs."""
        counts = self.counts
        by_split = {name: {split: counts[name][split] for split in SPLITS}
                    for name in ("pairs_by_split", "questions_by_split")}
        same = ("dropped_questions", "dropped_posts", "dropped_pairs", "posts_not_converted", "licenses", "scores",
                "score_gaps", "question_characters", "answer_characters")
        return {"pairs": counts["pairs_by_split"].total(), "questions": counts["questions_by_split"].total(),
                "pairs_drawn": counts["done"]["pairs_drawn"], "conversions": counts["done"]["conversions"],
                "posts_in": counts["posts_in"].total(), "posts_out": counts["done"]["posts_out"], **by_split,
                **{name: in_order(counts[name]) for name in same},
                "posts_not_converted_ids": dict(sorted(self.not_converted.items())),
                "sites": {site: {"questions": n, "pairs": counts["site_pairs"][site]}
                          for site, n in sorted(counts["site_questions"].items())}}


def added(shares: list[dict]) -> dict:
    """Metrics of shares as those of the whole: numbers add up, and of lists of ids the first stay."""
    names = dict.fromkeys(name for share in shares for name in share)
    return {name: _sum([share[name] for share in shares if name in share]) for name in names}


def _sum(values: list) -> int | dict | list:
    if isinstance(values[0], dict):
        alike = all(list(value) == list(values[0]) for value in values)
        return added(values) if alike else in_order(added(values))
    if isinstance(values[0], list):
        return [item for value in values for item in value][:DROPPED_IDS]
    return sum(values)
