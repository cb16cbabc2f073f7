"""Spell the paths of a dump or of own prompts in one way, name a run after them, and list the files that are read."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from stages.recipe.checks import HUB_ID, SCRATCH
from stages.recipe.recipe import Recipe
from stages.recipe.schema import SettingsError

SUFFIX = r"\.(?:7z|xml|xml\.gz|xml\.zst)"  # of a dump's files, as in stages/stackexchange/dump/sources.py
UNUSED_TABLES = r"(?:.+-)?(?:Badges|Comments|PostHistory|PostLinks|Tags|Users)\."
DUMP_FILE = re.compile(rf"(?!{UNUSED_TABLES}).+(?:{SUFFIX}|\.parquet)", re.IGNORECASE)
SNAKEMAKE_SYNTAX = set("{}<>")  # of wildcards and path variables
LABEL_CHARACTERS = 100


def normalize_sources(dump: str | Sequence[str]) -> tuple[str, ...]:
    """Return the one spelling of each path of a dump, sorted."""
    return tuple(sorted(map(normalize_source, list_sources(dump))))


def list_sources(dump: str | Sequence[str]) -> list[str]:
    """List what `dump` names: one path, or a list of them."""
    return [str(source) for source in (dump if isinstance(dump, list | tuple) else [dump])]


def normalize_source(source: str, key: str = "dump") -> str:
    """Return the one spelling of a path: relative inside the working directory, absolute outside.

    A hub id is returned as it is.

    Args:
        key: of --config, for error messages.
    """
    try:
        path = Path(source).expanduser()
    except RuntimeError:  # ~nobody
        raise SettingsError(f"{key}: there is no home folder for {source!r}: give the whole path") from None
    if not os.path.exists(path):  # unlike Path.exists, it accepts names that no file system allows
        if HUB_ID.fullmatch(source) and not DUMP_FILE.fullmatch(source):
            return source
        raise SettingsError(f"{key}: there is no {source!r} (a hub id would look like owner/name)")
    if SNAKEMAKE_SYNTAX & set(source):
        raise SettingsError(f"{key}: Snakemake reads braces and < > in a path as variables: rename {source!r}")
    full, here = os.path.abspath(path), os.path.abspath("")
    if os.path.commonpath([full, here]) != here:
        return full
    relative = os.path.relpath(full, here)
    return f"./{relative}" if relative.startswith("-") else relative  # -x.xml would be a flag of `posts`


def resolve_prompts(recipe: Recipe, dump: object) -> Recipe:
    """Return a recipe with prompts with their path in its one spelling, and without a dump.

    Args:
        dump: of --config.
    """
    if dump is not None:
        raise SettingsError(f"--config: a run has a dump or prompts, not both: give dump=... or prompts=..., and a "
                            f"recipe without the other (prompts: {recipe.prompts})")
    if not os.path.exists(os.path.expanduser(recipe.prompts)):
        raise SettingsError(f"prompts: there is no {recipe.prompts!r}")
    if recipe.base.model == SCRATCH:
        raise SettingsError("prompts: a run on them starts from a pretrained model: add base=FOLDER-OR-HUB-ID "
                            "('scratch' would be trained on a dump)")
    return replace(recipe, prompts=normalize_source(recipe.prompts, "prompts"), dump=())


def check_are_dumps(sources: Iterable[str]) -> None:
    """Raise SettingsError for a file, or a folder of files, whose names are not those of a dump."""
    for path in filter(os.path.exists, map(Path, sources)):  # hub ids are not there
        files = path.rglob("*") if path.is_dir() else [path]
        if not any(DUMP_FILE.fullmatch(file.name) for file in files):
            raise SettingsError(f"dump: {str(path)!r} is no dump: give a Posts.xml (.gz, .zst), a site's .7z, a "
                                f".parquet file, or a folder with any of them")


def dump_label(dumps: tuple[str, ...]) -> str:
    """Join the names of the dumps, and add a hash of their paths to tell apart dumps of the same name."""
    names = (Path(os.path.abspath(dump)).name for dump in dumps)
    stems = "+".join(re.sub(rf"({SUFFIX}|\.parquet)$", "", name, flags=re.IGNORECASE) for name in names)
    readable = re.sub(r"[^A-Za-z0-9._+-]", "_", stems)[:LABEL_CHARACTERS]
    return f"{readable}-{hashlib.sha256(json.dumps(dumps).encode()).hexdigest()[:8]}"


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
