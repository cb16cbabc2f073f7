"""Read Snakemake's command line: refuse in one line what it refuses with a traceback or takes for a file.

profiles/default/config.yaml calls check_config_words and plans_only: Snakemake reads that file before it parses
--config. `snakemake plan` runs without a dump, without cores and without a run's folder.
"""

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise

import yaml

from stages.recipe import algorithms
from stages.recipe.recipe import Recipe, find_repeated_key
from stages.recipe.schema import SettingsError

PLAN = "plan"
PLAN_KEYS = ("algorithm", "device", "device_memory_gib", "device_tflops", "devices", "model_flops_share",
             "pairs_artifact")
PLAN_FLAGS = {"pairs_artifact": "--pairs"}  # `pairs` is a section of the recipe
PROMPT_ALGORITHMS = {name: algorithm for name, algorithm in algorithms.ALGORITHMS.items()
                     if algorithm.is_policy_gradient}  # of runs on own prompts
NEED_PAIRS = ("model", "lexical")  # sources of rewards
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


def check_prompt_targets(recipe: Recipe, words: Sequence[str], rules: Sequence[str], others: Sequence[str]) -> None:
    """Raise SettingsError for a target that needs pairs, or an algorithm whose settings do, in a run on own prompts.

    Args:
        words: Snakemake's command line.
        rules: the targets of this run.
        others: targets that runs on a dump have.
    """
    refused = next((word for word in words if word in others and word not in rules), None)
    if refused:
        raise SettingsError(f"{refused!r} needs pairs of answers, which a run on your own prompts "
                            f"({recipe.prompts}) has not; its targets are {', '.join(rules)}")
    stages = {algorithm.rule_name(stage): name for name, algorithm in PROMPT_ALGORITHMS.items()
              for stage in (algorithms.EVALUATE, algorithms.REPORT)}
    named = [name for name in rules if name in words] or [algorithms.FIRST]
    for name in {stages.get(word, word.removesuffix("_merged")) for word in named} & set(PROMPT_ALGORITHMS):
        section = getattr(recipe, name)
        source = next((entry.source for entry in section.rewards if entry.source in NEED_PAIRS), None)
        if source:
            raise SettingsError(f"{name}.rewards names {source!r}, which learns from pairs, and a run on your own "
                                f"prompts has none: set it, as '{name}={{rewards: \"[{{source: "
                                f"package.module:function}}]\"}}'")
        if getattr(section, "value_model", "head") != "head":
            raise SettingsError(f"{name}.value_model {section.value_model!r} starts from a reward model, and a run on "
                                f"your own prompts has none: set it to 'head'")


def plans_only(words: Sequence[str]) -> bool:
    """Tell whether Snakemake's command line asks for the plan and for no other target."""
    return PLAN in words and not {word.removesuffix("_train") for word in words} & set(algorithms.list_targets())


def take_options(config: dict) -> list[str]:
    """Take the options of stages/plan.py out of the values of --config, and return them as its command line."""
    named = [(key, config.pop(key)) for key in PLAN_KEYS if key in config]
    return [f"{PLAN_FLAGS.get(key, '--' + key.replace('_', '-'))}={value}" for key, value in named]


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
