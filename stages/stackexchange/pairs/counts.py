"""Count what becomes pairs and what is dropped; counts add up over row groups, parts and shares.

A split must have enough questions for its stages: that is checked before anything is trained on it.
"""

from pathlib import Path

from stages.artifacts.artifact import MANIFEST, read_manifest
from stages.runtime.stage_lines import print_line
from stages.stackexchange.pairs.table import SPLITS, question_key, read_pairs
from stages.stackexchange.questions.counts import Counts, sort_counts

# Questions below which SFT, the reward model, PPO (a quarter of its prompts select the best policy) and the evaluation
# stop.
NEEDED_QUESTIONS = {"finetune": 1, "reward": 2, "rl": 4, "evaluation": 1}
STAGES = {"finetune": "sft", "reward": "reward", "rl": "ppo", "evaluation": "evaluate"}  # the first that reads it
MAX_IDS = 20  # listed for each reason; all are counted


class PairCounts(Counts):
    """Counts of questions, posts and pairs. Every post is in a pair, or in `dropped_posts` under one reason."""

    def __init__(self):
        super().__init__()
        self.not_converted: dict[str, list[str]] = {}

    def add_not_converted(self, reason: str, post: str) -> None:
        """Count a post that was not converted to Markdown; `post` is its site and id."""
        self["posts_not_converted"][reason] += 1
        self._list_ids(reason, [post])

    def _list_ids(self, reason: str, posts: list[str]) -> None:
        ids = self.not_converted.setdefault(reason, [])
        ids += posts[:MAX_IDS - len(ids)]

    def add(self, other: dict) -> None:
        """Add counts in the form of `as_dict`."""
        super().add(other["counts"])
        for reason, posts in other["not_converted"].items():
            self._list_ids(reason, posts)

    def as_dict(self) -> dict:
        """Return the counts, and up to MAX_IDS posts that were not converted by reason, for JSON."""
        return {"counts": super().as_dict(), "not_converted": self.not_converted}

    def metrics(self) -> dict:
        """Build the stage's metrics: posts_in = posts_out + dropped_posts; pairs_drawn = pairs + dropped_pairs."""
        by_split = {name: {split: self[name][split] for split in SPLITS}
                    for name in ("pairs_by_split", "questions_by_split")}
        names = ("dropped_questions", "dropped_posts", "dropped_pairs", "posts_not_converted", "licenses", "scores",
                 "score_gaps", "question_characters", "answer_characters")
        return {"pairs": self["pairs_by_split"].total(), "questions": self["questions_by_split"].total(),
                "pairs_drawn": self["done"]["pairs_drawn"], "conversions": self["done"]["conversions"],
                "posts_in": self["posts_in"].total(), "posts_out": self["done"]["posts_out"], **by_split,
                **{name: sort_counts(self[name]) for name in names},
                "posts_not_converted_ids": dict(sorted(self.not_converted.items())),
                "sites": {site: {"questions": n, "pairs": self["site_pairs"][site]}
                          for site, n in sorted(self["site_questions"].items())}}


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


def check_split_sizes(pairs: Path) -> None:
    """Raise ValueError for the splits with too few questions. One whose share is 0 in the recipe is not wanted.

    Reads only the first rows of each split.
    """
    recipe = read_manifest(pairs)["config"] if (pairs / MANIFEST).is_file() else {}
    wanted = {split: needed for split, needed in NEEDED_QUESTIONS.items() if recipe.get(f"{split}_share") != 0}
    counts = {split: _count_questions(pairs, split, needed) for split, needed in wanted.items()}
    missing = [f"{split} has {counts[split]} (needed: {needed})" for split, needed in wanted.items()
               if counts[split] < needed]
    if missing:
        raise ValueError(f"{pairs} has too few questions for a run: {', '.join(missing)}. Take a larger dump, or "
                         f"several; or give a split whose stage you do not run the share 0 (pairs.rl_share, ...)")


def print_split_sizes(config: dict, metrics: dict) -> None:
    """Print how many pairs and questions each split has, and a warning for those with too few for their stages.

    Args:
        config: the settings of the stage. One whose share is 0 is not wanted.
        metrics: of the stage.
    """
    pairs, questions = metrics["pairs_by_split"], metrics["questions_by_split"]
    sizes = [f"{split} {pairs[split]:,} pairs of {questions[split]:,} questions" for split in NEEDED_QUESTIONS]
    print_line(f"pairs: {', '.join(sizes)}")
    for split, needed in NEEDED_QUESTIONS.items():
        if config[f"{split}_share"] and questions[split] < needed:
            print_line(f"pairs: warning: the {split} split has {questions[split]} questions, and {STAGES[split]} needs "
                       f"{needed}: take a larger dump, or raise pairs.{split}_share")


def _count_questions(pairs: Path, split: str, most: int) -> int:
    """Count the questions of a split, up to `most`."""
    keys = set()
    for row in read_pairs(pairs, split, ["site", "qid"]):
        keys.add(question_key(row))
        if len(keys) == most:
            break
    return len(keys)
