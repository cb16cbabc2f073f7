"""Look up, before any work, what settings name: functions, folders, reward sources, packages, a GPU.

A name that leads nowhere would otherwise stop the run at the stage that reads it, after all the training before that.
Nothing here loads a model or torch.
"""

import ctypes
import re
from importlib.util import find_spec
from pathlib import Path

from stages.recipe.schema import SettingsError
from stages.recipe.user_functions import check_function

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
SCRATCH = "scratch"
GGUF = ".gguf"  # the format of llama.cpp, a file
LOGGING = ("tensorboard", "wandb")  # values of log_to; each is also the name of its package
# The sources of ppo.rewards that are no function, folder or hub id (stages/rewards/reward_functions.py computes them).
REWARD_NAMES = ("model", "lexical", "repetition", "has_code", "response_tokens", "response_characters")
REWARD_FILES = ("scoring.json", "config.json")  # of a reward artifact; of a classifier


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
