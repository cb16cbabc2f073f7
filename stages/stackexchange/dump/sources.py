"""Find the sources in what a user gives as a dump: only names and paths, nothing is read.

A new kind of source needs a case in `_sources_in`; its reader is chosen by `Source.kind`.
"""

import os
import re
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path

from stages.stackexchange.dump.archives import Table, list_tables

USED_TABLES = ("Posts", "Votes")
TABLES = (*USED_TABLES, "Badges", "Comments", "PostHistory", "PostLinks", "Tags", "Users")
DUMP_FILE = re.compile(rf"(?:(?:(?P<site>.+)-)?(?P<table>{'|'.join(TABLES)})|(?P<whole>.+))"
                       r"(?P<suffix>\.7z|\.xml|\.xml\.gz|\.xml\.zst)", re.IGNORECASE | re.DOTALL)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
NOT_A_DUMP = ((re.compile(r".*\.7z\.\d+", re.IGNORECASE),
               "one volume of several: join them (cat NAME.7z.* > NAME.7z) and give the .7z"),
              (re.compile(r".*\.(zip|rar|tar|tgz|gz|bz2|xz|zst|lz4)", re.IGNORECASE),
               "packed in a way that dumps are not: unpack it and give the folder"))
FILE_SUFFIX = re.compile(r".*\.(7z|xml|parquet)", re.IGNORECASE)  # a missing file, never a hub id
EXPECTED = ("a folder with a Posts.xml, a Posts.xml (.gz, .zst), a .7z archive of a site (or its -Posts.7z with its "
            "-Votes.7z), a folder of several of these, a folder of parquet files of stack-exchange-paired or "
            "-preferences, or the hub id of one of them")


@dataclass(frozen=True)
class Source:
    """One site of a dump, or one published table."""

    name: str  # path or hub id: as the user gave it, or of the file in the folder that the user gave
    site: str | None  # None for published tables, whose rows name their site
    kind: str  # "dump", "parquet" or "hub"
    posts: Table | None = None  # of a dump
    votes: Table | None = None  # of a dump that has its votes

    @property
    def tables(self) -> list[Table]:
        """List the tables of a dump."""
        return [table for table in (self.posts, self.votes) if table]


def find_sources(dump: list[str]) -> list[Source]:
    """Find every source in these files, folders and hub ids, sorted by site and name.

    Only folders and the headers of archives are read. Raises ValueError for what is not a source or is there twice.
    """
    sources = [source for name in dump for source in _sources_in(name)]
    sources.sort(key=lambda source: (source.site or "", source.name))
    published = [source for source in sources if source.kind != "dump"]
    for first, second in pairwise(published):
        if first.name == second.name:
            raise ValueError(f"{first.name} is given twice: give it once")
    dumps = (source for source in sources if source.kind == "dump")
    return published + [_merge(site, list(group)) for site, group in groupby(dumps, key=attrgetter("site"))]


def select_sources(sources: list[Source], sites: tuple[str, ...], needs_votes: bool) -> list[Source]:
    """Select the dumps of these sites (empty: all), and all published tables, which hold many sites.

    Votes that are not needed are left out. Raises ValueError if there are none, or if one lacks the votes it needs.
    """
    selected = [source for source in sources if not sites or source.site is None or source.site in sites]
    if not selected:
        raise ValueError(f"none of the sites {', '.join(sites)} is here, but "
                         f"{', '.join(source.site for source in sources)}")
    for source in selected:
        if needs_votes and source.votes is None:
            raise ValueError(f"{source.name}: votes=up needs the site's Votes.xml, which is not here")
    return selected if needs_votes else [replace(source, votes=None) for source in selected]


def _merge(site: str, sources: list[Source]) -> Source:
    """Merge the sources of a site, whose posts and votes may be in different files."""
    posts = [source for source in sources if source.posts]
    votes = list({os.path.realpath(source.votes.path): source.votes for source in sources if source.votes}.values())
    for first, second in pairwise([source.posts for source in posts]):
        raise ValueError(f"{first.path} and {second.path} are both {site}: give one of them")
    for first, second in pairwise(votes):
        raise ValueError(f"{first.path} and {second.path} are both the votes of {site}: keep one of them")
    if not posts:
        raise ValueError(f"{votes[0].path}: the votes of {site} without its posts: give its Posts.xml (or "
                         f"{site}-Posts.7z) too")
    return replace(posts[0], votes=votes[0] if votes else None)


