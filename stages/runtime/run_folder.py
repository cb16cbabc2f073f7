"""From what a person asked for (`snakemake --config ...`) to a checked recipe and a folder of its own in results/.

The folder is named by the recipe; a dump given on the command line adds its own name and a short hash of where it
lies, so that two dumps never share a folder. `results/<name>/recipe.yaml` is the resolved recipe every stage reads.
"""

import fcntl
import hashlib
import json
import os
import re
from dataclasses import fields, replace
from pathlib import Path

import yaml

from stages.recipe.optional_packages import check_logging
from stages.recipe.recipe import DEFAULT_RECIPE, SHARED, Recipe, load
from stages.recipe.schema import SettingsError, as_dict, nearest
from stages.runtime.artifact import write_text

RESULTS = Path("results")
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,149}")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
SUFFIX = r"\.(?:7z|xml|xml\.gz|xml\.zst)"  # how a file of a dump ends, as in stages/stackexchange/dump/sources.py
UNUSED = r"(?:.+-)?(?:Badges|Comments|PostHistory|PostLinks|Tags|Users)\."
DUMP_FILE = re.compile(rf"(?!{UNUSED}).+(?:{SUFFIX}|\.parquet)", re.IGNORECASE)
LABEL_CHARACTERS = 100
KNOWN = ("recipe", "shares", *SHARED, *(field.name for field in fields(Recipe)))
_held = []  # open lock files: the kernel drops the lock when this process ends, however it ends


def asked_recipe(config: dict) -> Recipe:
    """Snakemake's config (keys: recipe, dump, name, seed, log_to, sections of the recipe) as one checked recipe."""
    for key in config:
        if key not in KNOWN:
            raise SettingsError(f"--config: unknown key {key!r}{nearest(key, KNOWN)}")
    values = dict(config)
    values.pop("shares", None)  # how the work is done, not what
    path, dump, name = values.pop("recipe", DEFAULT_RECIPE), values.pop("dump", None), values.pop("name", None)
    recipe = load(path, values)
    for field in fields(recipe):
        check_logging(getattr(recipe, field.name), field.name)
    dumps = tuple(sorted(place_of(source) for source in (recipe.dump if dump is None else _listed(dump))))
    if not dumps:
        raise SettingsError(f"{path} names no dump: give one with --config dump=FOLDER-OR-ARCHIVE")
    if name is None:
        name = recipe.name if dump is None else f"{recipe.name}-{label(dumps)}"
    recipe = replace(recipe, name=checked_name(str(name)), dump=dumps)
    _refuse_other_dump(recipe)
    return recipe


def asked_shares(config: dict) -> int:
    """Jobs that pairs are scattered over (key: shares): one, unless a cluster is to make them."""
    text = str(config.get("shares", 1))
    if not re.fullmatch(r"[1-9]\d{0,3}", text, re.ASCII):
        raise SettingsError(f"--config: shares must be a whole number from 1 to 9999, not {text!r}")
    return int(text)


def place_of(source: str) -> str:
    """One spelling for one place: relative to the working directory inside it, absolute outside; a hub id as it is."""
    path = Path(source).expanduser()
    if not path.exists():
        if HUB_ID.fullmatch(source) and not DUMP_FILE.fullmatch(source):
            return source
        raise SettingsError(f"dump: there is no {source!r} (a hub id would look like owner/name)")
    if set("{}") & set(source):
        raise SettingsError(f"dump: Snakemake reads braces in a path as wildcards: rename {source!r}")
    full, here = os.path.abspath(path), os.path.abspath("")
    return os.path.relpath(full, here) if os.path.commonpath([full, here]) == here else full


def label(dumps: tuple[str, ...]) -> str:
    """Names of the dumps for people, and a hash of their places against two of the same name."""
    names = (Path(os.path.abspath(dump)).name for dump in dumps)
    bare = "+".join(re.sub(rf"({SUFFIX}|\.parquet)$", "", name, flags=re.IGNORECASE) for name in names)
    readable = re.sub(r"[^A-Za-z0-9._+-]", "_", bare)[:LABEL_CHARACTERS]
    return f"{readable}-{hashlib.sha256(json.dumps(dumps).encode()).hexdigest()[:8]}"


def checked_name(name: str) -> str:
    if not SAFE_NAME.fullmatch(name):
        raise SettingsError(f"name {name!r} cannot name a folder: it takes letters, digits and . _ + -, "
                            f"a letter or digit first, 150 at most")
    return name


def dump_files(dumps: tuple[str, ...]) -> list[str]:
    """The files on this disk that posts are read from (a hub id has none): a newer one makes posts anew."""
    found = []
    for place in map(Path, dumps):
        if place.is_dir():
            files = {file for file in place.rglob("*") if DUMP_FILE.fullmatch(file.name)}
        else:
            files = {place, *_votes_beside(place)}
        found += sorted(str(file) for file in files if file.is_file() and not set("{}") & set(str(file)))
    return list(dict.fromkeys(found))


def _votes_beside(posts: Path) -> list[Path]:
    """Votes.xml of a Posts.xml, SITE-Votes.7z of a SITE-Posts.7z: read with it without being named."""
    if not posts.is_file():
        return []
    site = re.sub(rf"-?\b(posts)?{SUFFIX}$", "", posts.name, flags=re.IGNORECASE)
    named = [f"{site}-"] if site else ["", f"{posts.absolute().parent.name}-"]
    votes = re.compile(rf"(?:{'|'.join(map(re.escape, named))})(?i:votes{SUFFIX})")
    return [file for file in posts.parent.iterdir() if votes.fullmatch(file.name)]


def begin(recipe: Recipe) -> None:
    """Lock the run's folder for as long as this process lives, and put the resolved recipe there."""
    folder = RESULTS / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / ".lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SettingsError(f"another snakemake is at work in {folder}") from None
    _held.append(lock)
    path, text = folder / "recipe.yaml", yaml.safe_dump(as_dict(recipe), sort_keys=False, allow_unicode=True, width=120)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)


def summary(recipe: Recipe) -> str:
    """The report's short table, when the report is the newest thing in the folder; else where the results are."""
    folder = RESULTS / recipe.name
    newest = max(folder.glob("*/manifest.json"), key=lambda manifest: manifest.stat().st_mtime_ns, default=None)
    metrics = folder / "report" / "metrics.json"
    if newest is None or newest.parent != metrics.parent or not metrics.exists():
        return f"Results are in {folder}/"
    rows = json.loads(metrics.read_text(encoding="utf-8")).get("table", [])
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    return "\n".join(["", *lines, "", f"Report: {folder / 'report' / 'report.html'}"])


def _listed(dump: str | list) -> list[str]:
    return [str(source) for source in dump] if isinstance(dump, list | tuple) else [str(dump)]


def _refuse_other_dump(recipe: Recipe) -> None:
    try:
        before = yaml.safe_load((RESULTS / recipe.name / "recipe.yaml").read_text(encoding="utf-8"))
    except (FileNotFoundError, yaml.YAMLError):
        return
    there = (before or {}).get("dump")
    if there is not None and tuple(there) != recipe.dump:
        raise SettingsError(f"{RESULTS / recipe.name} holds a run on another dump ({', '.join(there)}): "
                            f"give --config name=..., or move that folder away")
