"""Parse a command line; answer a mistake in one line, with the nearest option. Name the types of settings.

Build the command line of a stage from the signature of its `run`, without importing the stage: importing one takes
seconds where it imports torch, parsing its source takes milliseconds.
"""

import argparse
import ast
import dataclasses
import re
import sys
import typing
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn

from stages.recipe import schema
from stages.recipe.recipe import DEFAULT_RECIPE, Recipe, load_recipe
from stages.runtime import processes

KINDS = {int: "integer", float: "number", str: "text", bool: "true or false"}

ALIKE = 0.75  # of 1: with their hyphens, short options are nearly all alike
CONTEXT = "context"
OPTIONAL = " | None"  # end of the type of an input that can be left out
SETTING = "set "  # prefix of the settings among the parsed arguments


class OptionParser(argparse.ArgumentParser):
    """A parser that takes --learning_rate for --learning-rate; a mistake is one line, with the nearest option.

    From then on a stdout of ASCII or the like escapes what its encoding lacks, as stderr does.
    """

    def __init__(self, program: str, description: str | None):
        super().__init__(prog=f"python -m stages.{program}", description=description, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def parse_known_args(self, args=None, namespace=None):
        if not sys.stdout.encoding.lower().startswith("utf"):
            sys.stdout.reconfigure(errors="backslashreplace")
        words = [_hyphenate(word) for word in (sys.argv[1:] if args is None else args)]
        for option in (word.partition("=")[0] for word in words if re.match("--[^=]", word)):
            if option not in self._option_string_actions:  # said before a required option is missed
                known = [option for option in self._option_string_actions if option.startswith("--")]
                self.error(f"there is no option {option}{schema.suggest(option, known, else_all=False, alike=ALIKE)}")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.rpartition('.')[2]}: error: {message} (--help lists the options)\n")


def _hyphenate(word: str) -> str:
    option, equals, value = word.partition("=")
    return f"{option.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


def type_name(hint: Any, short: bool = False) -> str:
    """Name a type in words: 'integer or null', 'list of text', the values of a Literal.

    Args:
        short: as argparse does: INTEGER|null, TEXT,... for a list, {lora,full}.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        names = ("null" if part is type(None) else type_name(part, short) for part in arguments)
        return ("|" if short else " or ").join(names)
    if origin is Literal:
        return f"{{{','.join(map(str, arguments))}}}" if short else ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple and dataclasses.is_dataclass(arguments[0]):
        return "YAML" if short else "list of mappings"
    if origin is tuple:
        return f"{type_name(arguments[0], short)},..." if short else f"list of {type_name(arguments[0])}"
    return KINDS[hint].upper() if short else KINDS[hint]


@dataclass(frozen=True)
class Signature:
    """The interface of a stage, as its `run` declares it.

        def run(config: Sft, out: Path, *, base: Path, pairs: Path, context: RunContext | None = None
                ) -> dict[str, float]

    - `config`: a section of the recipe, found by the name of its class.
    - `out`: the folder to fill.
    - Keyword-only arguments without a default are inputs: a `Path`, `list[str]` for several sources that may also be
      hub ids, or `dict[str, Path]` for folders by name, given as a repeated `--flag NAME=FOLDER`.
    - A keyword-only `Path | None = None` or `dict[str, Path] | None = None` is an input that can be left out; it is
      then no part of the request.
    - Other keyword-only arguments with a default are options: an int (`processes`) changes only how the work is done,
      a str (`share`) changes the result and is part of the request.
    - `context` is no flag: it says where to write what is not part of the artifact.
    """

    stage: str
    module: str  # the name to import it by
    description: str  # the module's docstring
    section: str  # of the recipe
    inputs: dict[str, str]  # name: type
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
        inputs={name: hint for name, (hint, default) in keywords.items() if default is None or hint.endswith(OPTIONAL)},
        options={name: ast.literal_eval(default) for name, (hint, default) in keywords.items()
                 if default is not None and not hint.endswith(OPTIONAL)},
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
        parser.add_argument(f"--{name}", required=not hint.endswith(OPTIONAL), **_input_form(hint))
    for name, default in signature.options.items():
        parser.add_argument(f"--{name}", default=default, type=type(default), help=f"option (default: {default})")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="the artifact to make")
    if signature.stage in processes.IN_SEVERAL_PROCESSES:
        parser.add_argument("--processes", default=None, type=int, help="processes of this machine that share the "
                            "work; changes how long it takes, not the result (default: on a CPU one for each core, "
                            "if a step can be shared by so many and 2 GiB are free for each; else 1)")
    parser.add_argument("--force", action="store_true", help="replace a finished artifact at --out")
    parser.add_argument("--verify", action="store_true",
                        help="hash every file of the inputs; without it, those that changed since they were verified")
    group = parser.add_argument_group(f"settings, overriding section {signature.section!r} of the recipe")
    section = getattr(Recipe(), signature.section)
    published, own = ({name: value for name, value, _ in schema.flatten(x)} for x in (section, here or section))
    for name, field, _ in schema.list_fields(section):
        switch = {"action": argparse.BooleanOptionalAction}
        form = switch if field.type is bool else {"metavar": type_name(field.type, short=True)}
        group.add_argument(f"--{name.replace('_', '-')}", dest=f"{SETTING}{name}", default=None, **form,
                           help=_describe_setting(field, published[name], own[name]).replace("%", "%%"))
    return parser


def _input_form(hint: str) -> dict:
    """Return what argparse needs for an input of this type."""
    left_out = ", or left out" * hint.endswith(OPTIONAL)
    if hint.startswith("dict"):
        return {"metavar": "NAME=FOLDER", "action": "append",
                "help": f"input artifact and its name; can be repeated{left_out}"}
    if hint.startswith("list"):
        return {"metavar": "FOLDER", "nargs": "+", "help": "sources"}
    return {"metavar": "FOLDER", "nargs": "?" if left_out else None, "help": f"input artifact{left_out}"}


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