def _sources_in(name: str) -> list[Source]:
    """Find the sources in one file, folder or hub id; those of dumps may lack their posts or votes."""
    path = Path(name)
    if file := _parse_file(path):
        return _read_file(file, name)
    if path.is_dir() and (files := _dump_files(path)):
        return [_source(file, str(file.path.parent if file.has_plain_name else file.path)) for file in files]
    is_parquet = path.is_file() and name.lower().endswith(".parquet")
    if is_parquet or (path.is_dir() and any(file.is_file() for file in path.rglob("*.parquet"))):
        return [Source(name, None, "parquet")]
    if _is_hub_id(name):
        return [Source(name, None, "hub")]
    raise _not_a_source(name)


def _not_a_source(name: str) -> ValueError:
    path = Path(name)
    if path.is_dir():
        content = ", ".join(child.name for child in sorted(path.iterdir())[:8]) or "nothing"
        return ValueError(f"{name}: nothing to read in this folder (it holds {content}); expected {EXPECTED}")
    if not path.exists():
        return ValueError(f"{name}: no such file or folder; expected {EXPECTED}")
    hint = next((f" but {hint}" for pattern, hint in NOT_A_DUMP if pattern.fullmatch(path.name)), "")
    return ValueError(f"{name}: not a dump{hint}; expected {EXPECTED}")


@dataclass(frozen=True)
class _File:
    """What the name of a dump's file says."""

    path: Path
    site: str
    table: str | None  # None: SITE.7z or SITE.xml, which name no table
    is_archive: bool  # a .7z

    @property
    def has_plain_name(self) -> bool:
        """Check whether the file is called Posts.xml or the like, without its site."""
        return self.table is not None and not re.fullmatch(r".+-\w+\..*", self.path.name)


def _parse_file(path: Path) -> _File | None:
    """Parse a file's name; None if it is not that of a dump. Raises ValueError for a broken link."""
    match = DUMP_FILE.fullmatch(path.name)
    if not match or path.name.startswith("."):  # as the ._Posts.xml that macOS writes
        return None
    if not path.is_file():
        if path.is_symlink() and not path.exists():
            raise ValueError(f"{path}: a link to {os.readlink(path)}, which is not there")
        return None
    table = next((table for table in TABLES if table.lower() == (match["table"] or "").lower()), None)
    site = match["site"] or match["whole"] or site_name(path.parent)
    return _File(path, site, table, match["suffix"].lower() == ".7z")


def site_name(folder: Path) -> str:
    """Return the folder's name without the suffix of SITE-Posts/, to which 7-Zip unpacks a table's archive."""
    return re.sub(r"(-(Posts|Votes))?(\.7z)?$", "", folder.absolute().name, flags=re.IGNORECASE) or "unknown"


def _read_file(file: _File, name: str) -> list[Source]:
    """Return the file's source, and that of the votes beside it."""
    if file.table not in (None, *USED_TABLES):
        raise ValueError(f"{name}: the {file.table} of a dump, which are not used; give its Posts.xml (or -Posts.7z), "
                         f"and its Votes where it has them")
    source = _source(file, name)
    if source.votes:
        return [source]
    votes = [other for other in _files_in(file.path.parent) if (other.site, other.table) == (file.site, "Votes")]
    return [source, *(_source(other, str(other.path)) for other in votes)]


def _source(file: _File, name: str) -> Source:
    """Build the source of one file: posts, votes, or (a site's .7z) both."""
    names = [file.table or "Posts"]
    if file.is_archive:
        names = list_tables(file.path, names if file.table else USED_TABLES)
    tables = {table.lower(): Table(str(file.path), table) for table in names}
    return Source(name, file.site, "dump", **tables)


def _files_in(folder: Path) -> list[_File]:
    files = (_parse_file(child) for child in sorted(folder.iterdir()))
    return [file for file in files if file and file.table in (None, *USED_TABLES)]


def _dump_files(folder: Path) -> list[_File]:
    """List the folder's own site; if it has none, all dumps in it and in the folders of sites below."""
    files = _files_in(folder)
    if any(file.has_plain_name and file.table == "Posts" for file in files):
        return [file for file in files if file.site == site_name(folder)]
    below = (_site_files(child) for child in sorted(folder.iterdir()) if child.is_dir())
    return files + [file for site in below for file in site]


def _site_files(folder: Path) -> list[_File]:
    files = [file for file in _files_in(folder) if file.table]
    has_own_site = any(file.has_plain_name for file in files)
    return [file for file in files if not has_own_site or file.site == site_name(folder)]


def _is_hub_id(name: str) -> bool:
    is_file = FILE_SUFFIX.fullmatch(name) or any(pattern.fullmatch(name) for pattern, _ in NOT_A_DUMP)
    return not is_file and HUB_ID.fullmatch(name) is not None and not Path(name).exists()
