"""Read the command line of a stage from the signature of its `run`, without importing the stage.

    def run(config: Sft, out: Path, *, base: Path, pairs: Path, context: RunContext | None = None) -> dict[str, float]

- `config`: a section of the recipe, found by the name of its class.
- `out`: the folder to fill.
- Keyword-only arguments without a default are inputs: a `Path`, `list[str]` for several sources that may also be hub
  ids, or `dict[str, Path]` for folders by name, given as a repeated `--flag NAME=FOLDER`.
- A keyword-only `Path | None = None` or `dict[str, Path] | None = None` is an input that can be left out; it is then no
  part of the request.
- Other keyword-only arguments with a default are options: an int (`processes`) changes only how the work is done, a str
  (`share`) changes the result and is part of the request.
- `context` is no flag: it says where to write what is not part of the artifact.

Importing a stage takes seconds where it imports torch; parsing its source takes milliseconds.
"""

import ast
from dataclasses import dataclass, fields
from pathlib import Path

from stages.recipe.recipe import Recipe

CONTEXT = "context"
OPTIONAL_INPUT = "Path | None"
OPTIONAL_FOLDERS = "dict[str, Path] | None"
OPTIONAL_TYPES = (OPTIONAL_INPUT, OPTIONAL_FOLDERS)
INPUT_TYPES = ("Path", "list[str]", "dict[str, Path]", *OPTIONAL_TYPES)


@dataclass(frozen=True)
class Signature:
    """The interface of a stage."""

    stage: str
    module: str  # the name to import it by
    description: str  # the module's docstring
    section: str  # of the recipe
    inputs: dict[str, str]  # name: type, one of INPUT_TYPES
    options: dict[str, int | str]  # name: default


def read_signature(path: Path) -> Signature:
    """Parse the source file of a stage."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    arguments = next(node.args for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run")
    config = next(ast.unparse(argument.annotation) for argument in arguments.args if argument.arg == "config")
    keywords = {argument.arg: (ast.unparse(argument.annotation), default)
                for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
                if argument.arg != CONTEXT}
    return Signature(
        stage=path.stem,
        module=_module_name(path),
        description=ast.get_docstring(tree) or "",
        section=next(field.name for field in fields(Recipe) if getattr(field.type, "__name__", "") == config),
        inputs={name: hint for name, (hint, default) in keywords.items() if default is None or hint in OPTIONAL_TYPES},
        options={name: ast.literal_eval(default) for name, (hint, default) in keywords.items()
                 if default is not None and hint not in OPTIONAL_TYPES},
    )


def _module_name(path: Path) -> str:
    package = Path(__file__).resolve().parents[1]
    return f"{package.name}.{path.stem}" if path.resolve().parent == package else path.stem
