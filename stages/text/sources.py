"""What a user gives as a dump, to sources of question records. To add a kind: one generator, one line in KINDS."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from stages.text import dump
from stages.text.archive import unpack_posts
from stages.text.published import hub_questions, local_questions, parquet_files
from stages.text.rows import Reading

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
FILES = (".7z", ".xml", ".parquet")  # a name that ends so is a file that is missing, never a hub id
EXPECTED = ("a folder with a Posts.xml, a Posts.xml, a .7z archive of a site, a folder of several of these, a folder "
            "of parquet files of stack-exchange-paired or -preferences, or the hub id of one of them")


@dataclass(frozen=True)
class Source:
    """One place and the generator that reads it. `site` is None where the rows themselves say it."""

    place: str
    site: str | None
    generator: Callable[["Source", Reading], Iterator[dict]]

    def questions(self, reading: Reading) -> Iterator[dict]:
        """Question records (schema: stages/posts.py); counts and bad rows go to `reading`."""
        return self.generator(self, reading)


def sources_of(given: list[str]) -> list[Source]:
    """Every source named or found in a named folder, by site and place. ValueError for anything that is none.

    The order of the user's list does not matter, and nothing is read yet.
    """
    found = sorted((s for place in given for s in _sources_at(place)), key=lambda s: (s.site or "", s.place))
    for one, other in pairwise(found):
        if one.place == other.place or (one.site and one.site == other.site):
            raise ValueError(f"{one.place} and {other.place} are both {one.site or 'the same'}: give one of them")
    return found


def _sources_at(place: str) -> list[Source]:
    if kind := _kind_of(place):
        return [_source(place, kind)]
    path = Path(place)
    if not path.exists():
        raise ValueError(f"{place}: no such file or folder; expected {EXPECTED}")
    if not path.is_dir():
        raise ValueError(f"{place}: not a dump; expected {EXPECTED}")
    inside = [(str(child), _kind_of(str(child), inside=True)) for child in sorted(path.iterdir())]
    if several := [_source(child, kind) for child, kind in inside if kind]:
        return several
    if parquet_files(place):
        return [Source(place, None, _local)]
    names = ", ".join(child.name for child in sorted(path.iterdir())[:8])
    raise ValueError(f"{place}: nothing to read in this folder (it holds {names or 'nothing'}); expected {EXPECTED}")


def _kind_of(place: str, inside: bool = False) -> "Kind | None":
    return next((kind for kind in KINDS if (kind.has_site or not inside) and kind.matches(place)), None)


def _source(place: str, kind: "Kind") -> Source:
    return Source(place, site_name(Path(place)) if kind.has_site else None, kind.generator)


def site_name(path: Path) -> str:
    """beer.stackexchange.com of `beer.stackexchange.com.7z`, `.../beer.stackexchange.com/` or the Posts.xml in it."""
    path = path.absolute()
    if path.suffix.lower() == ".xml":
        path = path.parent if path.stem.lower() == "posts" else path.with_suffix("")
    name = path.name.removesuffix(".7z").removesuffix("-Posts")  # Stack Overflow has an archive a table
    return name or "unknown"


def _posts_file(folder: Path) -> Path | None:
    if not folder.is_dir():
        return None
    return next((file for file in sorted(folder.iterdir()) if file.name.lower() == "posts.xml"), None)


def _folder(source: Source, reading: Reading) -> Iterator[dict]:
    return dump.questions(_posts_file(Path(source.place)), source.site, reading)


def _file(source: Source, reading: Reading) -> Iterator[dict]:
    return dump.questions(Path(source.place), source.site, reading)


def _archive(source: Source, reading: Reading) -> Iterator[dict]:
    yield from dump.questions(unpack_posts(Path(source.place), reading.scratch), source.site, reading)


def _local(source: Source, reading: Reading) -> Iterator[dict]:
    return local_questions(source.place, reading)


def _hub(source: Source, reading: Reading) -> Iterator[dict]:
    return hub_questions(source.place, reading)


def _ends(suffix: str) -> Callable[[str], bool]:
    return lambda place: place.lower().endswith(suffix) and Path(place).is_file()


def _is_hub_id(place: str) -> bool:
    return HUB_ID.fullmatch(place) is not None and not Path(place).exists() and not place.lower().endswith(FILES)


@dataclass(frozen=True)
class Kind:
    """A kind of source: how a place is recognised, what reads it, and whether its name says the site."""

    matches: Callable[[str], bool]
    generator: Callable[[Source, Reading], Iterator[dict]]
    has_site: bool = True


KINDS = (
    Kind(lambda place: _posts_file(Path(place)) is not None, _folder),
    Kind(_ends(".xml"), _file),
    Kind(_ends(".7z"), _archive),
    Kind(_ends(".parquet"), _local, has_site=False),
    Kind(_is_hub_id, _hub, has_site=False),
)
