"""Test which names are dumps, and unpacking tables from archives."""

import gzip
import io
import os
import random
import shutil
from contextlib import nullcontext
from pathlib import Path

import py7zr
import pyarrow as pa
import pytest
from py7zr.exceptions import UnsupportedCompressionMethodError

from stages.render.units import format_bytes
from stages.runtime.files import check_free_space
from stages.stackexchange.dump import archives, xml_table
from stages.stackexchange.dump.archives import unpack_table
from stages.stackexchange.dump.sources import Source, Table, find_sources
from stages.stackexchange.questions import scan
from tests.helpers import stackexchange_dumps
from tests.helpers.stackexchange_dumps import document, qa_rows, write_dump

POSTS = document(qa_rows())
VOTES = b'<votes>\n  <row Id="1" PostId="2" VoteTypeId="2" />\n</votes>\n'
MANY = document(*(qa_rows(number) for number in range(1, 3000, 3)))


def seven(folder: Path, name: str, members: dict[str, bytes] | None = None, password: str | None = None) -> str:
    """A 7z archive of these members; by its name that of one table, or of a whole site."""
    table = "Votes" if "votes" in name.lower() else "Posts"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    with py7zr.SevenZipFile(folder / name, "w", password=password, header_encryption=False) as out:
        for member, content in (members or {f"{table}.xml": VOTES if table == "Votes" else POSTS}).items():
            out.writef(io.BytesIO(content), member)
    return str(folder / name)


