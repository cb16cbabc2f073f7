"""Find a recipe file by its path or its name in configs/, and read it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from stages.recipe.schema import SettingsError, suggest

FOLDER = Path("configs")
ENDINGS = (".yaml", ".yml", ".json")


def find_recipe(recipe: Any) -> Path:
    """Return the path of a recipe file; NAME without a folder or an ending is configs/NAME.yaml."""
    if not isinstance(recipe, str | int | float | Path) or isinstance(recipe, bool) or not str(recipe):
        raise SettingsError(f"recipe must be a file or the name of one in {FOLDER}/, not {recipe!r}")
    path = Path(recipe if isinstance(recipe, Path) else str(recipe))
    named = FOLDER / f"{path}.yaml"
    if path.name == str(path) and path.suffix not in ENDINGS and os.path.isfile(named):
        return named
    if not os.path.exists(path):  # unlike Path.exists, it accepts names that no file system allows
        known = sorted(FOLDER.glob("*.yaml"))
        names = [str(file) if path.suffix in ENDINGS else file.stem for file in known]
        raise SettingsError(f"no recipe at {path}; there are: {', '.join(map(str, known))}"
                            f"{suggest(str(path), names, else_all=False)}")
    return path


def read_mapping(path: Path) -> dict:
    """Read a YAML file of names and values; SettingsError, in one line, for everything else. An empty file is {}.

    A name that a mapping has twice is refused: YAML would drop the first, and all that is beneath it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        repeated = find_repeated_key(text)
        values = yaml.safe_load(text)
    except IsADirectoryError:
        raise SettingsError(f"{path} is a folder: a recipe is one YAML file") from None
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path} is not YAML: it is no text (UTF-8)") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2015-02-31
        raise SettingsError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise SettingsError(f"{path} is nested too deeply") from None
    if repeated:
        name, first, second = repeated
        raise SettingsError(f"{path} has {name!r} twice, in lines {first} and {second}: give it once, with all its "
                            f"values")
    if values is not None and not isinstance(values, dict):
        raise SettingsError(f"{path} must map names to values")
    return values or {}


def find_repeated_key(text: str) -> tuple[str, int, int] | None:
    """Find a name that a mapping of a YAML text has twice, at any depth; return it and both line numbers, from 1.

    Raises yaml.YAMLError, and RecursionError of a text that is nested too deeply.
    """
    root = yaml.compose(text, yaml.SafeLoader)
    return next(_repeated_keys(root, set()), None) if root else None


def _repeated_keys(node: yaml.Node, visited: set[int]) -> Iterator[tuple[str, int, int]]:
    if isinstance(node, yaml.ScalarNode) or id(node) in visited:  # visited: an alias
        return
    visited.add(id(node))
    lines: dict[tuple[str, str], int] = {}
    for child in node.value:
        key, value = child if isinstance(node, yaml.MappingNode) else (None, child)
        if isinstance(key, yaml.ScalarNode):
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in lines:
                yield key.value, lines[name], line
            lines[name] = line
        yield from _repeated_keys(value, visited)
