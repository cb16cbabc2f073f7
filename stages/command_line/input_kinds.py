"""Parse the named inputs of a stage, and check that each input is an artifact of the right kind."""

import re
from pathlib import Path

from stages.artifacts.artifact import ArtifactError, artifact_folder
from stages.artifacts.finished import MANIFEST
from stages.runtime.files import read_json_object

# Input -> stages that make it. Every other input is a model.
MADE_BY = {"posts": ("posts",), "pairs": ("pairs", "gather"), "shares": ("pairs",),
           "evaluate": ("evaluate", "evaluate_prompts")}  # its name for own prompts in older versions
PROMPTS = ("prompts", "file")  # a plain file or folder
INPUT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
NO_MODELS = ("posts", "pairs", "gather", "evaluate", "evaluate_prompts", "evaluate_reward", "report", "pool_seeds")


def check_input_kinds(sources: dict[str, dict]) -> None:
    """Raise ArtifactError for the first input that is an artifact of another kind. What has no manifest passes.

    Args:
        sources: {label: {path, sha256}} of list_input_sources; of several in one input, labels are NAME[0] or NAME.KEY.
    """
    for label, source in sources.items():
        name, path = label.partition("[")[0].partition(".")[0], source["path"]
        stage = (read_json_object(Path(path) / MANIFEST) or {}).get("stage")
        wanted = MADE_BY.get(name)
        if stage is not None and name in PROMPTS:
            raise ArtifactError(f"--{name}: {path} was made by {stage}: give a file of your own prompts, or the "
                                f"folder that pairs made as --pairs")
        if stage is None or name == "dump":
            continue
        if wanted and stage not in wanted:
            raise ArtifactError(f"--{name}: {path} was made by {stage}: give the folder that {wanted[0]} made")
        if not wanted and stage in NO_MODELS:
            raise ArtifactError(f"--{name}: {path} was made by {stage} and holds no model: give a model's folder")


def parse_named_folders(items: list[str]) -> dict[str, Path]:
    """Parse NAME=FOLDER items, in the order given; ValueError for a bad or a repeated name."""
    folders: dict[str, Path] = {}
    for item in items:
        name, _, folder = item.partition("=")
        if not INPUT_NAME.fullmatch(name) or not folder:
            raise ValueError(f"{item!r} is not NAME=FOLDER (a name has letters, digits, - and _)")
        if name in folders:
            raise ValueError(f"{item!r}: the name {name!r} is already taken by {folders[name]}")
        folders[name] = artifact_folder(folder)
    return folders