def zst(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


PACK = {"Posts.xml": lambda content: content, "posts.XML.gz": gzip.compress, "Posts.xml.zst": zst}


def read(table: Table, folder: Path) -> bytes:
    folder.mkdir(exist_ok=True)
    return unpack_table(table, folder).read_bytes()


def _tables(source: Source) -> tuple:
    return source.posts, source.votes


def one_line(refused) -> str:
    message = str(refused.value)
    assert "\n" not in message
    return message


def refusal(*dump: str) -> str:
    with pytest.raises(ValueError) as refused:
        find_sources(list(dump))
    return one_line(refused)


def unpack_refusal(path: str, folder: Path, table: str = "Posts") -> str:
    """Why it is not unpacked; nothing may be left."""
    folder.mkdir(exist_ok=True)
    with pytest.raises(ValueError) as refused:
        unpack_table(Table(path, table), folder)
    assert not list(folder.iterdir())
    message = one_line(refused)
    assert path in message
    return message


# Places

def test_real_dumps():
    sources = {source.site: source for source in find_sources([str(stackexchange_dumps.real_dump())])}
    assert list(sources) == sorted(sources) and len(sources) == 8
    assert {site for site, source in sources.items() if not source.votes} == {
        "matheducators.stackexchange.com", "onstartups"}
    assert sources["economics-2012"].votes.path.endswith("economics-2012/votes.xml")
    beer = sources["beer.stackexchange.com"]
    assert beer.posts == Table(beer.name, "Posts") and beer.votes == Table(beer.name, "Votes")


@pytest.mark.parametrize("name", ["beer.stackexchange.com.7z", "quantumcomputing.stackexchange.com.7z",
                                  "coffee.stackexchange.com"])
def test_real_tables_unpack(tmp_path, name):
    [source] = find_sources([str(stackexchange_dumps.real_dump(name))])
    for table in (source.posts, source.votes):
        content = read(table, tmp_path)
        root = table.name.lower().encode()
        assert content.split(b"<row", 1)[0].rstrip().endswith(b"<" + root + b">")
        assert content.rstrip().endswith(b"</" + root + b">")


@pytest.mark.parametrize("name", PACK)
@pytest.mark.parametrize("votes", [None, "Votes.xml", "votes.xml.gz", "Votes.XML.zst", "a.site-Votes.7z"])
def test_a_sites_folder_and_the_posts_in_it(tmp_path, name, votes):
    posts = write_dump(tmp_path, PACK[name](POSTS), f"a.site/{name}")
    for other in ("Users.xml", "notes.txt", "._Posts.xml", "extra.xml", "other.7z"):
        write_dump(tmp_path, b"no dump", f"a.site/{other}")
    votes_path = str(tmp_path / "a.site" / votes) if votes else None
    if votes:
        seven(tmp_path, f"a.site/{votes}") if votes.endswith("7z") else write_dump(tmp_path, VOTES, f"a.site/{votes}")
    tables = Table(posts, "Posts"), votes_path and Table(votes_path, "Votes")
    folder = str(tmp_path / "a.site")
    assert find_sources([folder]) == [Source(folder, "a.site", "dump", *tables)]
    [of_file] = find_sources([posts])
    assert of_file == Source(posts, "a.site", "dump", *tables)
    if votes:
        assert find_sources([votes_path, posts]) == [of_file]
    assert read(of_file.posts, tmp_path / "scratch") == POSTS


@pytest.mark.parametrize("name, site", [
    ("b.site.xml", "b.site"), ("b.site.XML.GZ", "b.site"), ("b.site-posts.xml.zst", "b.site"), ("b.site.7z", "b.site"),
    ("stackoverflow.com-Posts.7z", "stackoverflow.com"), ("b-c.7z", "b-c"), ("Posts.7z", "folder"),
    ("b.site-Posts/Posts.xml", "b.site"), ("b.site.7z/posts.xml", "b.site")])
def test_the_site_is_in_the_name(tmp_path, name, site):
    if name.endswith("7z"):
        dump = seven(tmp_path, f"folder/{name}", {"some/folder/posts.XML": POSTS})
    else:
        dump = write_dump(tmp_path, POSTS, f"folder/{name}")
    [source] = find_sources([dump])
    assert (source.site, source.kind, source.votes) == (site, "dump", None)


@pytest.mark.parametrize("members, votes", [
    (("Posts.xml",), False), (("Posts.xml", "Votes.xml"), True), (("Badges.xml", "d/posts.xml", "d/VOTES.xml"), True)])
def test_an_archive_of_a_site(tmp_path, members, votes):
    dump = seven(tmp_path, "c.site.7z", {name: VOTES if "votes" in name.lower() else POSTS for name in members})
    [source] = find_sources([dump])
    assert source == Source(dump, "c.site", "dump", Table(dump, "Posts"), Table(dump, "Votes") if votes else None)
    assert read(source.posts, tmp_path / "scratch") == POSTS
    if votes:
        assert read(source.votes, tmp_path / "scratch") == VOTES


def test_an_archive_a_table(tmp_path):
    posts, votes = (seven(tmp_path, f"folder/stackoverflow.com-{table}.7z") for table in ("Posts", "Votes"))
    for table in ("Users", "Comments", "PostHistory", "Badges", "Tags", "PostLinks"):
        write_dump(tmp_path, b"never looked at", f"folder/stackoverflow.com-{table}.7z")
    expected = [Source(posts, "stackoverflow.com", "dump", Table(posts, "Posts"), Table(votes, "Votes"))]
    for dump in ([posts], [posts, votes], [votes, posts], [str(tmp_path / "folder")]):
        assert find_sources(dump) == expected
    assert "Posts.xml (or stackoverflow.com-Posts.7z)" in refusal(votes)
    assert "the Users of a dump, which are not used" in refusal(str(tmp_path / "folder/stackoverflow.com-Users.7z"))
    Path(posts).rename(tmp_path / "stackoverflow.com-Posts.7z")
    assert "without its posts" in refusal(str(tmp_path / "folder"))
    moved = find_sources([str(tmp_path / "folder"), str(tmp_path / "stackoverflow.com-Posts.7z")])
    assert [source.votes for source in moved] == [Table(votes, "Votes")]


def test_whose_votes_they_are(tmp_path):
    both = seven(tmp_path, "x.7z", {"Posts.xml": POSTS, "Votes.xml": VOTES})
    posts = [seven(tmp_path, name) for name in ("y.7z", "z-Posts.7z")]
    votes = [seven(tmp_path, name) for name in ("x-Votes.7z", "y-votes.7z", "w-Votes.7z")]
    assert [source.votes for source in find_sources([*posts, both])] == [
        Table(both, "Votes"), Table(votes[1], "Votes"), None]
    assert f"{votes[0]} and {both} are both the votes of x" in refusal(both, votes[0])


def test_an_archive_a_table_unpacked_by_7_zip(tmp_path):
    """7-Zip makes a folder an archive: stackoverflow.com-Posts/Posts.xml."""
    posts, votes = (write_dump(tmp_path, content, f"all/x.com-{table}/{table}.xml")
                    for table, content in (("Posts", POSTS), ("Votes", VOTES)))
    for dump in ([str(tmp_path / "all")], [posts, votes], [str(Path(votes).parent), str(Path(posts).parent)]):
        [source] = find_sources(dump)
        assert (source.site, *_tables(source)) == ("x.com", Table(posts, "Posts"), Table(votes, "Votes"))


def test_a_folder_of_everything_and_several_places_in_any_order(tmp_path):
    dump = [seven(tmp_path, "all/m.7z"), write_dump(tmp_path, POSTS, "all/z/posts.xml"),
             write_dump(tmp_path, POSTS, "all/k.xml"), seven(tmp_path, "all/so/so.com-Posts.7z"),
             write_dump(tmp_path, gzip.compress(POSTS), "all/a.xml.gz")]
    write_dump(tmp_path, VOTES, "all/z/Votes.xml")
    for other in ("README.md", "all/Users.xml", "all/x.zip", "all/configs/gold.xml", "all/._m.7z", "all/table.parquet"):
        write_dump(tmp_path, b"?", other)
    sources = find_sources([str(tmp_path / "all")])
    assert [source.site for source in sources] == ["a", "k", "m", "so.com", "z"]
    assert sources[-1].name == str(tmp_path / "all/z") and sources[-1].votes
    published = [write_dump(tmp_path, b"", "p/x/t.parquet"), str(tmp_path / "p"), "owner/name"]
    separately = find_sources([*dump, *published])
    assert separately == find_sources([*reversed(published), *reversed(dump)])
    assert [(source.site, source.kind) for source in separately[:3]] == [
        (None, "parquet"), (None, "parquet"), (None, "hub")]
    assert [_tables(source) for source in separately[3:]] == [_tables(source) for source in sources]


def test_links_are_followed_and_one_that_leads_nowhere_is_said(tmp_path):
    write_dump(tmp_path, POSTS, "store/123")
    (tmp_path / "all/l.site").mkdir(parents=True)
    (tmp_path / "all/l.site/Posts.xml").symlink_to(tmp_path / "store/123")
    [source] = find_sources([str(tmp_path / "all")])
    assert source.site == "l.site" and read(source.posts, tmp_path) == POSTS
    (tmp_path / "all/gone.7z").symlink_to("nowhere")
    assert "all/gone.7z: a link to nowhere, which is not there" in refusal(str(tmp_path / "all"))


def test_a_site_twice(tmp_path):
    packed, unpacked_ = seven(tmp_path, "all/d.site.7z"), write_dump(tmp_path, POSTS, "all/d.site/Posts.xml")
    for dump in ([str(tmp_path / "all")], [packed, unpacked_], [packed, str(Path(unpacked_).parent)]):
        message = refusal(*dump)
        assert packed in message and unpacked_ in message and "are both d.site: give one of them" in message
    assert "both d.site" in refusal(packed, packed)
    write_dump(tmp_path, gzip.compress(POSTS), "e/Posts.xml.gz")
    write_dump(tmp_path, POSTS, "e/Posts.xml")
    assert "e/Posts.xml and " in refusal(str(tmp_path / "e"))
    write_dump(tmp_path, POSTS, "f/Posts.xml")
    for votes in ("Votes.xml", "Votes.xml.gz"):
        write_dump(tmp_path, VOTES, f"f/{votes}")
    assert "both the votes of f: keep one" in refusal(str(tmp_path / "f"))
    assert "given twice" in refusal("owner/name", "owner/name")


@pytest.mark.parametrize("name, says", [
    ("README.md", "not a dump; expected a folder"), ("x.zip", "not a dump but packed in a way"),
    ("x.tar.gz", "unpack it and give"), ("x.rar", "unpack it and give"), ("Posts.xml.bz2", "unpack it and give"),
    ("x.7z.001", "one volume of several"), ("Users.xml", "the Users of a dump, which are not used; give its Posts.xml"),
    ("x-PostHistory.xml.gz", "the PostHistory of a dump"), ("Votes.xml", "the votes of folder without its posts"),
    ("page.7z", "not a 7z archive: it looks like an HTML page"), ("empty.7z", "it is empty"),
    ("zip.7z", "it looks like a zip archive"), ("rar.7z", "it looks like a rar archive")])
def test_files_that_are_no_source(tmp_path, name, says):
    content = {"page.7z": b"\n<!DOCTYPE html><html>", "empty.7z": b"", "zip.7z": b"PK\3\4..", "rar.7z": b"Rar!\x1a"}
    dump = write_dump(tmp_path, content.get(name, b"hello"), f"folder/{name}")
    assert says in refusal(dump) and dump in refusal(dump)


def test_places_that_are_no_source(tmp_path):
    write_dump(tmp_path, b"hello", "README.md")
    assert "holds README.md); expected a folder" in refusal(str(tmp_path))
    (tmp_path / "empty").mkdir()
    assert "(it holds nothing)" in refusal(str(tmp_path / "empty"))
    for missing in (str(tmp_path / "nowhere"), "some/missing.7z", "some/x.xml", "some/x.xml.gz", "some/x.zst",
                    "some/x.parquet", "some/x.zip", "some/x.7z.001", "a/b/c", "name"):
        assert "no such file or folder" in refusal(missing)
    assert find_sources([]) == []


def test_archives_of_something_else(tmp_path):
    assert "holds no Posts.xml, but Votes.xml; expected the archive of a site" in refusal(
        seven(tmp_path, "beer.7z", {"Votes.xml": VOTES}))
    assert "holds no Votes.xml, but Posts.xml" in refusal(seven(tmp_path, "b-Votes.7z", {"Posts.xml": POSTS}))
    assert r"but a\nb, \x1b[1m; expected" in refusal(seven(tmp_path, "odd.7z", {"a\nb": b"", "\x1b[1m": b"x"}))
    two = seven(tmp_path, "two.7z", {"a/Posts.xml": POSTS, "b/posts.xml": POSTS})
    assert "holds a/Posts.xml, b/posts.xml; expected those of one site" in refusal(two)
    assert "needs a password" in refusal(seven(tmp_path, "locked.7z", {"Posts.xml": POSTS}, password="secret"))
    with py7zr.SevenZipFile(tmp_path / "hidden.7z", "w", password="secret", header_encryption=True) as out:
        out.writef(io.BytesIO(POSTS), "Posts.xml")
    assert "needs a password" in refusal(str(tmp_path / "hidden.7z"))


def test_what_may_not_be_read_is_said(tmp_path, monkeypatch):
    folder = write_dump(tmp_path, POSTS, "g/Posts.xml")

    def refused(self):
        raise PermissionError(13, "Permission denied", str(self))
    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(PermissionError, match=f"Permission denied: '{Path(folder).parent}'"):
        find_sources([str(Path(folder).parent)])
    monkeypatch.undo()
    packed, zipped = seven(tmp_path, "h.7z"), write_dump(tmp_path, gzip.compress(POSTS), "h.xml.gz")
    monkeypatch.setattr(xml_table, "open", lambda path, mode: refused(path), raising=False)
    with pytest.raises(PermissionError, match=r"Permission denied: '.*h\.7z'"):
        find_sources([packed])
    with pytest.raises(PermissionError, match=r"Permission denied: '.*h\.xml\.gz'"):
        unpack_table(Table(zipped, "Posts"), tmp_path)


# Unpacking

@pytest.mark.parametrize("pack, name", [(gzip.compress, "x.xml.gz"), (zst, "x.xml.zst")])
def test_several_members_of_a_stream(tmp_path, pack, name):
    dump = write_dump(tmp_path, pack(MANY[:1000]) + pack(MANY[1000:]), name)
    assert read(Table(dump, "Posts"), tmp_path / "scratch") == MANY
    assert unpack_table(Table(write_dump(tmp_path, MANY, "y.xml"), "Posts"), tmp_path) == tmp_path / "y.xml"


def test_a_stream_that_begins_with_a_frame_to_skip(tmp_path):
    dump = write_dump(tmp_path, b"\x52\x2a\x4d\x18\x03\0\0\0abc" + zst(MANY), "x.xml.zst")
    assert read(Table(dump, "Posts"), tmp_path / "scratch") == MANY


@pytest.mark.parametrize("name", ["x.xml.gz", "x.xml.zst", "x.7z"])
def test_damage_is_found_and_nothing_is_left(tmp_path, name):
    noise = random.Random(3).randbytes(5000)  # does not pack: every byte matters
    if name == "x.7z":
        good = Path(seven(tmp_path, name, {"Posts.xml": MANY + noise})).read_bytes()
    else:
        good = (gzip.compress if name.endswith("gz") else zst)(MANY + noise)
    says = "cut short or damaged" if name != "x.7z" else "damaged"
    for end in (10, len(good) // 2, len(good) - 1):
        assert says in unpack_refusal(write_dump(tmp_path, good[:end], name), tmp_path / "scratch")
    if name != "x.xml.zst":  # zstd need not carry a checksum
        for index in (len(good) // 3, len(good) // 2):
            flipped = good[:index] + bytes([good[index] ^ 0xFF]) + good[index + 1:]
            assert "damaged" in unpack_refusal(write_dump(tmp_path, flipped, name), tmp_path / "scratch")


def test_damage_of_the_codec_of_official_archives(tmp_path):
    """BZip2's decoder tells damage as an OSError, as the system tells a broken disk."""
    good = bytearray(stackexchange_dumps.real_dump("beer.stackexchange.com.7z").read_bytes())
    good[len(good) // 3] ^= 0xFF
    assert "cut short or damaged" in unpack_refusal(write_dump(tmp_path, bytes(good), "x.7z"), tmp_path / "scratch")


def test_a_disk_that_fails_is_not_taken_for_damage(tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(archives.Member, "write", full)
    (tmp_path / "scratch").mkdir()
    with pytest.raises(OSError, match="No space left on device"):
        unpack_table(Table(seven(tmp_path, "x.7z"), "Posts"), tmp_path / "scratch")
    assert not list((tmp_path / "scratch").iterdir())


def test_a_method_that_is_not_known(tmp_path, monkeypatch):
    def unknown(*_, **__):
        raise UnsupportedCompressionMethodError(None, "BCJ2")
    dump = seven(tmp_path, "x.7z")
    monkeypatch.setattr(py7zr.SevenZipFile, "extract", unknown)
    assert "packed in a way that is not known here" in unpack_refusal(dump, tmp_path / "scratch")


@pytest.mark.parametrize("name, content, says", [
    ("x.xml.gz", b"", "not gzip: it is empty"), ("x.xml.gz", POSTS, "it looks like plain XML (name it .xml)"),
    ("x.xml.gz", zst(POSTS), "it looks like zstd"), ("x.xml.zst", b"<html>", "it looks like an HTML page"),
    ("x.xml.zst", b"hello", "it is something else")])
def test_streams_of_another_name(tmp_path, name, content, says):
    assert says in unpack_refusal(write_dump(tmp_path, content, name), tmp_path / "scratch")


def test_what_is_there_is_taken_and_what_a_killed_run_left_is_not(tmp_path, monkeypatch):
    dump = seven(tmp_path, "x.7z", {"Posts.xml": POSTS, "Votes.xml": VOTES})
    scratch = tmp_path / "scratch"
    assert read(Table(dump, "Posts"), scratch) == POSTS and read(Table(dump, "Votes"), scratch) == VOTES
    posts = unpack_table(Table(dump, "Posts"), scratch)
    posts.write_bytes(b"as it is")
    assert read(Table(dump, "Posts"), scratch) == b"as it is"
    posts.rename(posts.with_suffix(".draft"))
    assert read(Table(dump, "Posts"), scratch) == POSTS
    assert [file.suffix for file in scratch.iterdir()] == [".xml", ".xml"]
    os.utime(dump, (1, 1))  # as an archive that was got again
    posts.write_bytes(b"of the archive before")
    assert read(Table(dump, "Posts"), scratch) == POSTS


def test_names_in_an_archive_are_no_paths(tmp_path, monkeypatch):
    monkeypatch.setattr("py7zr.py7zr.check_archive_path", lambda name: True)  # or none could be written
    dump = seven(tmp_path, "x.7z", {"../../Posts.xml": POSTS})
    (tmp_path / "deep/er").mkdir(parents=True)
    try:
        assert read(Table(dump, "Posts"), tmp_path / "deep/er/scratch") == POSTS
    except ValueError as error:
        assert "damaged" in str(error)
    assert not list(tmp_path.rglob("Posts.xml"))


@pytest.mark.parametrize("stated, says", [(1000, "damaged (ArchiveError)"), (10**6, "to the size that the archive")])
def test_an_archive_that_unpacks_to_another_size_than_it_states(tmp_path, monkeypatch, stated, says):
    dump = seven(tmp_path, "x.7z", {"Posts.xml": MANY})
    member = archives.find_table

    def misstated(*args):
        entry = member(*args)
        entry.uncompressed = stated
        return entry
    monkeypatch.setattr(archives, "find_table", misstated)
    assert says in unpack_refusal(dump, tmp_path / "scratch")


@pytest.fixture
def free(monkeypatch):
    """Says how many bytes are free, less what was written since."""
    def say(count: int, folder: Path):
        def usage(_):
            return type("Usage", (), {"free": count - sum(file.stat().st_size for file in folder.iterdir())})
        monkeypatch.setattr(shutil, "disk_usage", usage)
    return say


@pytest.mark.parametrize("name, needed", [("x.7z", 3), ("x.xml.gz", 3), ("x.xml.zst", 3)])
def test_a_full_disk_is_said(tmp_path, free, name, needed):
    content = {".7z": None, ".gz": gzip.compress, ".zst": zst}[Path(name).suffix]
    dump = write_dump(tmp_path, content(MANY), name) if content else seven(tmp_path, name, {"Posts.xml": MANY})
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    free(needed * len(MANY) - 1, scratch)
    message = unpack_refusal(dump, scratch)
    assert f"scratch space under {scratch}" in message and "iB are free" in message
    free(needed * len(MANY), scratch)
    assert read(Table(dump, "Posts"), scratch) == MANY


def test_a_bomb_is_stopped_long_before_the_disk_is_full(tmp_path, free, monkeypatch):
    monkeypatch.setattr(archives, "SPACE_CHECK_BYTES", 2 << 20)
    dump, scratch = write_dump(tmp_path, gzip.compress(bytes(100 << 20)), "x.xml.gz"), tmp_path / "scratch"
    scratch.mkdir()
    free(30 << 20, scratch)
    written, look = [], archives.check_free_space
    monkeypatch.setattr(archives, "check_free_space", lambda name, folder, needed, kind: written.append(needed) or look(
        name, folder, needed, kind))
    assert "so far" in unpack_refusal(dump, scratch)
    assert len(written) == 6 and max(written) == 24 << 20  # at 12 MB written, 18 MB are free and 24 needed


def test_check_space(tmp_path):
    check_free_space("x", tmp_path / "not yet", 10)
    with pytest.raises(ValueError, match=r"Posts.xml: needs 909,494.7 TiB of disk space under .*B are free"):
        check_free_space("Posts.xml", tmp_path, 1e18)


def test_progress_is_shown(tmp_path, monkeypatch):
    finished = []
    monkeypatch.setattr(archives.Progress, "finish", lambda self: finished.append((self.label, self.done, self.total)))
    packed = gzip.compress(MANY)
    for name in ("x.xml.gz", "x.7z"):
        dump = write_dump(tmp_path, packed, name) if name != "x.7z" else seven(tmp_path, name, {"Posts.xml": MANY})
        read(Table(dump, "Posts"), tmp_path / "scratch")
    assert finished == [("posts: unpack x.xml.gz", len(packed), len(packed)),
                        ("posts: unpack Posts.xml of x.7z", len(MANY), len(MANY))]


def test_what_lies_before_a_table_counts(tmp_path, monkeypatch, capsys):
    finished = []
    monkeypatch.setattr(archives.Progress, "finish", lambda self: finished.append((self.done, self.total)))
    with monkeypatch.context() as patch:
        patch.setattr("py7zr.py7zr.check_archive_path", lambda name: True)  # or it could not be written
        dump = seven(tmp_path, "x.7z", {"Badges.xml": MANY, "../b": VOTES, "Posts.xml": POSTS, "Users.xml": MANY})
    assert read(Table(dump, "Posts"), tmp_path / "scratch") == POSTS
    assert finished == [(len(MANY) + len(POSTS),) * 2] and "scratch space" not in capsys.readouterr().err
    assert [file.suffix for file in (tmp_path / "scratch").iterdir()] == [".xml"]
    monkeypatch.setattr(archives, "LZMA_BYTES_PER_SECOND", (len(MANY) + len(VOTES) + len(POSTS)) / 7200)
    read(Table(seven(tmp_path, "y.7z", {"Badges.xml": MANY, "b.xml": VOTES, "Posts.xml": POSTS}), "Posts"),
         tmp_path / "scratch")
    line, = (line for line in capsys.readouterr().err.splitlines() if "y.7z: " in line and "scratch" in line)
    assert f"{format_bytes(len(POSTS))}, behind {format_bytes(len(MANY) + len(VOTES))} of other tables" in line
    assert "; about 2 h 00 min (LZMA2" in line and f"needs {format_bytes(3 * len(POSTS))} of scratch space" in line


def test_all_tables_need_room_before_the_first_is_unpacked(tmp_path, free):
    site = seven(tmp_path, "a.7z", {"Posts.xml": MANY, "Votes.xml": MANY})
    tables, scratch = [Table(site, "Posts"), Table(site, "Votes"), Table(write_dump(tmp_path, POSTS, "b.xml"), "Posts")
                       ], tmp_path / "scratch"
    scratch.mkdir()
    needed = 6 * len(MANY) + 2 * len(POSTS)
    for free_bytes, refused in ((needed - 1, True), (needed, False)):
        free(free_bytes, scratch)
        refusal_of_plan = pytest.raises(ValueError, match=r"a\.7z, .*b\.xml: needs .* of scratch space")
        with refusal_of_plan if refused else nullcontext():
            scan._check_scratch_space(tables, scratch)
    free(len(MANY) + needed, scratch)
    (scratch / "left").write_bytes(MANY)  # by a killed run
    scan._check_scratch_space(tables, scratch)
