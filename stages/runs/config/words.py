"""Refuse in one line what Snakemake's --config refuses with a traceback, before it has read the Snakefile.

profiles/default/config.yaml calls it: Snakemake reads that file before it parses --config.
"""

import re
from collections.abc import Iterator, Sequence

from stages.recipe.schema import SettingsError

OPTIONS = ("--config", "-C")
KEY, NAME = re.compile(r"[a-zA-Z_][\w-]*\w"), re.compile(r"[a-zA-Z_][\w-]*")  # of an entry, as Snakemake has it; within


def check_config_words(words: Sequence[str]) -> None:
    """Raise SettingsError for an entry of --config that Snakemake cannot parse, with the form that it takes.

    Args:
        words: Snakemake's command line.
    """
    for entry in _list_entries(words):
        key, equals, value = entry.partition("=")
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
