"""Refuse in one line what Snakemake's --config refuses with a traceback, before it has read the Snakefile.

profiles/default/config.yaml calls it: Snakemake reads that file before it parses --config.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

import yaml

from stages.recipe.recipe_file import find_repeated_key
from stages.recipe.schema import SettingsError

OPTIONS = ("--config", "-C")
KEY, NAME = re.compile(r"[a-zA-Z_][\w-]*\w"), re.compile(r"[a-zA-Z_][\w-]*")  # of an entry, as Snakemake has it; within


def check_config_words(words: Sequence[str]) -> None:
    """Raise SettingsError for an entry of --config that Snakemake cannot parse, with the form that it takes.

    Args:
        words: Snakemake's command line.
    """
    entries = list(_list_entries(words))
    for number, entry in enumerate(entries):
        key, equals, value = entry.partition("=")
        if value.startswith("{") and value.count("{") > value.count("}"):
            whole = entry
            for rest in entries[number + 1:]:  # what the shell has split at blanks
                whole += f" {rest}"
                if whole.count("{") <= whole.count("}"):
                    raise SettingsError(f"--config: {entry!r} is not closed: put it in quotes, as '{whole}'")
        if not equals:
            raise SettingsError(f"--config: {entry!r} has no value: give it as {entry}=VALUE, without blanks around =; "
                                f"or, if it is a target, before --config")
        section, *names = key.split(".")
        if names and all(map(NAME.fullmatch, (section, *names))):
            nested = f"{names[-1]}: {value}"
            for name in reversed(names[:-1]):
                nested = f"{name}: {{{nested}}}"
            raise SettingsError(f"--config: {key}: give it as '{section}={{{nested}}}'")
        if not KEY.fullmatch(key):
            raise SettingsError(f"--config: {key!r} is no name: give NAME=VALUE")
        with suppress(yaml.YAMLError, RecursionError):  # Snakemake then takes it as text
            if repeated := find_repeated_key(value):
                raise SettingsError(f"--config: {entry!r} has {repeated[0]!r} twice: give it once, with all its values")


def _list_entries(words: Sequence[str]) -> Iterator[str]:
    """Yield the values of --config, which takes all words up to the next option."""
    within = False
    for word in words:
        if word.startswith("-") and word != "-":
            option, equals, value = word.partition("=")
            within = option in OPTIONS
            if within and equals:
                yield value
        elif within:
            yield word
