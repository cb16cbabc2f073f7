"""Check Snakemake's command line: refuse in one line what it refuses with a traceback or takes for a file.

profiles/default/config.yaml calls check_config_words: Snakemake reads that file before it parses --config.
"""

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise

import yaml

from stages.recipe.recipe import find_repeated_key
from stages.recipe.schema import SettingsError

OPTIONS = ("--config", "-C")
KEY, NAME = re.compile(r"[a-zA-Z_][\w-]*\w"), re.compile(r"[a-zA-Z_][\w-]*")  # of an entry, as Snakemake has it; within
SWITCHES = ("-n", "--dry-run", "--dryrun", "-p", "--printshellcmds", "-k", "--keep-going", "-F", "--forceall", "-f",
            "--force", "--nolock", "--rerun-incomplete", "--ri", "--touch", "-t")  # of Snakemake: without a value
TARGET_OPTIONS = ("-R", "--forcerun", "-U", "--until", "-O", "--omit-from")  # of Snakemake: their values are rules
CORE_OPTIONS = ("--cores", "-c", "--jobs", "-j")
ONE_VALUE_OPTIONS = (*CORE_OPTIONS, *OPTIONS)  # --config's values have an equals sign


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


def check_targets(words: Sequence[str], rules: Sequence[str], seeded: Sequence[str] = ()) -> None:
    """Raise SettingsError for a word of Snakemake's command line that should name a target and does not: evalute.

    Snakemake would look for a rule that makes a file of that name. Values of options are left alone.

    Args:
        words: the command line.
        rules: the targets.
        seeded: rules of each seed, where there are several: Snakemake takes them for options only.
    """
    option = ""  # the last one before the word
    for previous, word in pairwise(["", *words]):
        option = previous if previous.startswith("-") else option
        is_value = previous == option not in ("", *SWITCHES, *TARGET_OPTIONS)
        is_rule = word in rules or (word in seeded and option in TARGET_OPTIONS)
        if re.match(r"[\w.]+=", word) and not is_value and option in ("", *SWITCHES, *CORE_OPTIONS):
            raise SettingsError(f"{word!r} is a setting, not a target: give it after --config")
        if is_value or not re.fullmatch(r"[A-Za-z][\w-]*", word) or is_rule or os.path.exists(word):
            continue
        if word in seeded:
            raise SettingsError(f"{word!r} is made once for each seed, and no target: stop there with --until, as in "
                                f"snakemake ppo --until {word}")
        close = difflib.get_close_matches(word.replace("-", "_"), (*rules, *seeded), n=1, cutoff=0.75)
        if close:
            raise SettingsError(f"there is no target {word!r}; did you mean {close[0]!r}?")
        if option in ("", *SWITCHES, *TARGET_OPTIONS, *ONE_VALUE_OPTIONS):  # others may have several values
            raise SettingsError(f"there is no target {word!r}; there are: {', '.join(rules)}")


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
