"""Check, before any work, that what settings name is there, and that no later stage of a run is left without data.

Settings name functions, folders, reward sources, packages, a GPU. A name that leads nowhere, or a stage without data,
would otherwise stop the run at the stage that needs it, after all the training before that.
Nothing here loads a model or torch.
"""

import ctypes
import json
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from stages.recipe.algorithms import ALGORITHMS
from stages.recipe.recipe import Recipe
from stages.recipe.schema import SettingsError
from stages.recipe.user_functions import check_function

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
SCRATCH = "scratch"
GGUF = ".gguf"  # the format of llama.cpp, a file
LOGGING = ("tensorboard", "wandb")  # values of log_to; each is also the name of its package
# The sources of ppo.rewards that are no function, folder or hub id (stages/rewards/reward_functions.py computes them).
REWARD_NAMES = ("model", "lexical", "repetition", "has_code", "response_tokens", "response_characters")
REWARD_FILES = ("scoring.json", "config.json")  # of a reward artifact; of a classifier
# The split that a stage trains on, samples from or is evaluated on. A judge does without.
SPLITS = {"sft": "finetune", "reward": "reward", **{name: algorithm.split for name, algorithm in ALGORITHMS.items()},
          "evaluate": "evaluation"}
BASE_SPLITS = ("finetune", "reward", "rl")  # for a base from scratch
MERGED, SCORERS = "-merged", ("reward", "judge")  # a merge computes with some texts
LEAST_PROMPT_TOKENS = 7  # "Question: x\n\nAnswer: " with the largest vocabulary
LEAST_ANSWER_TOKENS = 2  # with the end of the text
# Model types with a table of learnt positions: its size in config.json, and the size without one there.
POSITIONS = {"gpt2": ("n_positions", 1024), "opt": ("max_position_embeddings", 2048)}


def check_names(section: object, where: str, *, runs_here: bool) -> None:
    """Raise SettingsError for the first setting of a section that names what does not exist.

    Args:
        where: name of the section.
        runs_here: whether this machine does the work, so that it needs the GPU.
    """
    try:
        _check_packages(getattr(section, "log_to", ()))
        if getattr(section, "gold", None):
            check_function(section.gold, "gold")
        for source in getattr(section, "scorers", ()):
            _check_reward_source(source, "scorers")
        for entry in getattr(section, "rewards", ()):
            _check_reward_source(entry.source, "rewards")
        for name in ("model", "tokenizer"):
            _check_folder_or_hub_id(getattr(section, name, None), name)
        if runs_here and getattr(section, "optimizer", "").startswith("paged") and not _has_gpu():
            raise ValueError(f"optimizer {section.optimizer} needs a CUDA GPU to page from, and there is none here: "
                             f"set it to adamw_8bit")
    except ValueError as error:
        raise SettingsError(f"{where}: {error}") from None


def _check_packages(log_to: tuple[str, ...]) -> None:
    missing = [name for name in LOGGING if name in log_to and find_spec(name) is None]
    if missing:
        raise ValueError(f"log_to asks for {missing[0]}, which is not installed: make extras (or "
                         f"pip install {' '.join(missing)})")


def _check_reward_source(source: str, setting: str) -> None:
    if source in REWARD_NAMES or (HUB_ID.fullmatch(source) and not Path(source).is_dir()):
        return
    if ":" in source:
        check_function(source, setting)
    elif not Path(source).is_dir():
        raise ValueError(f"{setting}: {source!r} is no folder, and none of {', '.join(REWARD_NAMES)}, nor does it look "
                         f"like package.module:function or like a hub id, owner/name")
    elif not any((Path(source) / name).is_file() for name in REWARD_FILES):
        raise ValueError(f"{setting}: the folder {source} has neither {' nor '.join(REWARD_FILES)}: it holds no model "
                         f"that scores answers")


def _check_folder_or_hub_id(name: str | None, setting: str) -> None:
    if name is not None and name.lower().endswith(GGUF):
        if not Path(name).is_file():
            raise ValueError(f"{setting}: there is no file {name!r}")
        return
    if name in (None, SCRATCH) or Path(name).is_dir() or HUB_ID.fullmatch(f"owner/{name}") or HUB_ID.fullmatch(name):
        return
    raise ValueError(f"{setting}: there is no folder {name!r} (a hub id would look like owner/name)")


def _has_gpu() -> bool:
    """Ask the driver, without torch: NVIDIA's counts the devices that this process may use, AMD's has one file."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value:
            return True
    except (OSError, AttributeError):
        pass
    return Path("/dev/kfd").exists()


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
