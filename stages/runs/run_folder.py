"""Turn `snakemake --config ...` into a checked recipe and a folder of its own in results/.

The folder is named after the recipe; a dump given on the command line adds its own name and a short hash of its path,
so that two dumps never share a folder. `results/<name>/recipe.yaml` is the resolved recipe that every stage reads.
"""

import difflib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path

import yaml

from stages.recipe.lookups import HUB_ID, check_names, has_scheduler
from stages.recipe.recipe import DEFAULT_RECIPE, SHARED, Recipe, load_recipe
from stages.recipe.recipe_file import read_mapping
from stages.recipe.schema import SettingsError, flatten, suggest, to_dict
from stages.runs.staleness import LOCK, list_finished
from stages.runtime import finished
from stages.runtime.files import write_text

RESULTS = Path("results")
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,149}")
SUFFIX = r"\.(?:7z|xml|xml\.gz|xml\.zst)"  # of a dump's files, as in stages/stackexchange/dump/sources.py
UNUSED_TABLES = r"(?:.+-)?(?:Badges|Comments|PostHistory|PostLinks|Tags|Users)\."
DUMP_FILE = re.compile(rf"(?!{UNUSED_TABLES}).+(?:{SUFFIX}|\.parquet)", re.IGNORECASE)
SNAKEMAKE_SYNTAX = set("{}<>")  # of wildcards and path variables
LABEL_CHARACTERS = 100
CONFIG_KEYS = ("recipe", "shares", *SHARED, *(field.name for field in fields(Recipe)))
SWITCHES = ("-n", "--dry-run", "--dryrun", "-p", "--printshellcmds", "-k", "--keep-going", "-F", "--forceall", "-f",
            "--force", "--nolock", "--rerun-incomplete", "--ri", "--touch", "-t")  # of Snakemake: without a value
TARGET_OPTIONS = ("-R", "--forcerun", "-U", "--until", "-O", "--omit-from")  # of Snakemake: their values are rules
ONE_VALUE_OPTIONS = ("--cores", "-c", "--jobs", "-j", "--config", "-C")  # --config's values have an equals sign
_open_locks = []  # lock files of this process; the kernel releases the locks when it ends, however it ends


def resolve_recipe(config: dict, config_files: Sequence[Path] = ()) -> Recipe:
    """Build one checked recipe from --config: recipe, dump, name, seed, log_to, sections of the recipe.

    Args:
        config: the values of --config alone. Snakemake's own `config` also has those of the files, but not which file.
        config_files: of --configfile, which means the same as recipe=FILE.
    """
    for key, value in config.items():
        if key not in CONFIG_KEYS:
            raise SettingsError(f"--config: unknown key {key!r}{suggest_setting(key, value)}")
    values = dict(config)
    values.pop("shares", None)  # changes how the work is done, not the result
    path, dump, name = _choose_recipe(values, config_files), values.pop("dump", None), values.pop("name", None)
    recipe = load_recipe(path, values)
    for field in fields(recipe):
        check_names(getattr(recipe, field.name), field.name, runs_here=not has_scheduler())
    dumps = tuple(sorted(normalize_source(source) for source in (recipe.dump if dump is None else _as_list(dump))))
    if not dumps:
        raise SettingsError(f"{path} names no dump: give one with --config dump=FOLDER-OR-ARCHIVE")
    if name is None:
        name = recipe.name if dump is None else f"{recipe.name}-{dump_label(dumps)}"
    recipe = replace(recipe, name=check_name(str(name)), dump=dumps)
    _check_same_dump(recipe)
    return recipe


