"""What a user gives as a dump, to a list of sources: names and places only. To add a kind: one function, one line in
KINDS; what reads it goes by `Source.kind`.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path

from stages.stackexchange.dump.archives import Table, tables_in

NEEDED = ("Posts", "Votes")
TABLES = (*NEEDED, "Badges", "Comments", "PostHistory", "PostLinks", "Tags", "Users")
DUMP_FILE = re.compile(rf"(?:(?:(?P<site>.+)-)?(?P<table>{'|'.join(TABLES)})|(?P<whole>.+))"
                       r"(?P<suffix>\.7z|\.xml|\.xml\.gz|\.xml\.zst)", re.IGNORECASE | re.DOTALL)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
FOREIGN = ((re.compile(r".*\.7z\.\d+", re.IGNORECASE),
            "one volume of several: join them (cat NAME.7z.* > NAME.7z) and give the .7z"),
           (re.compile(r".*\.(zip|rar|tar|tgz|gz|bz2|xz|zst|lz4)", re.IGNORECASE),
            "packed in a way that dumps are not: unpack it and give the folder"))
FILE_SUFFIX = re.compile(r".*\.(7z|xml|parquet)", re.IGNORECASE)  # a file that is missing, never a hub id
EXPECTED = ("a folder with a Posts.xml, a Posts.xml (.gz, .zst), a .7z archive of a site (or its -Posts.7z with its "
            "-Votes.7z), a folder of several of these, a folder of parquet files of stack-exchange-paired or "
            "-preferences, or the hub id of one of them")


@dataclass(frozen=True)
class Source:
    """One site of a dump, or one published table."""

    place: str  # for messages: what the user named, or what was found in the folder that the user named
    site: str | None  # None where the rows themselves say it (published sets)
    kind: str  # "dump", "parquet" or "hub"
    posts: Table | None = None  # of a dump
    votes: Table | None = None  # of a dump that has its votes


def sources_of(given: list[str]) -> list[Source]:
    """Every source named or found in a named folder, by site and place, whatever the order of the user's list.

    Only folders and the headers of archives are read. ValueError for anything that is no source or is there twice.
    """
    parts = [part for place in given for part in _parts_at(place)]
    parts.sort(key=lambda part: (part.site or "", part.place))
    found = [part for part in parts if part.kind != "dump"]
    for one, other in pairwise(found):
        if one.place == other.place:
            raise ValueError(f"{one.place} is given twice: give it once")
    dumps = (part for part in parts if part.kind == "dump")
    return found + [_joined(site, list(of_site)) for site, of_site in groupby(dumps, key=lambda part: part.site)]


def _joined(site: str, parts: list[Source]) -> Source:
    """The one source of a site, whose posts and votes may lie in different files."""
    posts = [part for part in parts if part.posts]
    votes = list({os.path.realpath(part.votes.path): part.votes for part in parts if part.votes}.values())
    for one, other in pairwise([part.posts for part in posts]):
        raise ValueError(f"{one.path} and {other.path} are both {site}: give one of them")
    for one, other in pairwise(votes):
        raise ValueError(f"{one.path} and {other.path} are both the votes of {site}: keep one of them")
    if not posts:
        raise ValueError(f"{votes[0].path}: the votes of {site} without its posts: give its Posts.xml (or "
                         f"{site}-Posts.7z) too")
    return replace(posts[0], votes=votes[0] if votes else None)


def _parts_at(place: str) -> list[Source]:
    """Sources, of which those of dumps may still lack their posts or votes."""
    try:
        for _, matches, parts_of in KINDS:
            if matches(place):
                return parts_of(place)
        return _refuse(place)
    except OSError as error:
        raise ValueError(f"{error.filename or place}: cannot be read: {error.strerror or error}") from None


def _refuse(place: str) -> list[Source]:
    path = Path(place)
    if path.is_dir():
        names = ", ".join(child.name for child in sorted(path.iterdir())[:8]) or "nothing"
        raise ValueError(f"{place}: nothing to read in this folder (it holds {names}); expected {EXPECTED}")
    if not path.exists():
        raise ValueError(f"{place}: no such file or folder; expected {EXPECTED}")
    what = next((f" but {what}" for pattern, what in FOREIGN if pattern.fullmatch(path.name)), "")
    raise ValueError(f"{place}: not a dump{what}; expected {EXPECTED}")


@dataclass(frozen=True)
class _File:
    """A file of a dump, as its name says."""

    path: Path
    site: str
    table: str | None  # None: SITE.7z or SITE.xml, which says none
    packed: bool  # a .7z

    @property
    def bare(self) -> bool:
        """Called Posts.xml or the like, without its site."""
        return self.table is not None and not re.fullmatch(r".+-\w+\..*", self.path.name)


def _file(path: Path) -> _File | None:
    """None for a file that is none of a dump's, by its name. ValueError for a link that leads nowhere."""
    said = DUMP_FILE.fullmatch(path.name)
    if not said or path.name.startswith("."):  # as the ._Posts.xml that a Mac leaves
        return None
    if not path.is_file():
        if path.is_symlink() and not path.exists():
            raise ValueError(f"{path}: a link to {os.readlink(path)}, which is not there")
        return None
    table = next((table for table in TABLES if table.lower() == (said["table"] or "").lower()), None)
    return _File(path, said["site"] or said["whole"] or site_of(path.parent), table, said["suffix"].lower() == ".7z")


