"""An artifact is a folder with a manifest.json. It appears by one rename, complete, or not at all.

A stage writes into `<out>.partial/`. What it is to make (stage, settings, digests of its inputs) is its *order*; a
partial folder left by a crash is resumed when its order is unchanged, and set aside otherwise.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "manifest.json"
REQUEST = "order.json"
LOCK = ".lock"
TRACEBACK = "traceback.txt"
PARTIAL = ".partial"
HASHED_AT_ONCE = 4  # files
DIGEST_CHARACTERS = 12  # of a sha256, where its beginning stands for it


class ArtifactError(ValueError):
    """An artifact is missing, in the way, or being made by someone else; the message says what to do."""


@dataclass(frozen=True)
class RunContext:
    """Where a stage puts what is no part of its artifact (times, this machine's name): `folder` is the run's logs/,
    `name` the artifact's, `order` a short digest that a resumed run shares and one of other settings does not."""

    folder: Path
    name: str
    order: str


def run_context(out: Path, order: dict) -> RunContext:
    """That of the artifact `out`, made by `order`."""
    text = json.dumps(order, sort_keys=True, default=str)
    return RunContext(out.parent / "logs", out.name, hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS])


def sha256_of_file(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest(source: str | Path) -> str:
    """One hash that names an input: an artifact's manifest (and so its whole ancestry), a file, or a folder's files.

    Raises ArtifactError when nothing is there, or when an artifact was begun and not finished.
    """
    path = Path(source)
    if (path / MANIFEST).is_file():
        return sha256_of_file(path / MANIFEST)
    if path.is_file():
        return sha256_of_file(path)
    if not path.is_dir():
        raise ArtifactError(f"there is no {path}: make it first")
    if (path / REQUEST).exists():
        raise ArtifactError(f"{path} is not finished (it has no {MANIFEST}): run its stage again")
    lines = [f"{file.relative_to(path)} {found}" for file, found in _digests(_files(path))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def folder_of(path: str | Path) -> Path:
    """An artifact may be named by its folder or by its manifest (Snakemake knows files)."""
    path = Path(path)
    return path.parent if path.name == MANIFEST else path


def read_manifest(artifact: Path) -> dict:
    """The manifest of a finished artifact; ArtifactError if there is none."""
    try:
        return json.loads((Path(artifact) / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{artifact} is not a finished artifact (it has no {MANIFEST})") from None


def write_text(path: Path, text: str) -> None:
    """Write whole or not at all: a reader never sees half a file."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def write_json(path: Path, value: object) -> None:
    """`write_text` of a value as indented JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def is_complete(out: Path, order: dict) -> bool:
    """Whether `out` already holds just this. Raises ArtifactError when it holds something else that is finished."""
    if not (out / MANIFEST).exists():
        _refuse_foreign(out)
        return False
    if json.loads((out / REQUEST).read_text(encoding="utf-8")) == order:
        return True
    raise ArtifactError(f"{out} holds a finished {read_manifest(out)['stage']} of other settings or inputs: "
                        f"give another --out, or --force to replace it")


@contextmanager
def build(out: Path, order: dict) -> Iterator[Path]:
    """`<out>.partial`, locked, holding what an interrupted run of the same order left there.

    On leaving, `publish` must have been called, or the folder stays for the next try.
    """
    partial = out.with_name(out.name + PARTIAL)
    out.parent.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        if partial.exists() and _order_in(partial) != order:
            partial.rename(_free_name(out, "set-aside"))
        partial.mkdir(exist_ok=True)
        (partial / TRACEBACK).unlink(missing_ok=True)
        write_json(partial / REQUEST, order)
        yield partial


def publish(partial: Path, out: Path, manifest: dict) -> None:
    """Add the digests of the files, write the manifest last, and rename into place."""
    files = [f for f in _files(partial) if f.name not in (MANIFEST, REQUEST)]
    listed = {str(f.relative_to(partial)): {"bytes": f.stat().st_size, "sha256": found} for f, found in _digests(files)}
    write_json(partial / MANIFEST, manifest | {"files": listed})
    old = None
    if out.exists():
        old = _free_name(out, "replaced")
        out.rename(old)
    partial.rename(out)
    if old:
        shutil.rmtree(old)


def _files(folder: Path) -> list[Path]:
    return sorted(f for f in folder.rglob("*") if f.is_file())


def _digests(files: list[Path]) -> list[tuple[Path, str]]:
    """Side by side: a hash of many gigabytes is bound by one core."""
    with ThreadPoolExecutor(HASHED_AT_ONCE) as threads:
        return list(zip(files, threads.map(sha256_of_file, files), strict=True))


def _order_in(partial: Path) -> dict | None:
    try:
        return json.loads((partial / REQUEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _refuse_foreign(out: Path) -> None:
    """Snakemake deletes a manifest before it makes the artifact anew; the order beside it says the folder is ours.

    Empty folders, however deep, are Snakemake's as well: it makes those of the outputs that a rule names.
    """
    if out.exists() and not (out.is_dir() and ((out / REQUEST).exists() or all(f.is_dir() for f in out.rglob("*")))):
        raise ArtifactError(f"{out} is in the way and is not an artifact of this project: give another --out")


def _free_name(out: Path, word: str) -> Path:
    number = 1
    while (name := out.with_name(f"{out.name}.{word}-{number}")).exists():
        number += 1
    return name


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """The kernel drops the lock when the process dies, however it dies: nothing to unlock by hand."""
    path = out.with_name(f".{out.name}{LOCK}")
    with open(path, "w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArtifactError(f"another process is making {out} at this moment") from None
        yield
