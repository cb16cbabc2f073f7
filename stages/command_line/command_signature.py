"""Build the command line of a stage from the signature of its `run`, without importing the stage.

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

import argparse
import ast
import dataclasses
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from stages.command_line.option_parser import OptionParser, placeholder
from stages.recipe import schema
from stages.recipe.recipe import DEFAULT_RECIPE, Recipe, load_recipe
from stages.runtime import processes

CONTEXT = "context"
OPTIONAL_INPUT = "Path | None"
OPTIONAL_FOLDERS = "dict[str, Path] | None"
OPTIONAL_TYPES = (OPTIONAL_INPUT, OPTIONAL_FOLDERS)
INPUT_FLAGS = {
    "Path": {"metavar": "FOLDER", "help": "input artifact"},
    "list[str]": {"metavar": "FOLDER", "nargs": "+", "help": "sources"},
    "dict[str, Path]": {"metavar": "NAME=FOLDER", "action": "append",
                        "help": "input artifact and its name; can be repeated"},
    OPTIONAL_FOLDERS: {"metavar": "NAME=FOLDER", "action": "append",
                       "help": "input artifact and its name; can be repeated, or left out"},
    OPTIONAL_INPUT: {"metavar": "FOLDER", "nargs": "?", "help": "input artifact; may be left out, or its folder"},
}
SETTING = "set "  # prefix of the settings among the parsed arguments


@dataclass(frozen=True)
class Signature:
    """The interface of a stage."""

    stage: str
    module: str  # the name to import it by
    description: str  # the module's docstring
    section: str  # of the recipe
    inputs: dict[str, str]  # name: type, a key of INPUT_FLAGS
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


def build_parser(signature: Signature, here: object | None = None) -> argparse.ArgumentParser:
    """Build the parser: --recipe, one flag per input and option, --out, and one per setting of the stage's section.

    Args:
        here: settings of the stage in the recipe that is given, for --help.
    """
    parser = OptionParser(signature.stage, signature.description)
    parser.add_argument("--recipe", default=DEFAULT_RECIPE, help=f"recipe file (default: {DEFAULT_RECIPE})")
    for name, hint in signature.inputs.items():
        parser.add_argument(f"--{name}", required=hint not in OPTIONAL_TYPES, **INPUT_FLAGS[hint])
    for name, default in signature.options.items():
        parser.add_argument(f"--{name}", default=default, type=type(default), help=f"option (default: {default})")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="the artifact to make")
    if signature.stage in processes.IN_SEVERAL_PROCESSES:
        parser.add_argument("--processes", default=None, type=int, help="processes of this machine that share the "
                            "work; changes how long it takes, not the result (default: on a CPU one for each core, "
                            "if a step has so many microbatches and 2 GiB are free for each; else 1)")
    parser.add_argument("--force", action="store_true", help="replace a finished artifact at --out")
    parser.add_argument("--verify", action="store_true",
                        help="hash every file of the inputs; without it, those that changed since they were verified")
    group = parser.add_argument_group(f"settings, overriding section {signature.section!r} of the recipe")
    section = getattr(Recipe(), signature.section)
    published, own = ({name: value for name, value, _ in schema.flatten(x)} for x in (section, here or section))
    for name, field, _ in schema.list_fields(section):
        switch = {"action": argparse.BooleanOptionalAction}
        form = switch if field.type is bool else {"metavar": placeholder(field.type)}
        group.add_argument(f"--{name.replace('_', '-')}", dest=f"{SETTING}{name}", default=None, **form,
                           help=_describe_setting(field, published[name], own[name]).replace("%", "%%"))
    return parser


def settings_for_help(signature: Signature, words: list[str]) -> object | None:
    """Return the stage's settings in the recipe that the command line names, if it asks for help."""
    if not {"-h", "--help"} & set(words):
        return None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--recipe", default=DEFAULT_RECIPE)
    with suppress(schema.SettingsError, argparse.ArgumentError):  # then help shows the published values alone
        return getattr(load_recipe(parser.parse_known_args(words)[0].recipe), signature.section)


def _describe_setting(field: dataclasses.Field, published: object, own: object) -> str:
    """Describe a setting for --help: its meaning, its range, its published value and the recipe's own."""
    within = f"{field.metadata['within']}; " if field.metadata["within"] else ""
    here = "" if own == published else f", in this recipe: {own}"
    return f"{field.metadata['doc']} ({within}published: {published}{here})"
