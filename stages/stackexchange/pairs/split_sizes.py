"""Check, before anything is trained on them, that the splits of a small site have enough questions for every stage."""

from pathlib import Path

from stages.artifacts.artifact import MANIFEST, read_manifest
from stages.runtime.stage_lines import print_line
from stages.stackexchange.pairs.table import question_key, read_pairs

# Questions below which SFT, the reward model, PPO (a quarter of its prompts select the best policy) and the evaluation
# stop.
NEEDED_QUESTIONS = {"finetune": 1, "reward": 2, "rl": 4, "evaluation": 1}
STAGES = {"finetune": "sft", "reward": "reward", "rl": "ppo", "evaluation": "evaluate"}  # the first that reads it


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