def suggest_setting(key: str, value: object) -> str:
    """Return the end of an error message: how to give a value of a section, or else the most similar key."""
    name = key.replace("-", "_")
    sections = {field.name: {name for name, _, _ in flatten(getattr(Recipe(), field.name))}
                for field in fields(Recipe) if is_dataclass(getattr(Recipe(), field.name))}
    forms = [f"'{section}={{{setting}: {value}}}'" for section, settings in sections.items()
             for setting in sorted(settings) if name in (setting, f"{section}_{setting}")]
    return f": give it as {' or '.join(forms)}" if forms else suggest(key, CONFIG_KEYS)


def check_targets(words: Sequence[str], rules: Sequence[str]) -> None:
    """Raise SettingsError for a word of Snakemake's command line that should name a target and does not: evalute.

    Snakemake would look for a rule that makes a file of that name. Values of options are left alone.

    Args:
        words: the command line.
        rules: the targets.
    """
    option = ""  # the last one before the word
    for previous, word in pairwise(["", *words]):
        option = previous if previous.startswith("-") else option
        is_value = previous == option not in ("", *SWITCHES, *TARGET_OPTIONS)
        if is_value or not re.fullmatch(r"[A-Za-z][\w-]*", word) or word in rules or os.path.exists(word):
            continue
        close = difflib.get_close_matches(word.replace("-", "_"), rules, n=1, cutoff=0.75)
        if close:
            raise SettingsError(f"there is no target {word!r}; did you mean {close[0]!r}?")
        if option in ("", *SWITCHES, *TARGET_OPTIONS, *ONE_VALUE_OPTIONS):  # others may have several values
            raise SettingsError(f"there is no target {word!r}; there are: {', '.join(rules)}")


def parse_shares(config: dict) -> int:
    """Return the number of jobs that the pairs are split over (key: shares)."""
    text = str(config.get("shares", 1))
    if not re.fullmatch(r"[1-9]\d{0,3}", text, re.ASCII):
        raise SettingsError(f"--config: shares must be a whole number from 1 to 9999, not {text!r}")
    return int(text)


def normalize_source(source: str) -> str:
    """Return the one spelling of a dump's path: relative inside the working directory, absolute outside.

    A hub id is returned as it is.
    """
    try:
        path = Path(source).expanduser()
    except RuntimeError:  # ~nobody
        raise SettingsError(f"dump: there is no home folder for {source!r}: give the whole path") from None
    if not os.path.exists(path):  # unlike Path.exists, it accepts names that no file system allows
        if HUB_ID.fullmatch(source) and not DUMP_FILE.fullmatch(source):
            return source
        raise SettingsError(f"dump: there is no {source!r} (a hub id would look like owner/name)")
    if SNAKEMAKE_SYNTAX & set(source):
        raise SettingsError(f"dump: Snakemake reads braces and < > in a path as variables: rename {source!r}")
    full, here = os.path.abspath(path), os.path.abspath("")
    if os.path.commonpath([full, here]) != here:
        return full
    relative = os.path.relpath(full, here)
    return f"./{relative}" if relative.startswith("-") else relative  # -x.xml would be a flag of `posts`


def dump_label(dumps: tuple[str, ...]) -> str:
    """Join the names of the dumps, and add a hash of their paths to tell apart dumps of the same name."""
    names = (Path(os.path.abspath(dump)).name for dump in dumps)
    stems = "+".join(re.sub(rf"({SUFFIX}|\.parquet)$", "", name, flags=re.IGNORECASE) for name in names)
    readable = re.sub(r"[^A-Za-z0-9._+-]", "_", stems)[:LABEL_CHARACTERS]
    return f"{readable}-{hashlib.sha256(json.dumps(dumps).encode()).hexdigest()[:8]}"


def check_name(name: str) -> str:
    """Return the name of a run; SettingsError if it cannot be the name of a folder."""
    if not SAFE_NAME.fullmatch(name):
        raise SettingsError(f"name {name!r} cannot name a folder: it takes letters, digits and . _ + -, "
                            f"a letter or digit first, 150 at most")
    return name