def site_of(folder: Path) -> str:
    """beer.stackexchange.com of `.../beer.stackexchange.com/`; 7-Zip unpacks a table's archive to SITE-Posts/."""
    return re.sub(r"(-(Posts|Votes))?(\.7z)?$", "", folder.absolute().name, flags=re.IGNORECASE) or "unknown"


def _is_dump_file(place: str) -> bool:
    return _file(Path(place)) is not None


def _of_file(place: str) -> list[Source]:
    """A file that the user names, and the votes that lie beside it."""
    file = _file(Path(place))
    if file.table not in (None, *NEEDED):
        raise ValueError(f"{place}: the {file.table} of a dump, which are not used; give its Posts.xml (or -Posts.7z), "
                         f"and its Votes where it has them")
    part = _part(file, place)
    if part.votes:
        return [part]
    beside = [other for other in _files_in(file.path.parent) if (other.site, other.table) == (file.site, "Votes")]
    return [part, *(_part(other, str(other.path)) for other in beside)]


def _part(file: _File, place: str) -> Source:
    """What one file gives to its site: posts, votes, or (a site's .7z) both."""
    held = [file.table or "Posts"]
    if file.packed:
        held = tables_in(file.path, held if file.table else NEEDED)
    tables = {name.lower(): Table(str(file.path), name) for name in held}
    return Source(place, file.site, "dump", **tables)


def _files_in(folder: Path) -> list[_File]:
    files = (_file(child) for child in sorted(folder.iterdir()))
    return [file for file in files if file and file.table in (None, *NEEDED)]


def _dumps_in(folder: Path) -> list[_File]:
    """A site's own files in its folder; else whatever is one, there and in the folders of sites below."""
    files = _files_in(folder)
    if any(file.bare and file.table == "Posts" for file in files):
        return [file for file in files if file.site == site_of(folder)]
    below = (_dumps_of_site(child) for child in sorted(folder.iterdir()) if child.is_dir())
    return files + [file for site in below for file in site]


def _dumps_of_site(folder: Path) -> list[_File]:
    files = [file for file in _files_in(folder) if file.table]
    own = any(file.bare for file in files)
    return [file for file in files if not own or file.site == site_of(folder)]


def _has_dumps(place: str) -> bool:
    return Path(place).is_dir() and bool(_dumps_in(Path(place)))


def _of_folder(place: str) -> list[Source]:
    return [_part(file, str(file.path.parent) if file.bare else str(file.path)) for file in _dumps_in(Path(place))]


def _is_parquet(place: str) -> bool:
    return place.lower().endswith(".parquet") and Path(place).is_file()


def _has_parquet(place: str) -> bool:
    return Path(place).is_dir() and any(file.is_file() for file in Path(place).rglob("*.parquet"))


def _is_hub_id(place: str) -> bool:
    file = FILE_SUFFIX.fullmatch(place) or any(pattern.fullmatch(place) for pattern, _ in FOREIGN)
    return not file and HUB_ID.fullmatch(place) is not None and not Path(place).exists()


def _published(kind: str) -> Callable[[str], list[Source]]:
    return lambda place: [Source(place, None, kind)]


# Name, how a place is known to be one, and what is there.
KINDS = (
    ("a file of a dump", _is_dump_file, _of_file),
    ("a folder of dumps", _has_dumps, _of_folder),
    ("a parquet file", _is_parquet, _published("parquet")),
    ("a folder of parquet files", _has_parquet, _published("parquet")),
    ("a data set on the hub", _is_hub_id, _published("hub")),
)
