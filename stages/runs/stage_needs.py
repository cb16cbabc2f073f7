"""Refuse, before the first stage, a recipe that leaves a later stage of the run without data.

Such a stage would stop after all the training before it.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from stages.recipe.algorithms import ALGORITHMS
from stages.recipe.lookups import SCRATCH
from stages.recipe.recipe import Recipe
from stages.recipe.schema import SettingsError

# The split that a stage trains on, samples from or is evaluated on. A judge does without.
SPLITS = {"sft": "finetune", "reward": "reward", **{name: algorithm.split for name, algorithm in ALGORITHMS.items()},
          "evaluate": "evaluation"}
BASE_SPLITS = ("finetune", "reward", "rl")  # for a base from scratch
MERGED, SCORERS = "-merged", ("reward", "judge")  # a merge computes with some texts
LEAST_PROMPT_TOKENS = 7  # "Question: x\n\nAnswer: " with the largest vocabulary
LEAST_ANSWER_TOKENS = 2  # with the end of the text
# Model types with a table of learnt positions: its size in config.json, and the size without one there.
POSITIONS = {"gpt2": ("n_positions", 1024), "opt": ("max_position_embeddings", 2048)}


def check_stage_needs(recipe: Recipe, folders: Iterable[Path]) -> None:
    """Raise SettingsError for the first stage that the recipe leaves without a split or without room for a text.

    Args:
        folders: of the artifacts that the run makes, of variants and seeds, too.
    """
    if recipe.prompts is not None:
        return
    for name in dict.fromkeys(folder.name for folder in folders):
        stage = name.removesuffix(MERGED).partition("-")[0]  # evaluate-dpo, ppo-kl-0.05
        split = ("reward" if stage in SCORERS else "finetune") if name.endswith(MERGED) else SPLITS.get(stage)
        if split and not getattr(recipe.pairs, f"{split}_share"):
            raise SettingsError(f"pairs: {split}_share is 0, and {name} needs the {split} split: give it a share, or "
                                f"stop at a stage before {name}")
        if stage == "base" and recipe.base.model == SCRATCH and not any(
                getattr(recipe.pairs, f"{split}_share") for split in BASE_SPLITS):
            raise SettingsError(f"pairs: the shares of {', '.join(BASE_SPLITS)} are 0: a base from scratch has no text")
        for problem in _find_short_limits(recipe, "reward" if stage == "judge" else stage):
            raise SettingsError(f"{problem} (for {name})")


def _find_short_limits(recipe: Recipe, stage: str) -> Iterator[str]:
    """Yield what is wrong with the token limits of a stage."""
    section, positions = getattr(recipe, stage, None), _learnt_positions(recipe.base.model)
    prompt, response, whole = (getattr(section, name, None) for name in (
        "max_prompt_tokens", "max_response_tokens", "max_length_tokens"))
    least = LEAST_PROMPT_TOKENS + LEAST_ANSWER_TOKENS
    if prompt is not None and prompt < LEAST_PROMPT_TOKENS:
        yield (f"{stage}: max_prompt_tokens is {prompt}, which leaves no room for a question: 'Question: ... Answer: ' "
               f"takes {LEAST_PROMPT_TOKENS} tokens with one word")
    if whole is not None and whole < least:
        yield (f"{stage}: max_length_tokens is {whole}, which leaves no room for a question and an answer: they take "
               f"{least} tokens with one word each")
    if positions is None:
        return
    longest = whole or getattr(section, "sequence_length_tokens", None) or (prompt or 0) + (response or 0)
    if stage == "evaluate":  # it leaves longer prompts out
        longest = LEAST_PROMPT_TOKENS + response
    if longest > positions:
        yield f"{stage}: texts of {longest} tokens, but {recipe.base.model} has {positions} positions: lower its limits"


def _learnt_positions(model: str) -> int | None:
    """Return the number of positions of a model's table; None if it computes them, or is not in a folder here."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        name, default = POSITIONS[config["model_type"]]
        return int(config.get(name, default))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