def list_dump_files(dumps: tuple[str, ...]) -> list[str]:
    """List the local files that posts are read from; Snakemake runs `posts` again if one is newer."""
    paths = []
    for dump in map(Path, dumps):
        if dump.is_dir():
            files = {file for file in dump.rglob("*") if DUMP_FILE.fullmatch(file.name)}
        else:
            files = {dump, *_find_votes(dump)}
        paths += sorted(str(file) for file in files if file.is_file() and not SNAKEMAKE_SYNTAX & set(str(file)))
    return list(dict.fromkeys(paths))


def _find_votes(posts: Path) -> list[Path]:
    """Return the votes that are read with a file of posts: Votes.xml for Posts.xml, SITE-Votes.7z for SITE-Posts.7z."""
    if not posts.is_file():
        return []
    site = re.sub(rf"-?\b(posts)?{SUFFIX}$", "", posts.name, flags=re.IGNORECASE)
    prefixes = [f"{site}-"] if site else ["", f"{posts.absolute().parent.name}-"]
    votes = re.compile(rf"(?:{'|'.join(map(re.escape, prefixes))})(?i:votes{SUFFIX})")
    return [file for file in posts.parent.iterdir() if votes.fullmatch(file.name)]


def start_run(recipe: Recipe, forced: Sequence[str] = ()) -> None:
    """Lock the run's folder until this process ends, write the resolved recipe into it, and prepare its artifacts.

    Args:
        forced: outputs of the jobs of --forcerun, --force and --forceall.
    """
    folder = RESULTS / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / LOCK, "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SettingsError(f"another snakemake is at work in {folder}") from None
    _open_locks.append(lock)
    path, text = folder / "recipe.yaml", yaml.safe_dump(to_dict(recipe), sort_keys=False, allow_unicode=True, width=120)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)
    for artifact in list_finished(folder):
        finished.copy_manifest(artifact)
    for manifest in (path for path in map(Path, forced) if path.name == finished.MANIFEST):
        finished.force(manifest.parent)


def format_summary(recipe: Recipe) -> str:
    """Return the report's short table if the report is the newest artifact, otherwise where the results are."""
    folder = RESULTS / recipe.name
    newest = max(folder.glob("*/manifest.json"), key=lambda manifest: manifest.stat().st_mtime_ns, default=None)
    metrics = folder / "report" / "metrics.json"
    if newest is None or newest.parent != metrics.parent or not metrics.exists():
        return f"Results are in {folder}/"
    rows = json.loads(metrics.read_text(encoding="utf-8")).get("table", [])
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    return "\n".join(["", *lines, "", f"Report: {folder / 'report' / 'report.html'}"])


def _choose_recipe(values: dict, config_files: Sequence[Path]) -> object:
    """Take the recipe out of --config's values; a --configfile is one, too."""
    files = [os.path.relpath(file) for file in config_files]
    if "recipe" in values:
        files.append(values.pop("recipe"))
    if len(files) > 1:
        raise SettingsError(f"a run has one recipe, and --configfile FILE means --config recipe=FILE: "
                            f"give one of {', '.join(map(str, files))}")
    return files[0] if files else DEFAULT_RECIPE


def _as_list(dump: str | list) -> list[str]:
    return [str(source) for source in dump] if isinstance(dump, list | tuple) else [str(dump)]


def _check_same_dump(recipe: Recipe) -> None:
    path = RESULTS / recipe.name / "recipe.yaml"
    if not os.path.exists(path):
        return
    try:
        dumps = read_mapping(path).get("dump")
        if not isinstance(dumps, list):
            raise SettingsError(f"{path} names no dump")
    except SettingsError as error:
        raise SettingsError(f"{error}. It only records what {path.parent} was made with: move it away, "
                            f"and it is written again") from None
    if tuple(dumps) != recipe.dump:
        raise SettingsError(f"{path.parent} holds a run on another dump ({', '.join(map(str, dumps))}): "
                            f"give --config name=..., or move that folder away")
