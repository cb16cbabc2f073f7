"""Build an artifact: a folder with a manifest.json that appears by one rename, complete, or not at all.

A stage writes into `<out>.partial/`. Its request (stage, settings, digests of its inputs) is stored there first; a
partial folder left by a crash is resumed if its request is unchanged, and set aside otherwise.

Snakemake deletes the manifest of a stage before the stage runs, and after a failure. So an artifact holds a copy of it.
A finished artifact that one of other settings or inputs replaces moves to `.old/NAME-DIGEST` beside it, and comes back
when its request does: nothing is trained twice. The last `MAX_OLD` of each name stay there.
"""

import fcntl
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stages.runtime.files import (
    DIGEST_CHARACTERS,
    PARTIAL,
    hash_file,
    hash_files,
    hash_input,
    list_files,
    read_json_object,
    sync_to_disk,
    write_json,
    write_text,
)
from stages.runtime.stage_lines import print_line

MANIFEST = "manifest.json"
MANIFEST_COPY = ".manifest.json"
REQUEST = "request.json"
CODE = "code"  # in the file of a request: the digest of the code at work, which is no part of the request
RESULT = "result.json"  # of a stage that has ended and is not published yet
TRACEBACK = "traceback.txt"
LOCK = ".lock"
FORCED = ".forced"  # marks a finished artifact that is to be made anew although its request is the same
OLD = ".old"  # folder of the artifacts that were replaced
MAX_OLD = 3  # artifacts in .old/ of one name


class ArtifactError(ValueError):
    """An artifact is missing, in the way, or being built by another process; the message says what to do."""


@dataclass(frozen=True)
class RunContext:
    """Where a stage writes what is not part of its artifact, such as times and this machine's name.

    request_digest: abbreviated; the same for a resumed run, another one for other settings or inputs.
    """

    folder: Path  # the run's logs/
    name: str  # the artifact's
    request_digest: str


def digest(source: str | Path) -> str:
    """Compute the SHA-256 that identifies an input.

    For an artifact, that of its manifest, which names its inputs in turn; otherwise that of a file, or of all files in
    a folder. Raises ArtifactError as `check_input` does.
    """
    check_input(source)
    path = Path(source)
    if (path / MANIFEST).is_file():
        return hash_file(path / MANIFEST)
    if path.is_file():
        return hash_input(path)
    lines = [f"{file.relative_to(path)} {sha256}" for file, sha256 in hash_files(list_files(path), hash_input)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def check_input(source: str | Path) -> None:
    """Raise ArtifactError if a path does not exist or is an unfinished artifact."""
    path = Path(source)
    if not (path.is_file() or path.is_dir()):
        raise ArtifactError(f"there is no {path}: make it first")
    if (path / REQUEST).exists() and not (path / MANIFEST).is_file():
        raise ArtifactError(f"{path} is not finished (it has no {MANIFEST}): run its stage again")


def digest_request(request: dict) -> str:
    """Compute the abbreviated SHA-256 of a request."""
    text = json.dumps(request, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]


def artifact_folder(path: str | Path) -> Path:
    """Return the folder of an artifact that is given by its folder or its manifest (Snakemake knows only files)."""
    path = Path(path)
    return path.parent if path.name == MANIFEST else path


def read_manifest(artifact: Path) -> dict:
    """Read the manifest of a finished artifact; ArtifactError if there is none."""
    try:
        return json.loads((Path(artifact) / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{artifact} is not a finished artifact (it has no {MANIFEST})") from None


def read_request(folder: Path) -> dict | None:
    """Read an artifact's request, without the digest of the code; None if there is none that can be read."""
    request = read_json_object(folder / REQUEST)
    return request and {name: value for name, value in request.items() if name != CODE}


def has_manifest(folder: Path) -> bool:
    """Check whether the manifest is there and can be read."""
    return "stage" in (read_json_object(folder / MANIFEST) or {})


def recover_manifest(folder: Path) -> bool:
    """Write a lost or damaged manifest again from its copy, if all files are there; return whether there is one now."""
    if not has_manifest(folder) and is_whole(folder) and not (folder / FORCED).exists():
        write_text(folder / MANIFEST, (folder / MANIFEST_COPY).read_text(encoding="utf-8"))
    return has_manifest(folder)


def is_whole(folder: Path) -> bool:
    """Check that the copy of the manifest and all files that it lists are there, with their sizes."""
    files = (read_json_object(folder / MANIFEST_COPY) or {}).get("files")
    return isinstance(files, dict) and not find_damaged_files(folder, files)


def find_damaged_files(folder: Path, files: dict) -> list[str]:
    """List files of a manifest that are missing or of another size (their SHA-256 is not computed)."""
    problems = []
    for name, entry in files.items():
        path, size_bytes = folder / name, entry.get("bytes") if isinstance(entry, dict) else None
        if not path.is_file():
            problems.append(f"{name} is gone")
        elif path.stat().st_size != size_bytes:
            problems.append(f"{name} has {path.stat().st_size} bytes, {MANIFEST} says {size_bytes}")
    return problems


def is_complete(out: Path, request: dict) -> bool:
    """Check whether `out` is the finished artifact of this request; a lost manifest is written again from its copy.

    Raises ArtifactError if `out` is finished but of another request, or is not an artifact at all.
    """
    if read_request(out) == request and recover_manifest(out):
        return True
    if not has_manifest(out):
        check_replaceable(out)
        return False
    raise ArtifactError(f"{out} holds a finished {read_manifest(out)['stage']} of other settings or inputs: "
                        f"give another --out, or --force to replace it")


def check_replaceable(out: Path) -> None:
    """Raise ArtifactError if `out` holds files that no stage made.

    Snakemake deletes the manifest before it runs a stage again, so a request marks the folder as ours. It also creates
    the folders of a rule's outputs, so folders without files are fine.
    """
    if not out.exists() or (out / REQUEST).exists():
        return
    if not out.is_dir() or any(not path.is_dir() for path in out.rglob("*")):
        raise ArtifactError(f"{out} is in the way and is not an artifact of this project: give another --out")


def force(out: Path) -> None:
    """Mark a finished artifact to be made anew; the mark goes with the artifact when another one replaces it."""
    if out.is_dir():
        (out / FORCED).touch()


@contextmanager
def build(out: Path, request: dict, code_digest: str | None = None) -> Iterator[Path]:
    """Lock `out` and yield `<out>.partial`, with the files that an interrupted run of the same request left there.

    The block calls `publish` at its end; if it fails, the folder stays for the next attempt. If that is made with other
    code, a line says so: what was made before is not made again.
    """
    partial = out.with_name(out.name + PARTIAL)
    out.parent.mkdir(parents=True, exist_ok=True)
    with _lock(out):
        if partial.exists() and read_request(partial) != request:
            _set_aside(partial, out)
        partial.mkdir(exist_ok=True)
        before = (read_json_object(partial / REQUEST) or {}).get(CODE)
        if before not in (None, code_digest):
            print_line(f"{partial}: the code has changed since the last attempt (it was {before}, it is "
                       f"{code_digest}): the result may be of neither; delete this folder to begin anew")
        write_json(partial / REQUEST, request | ({CODE: code_digest} if code_digest else {}))
        for stray in (partial / TRACEBACK, partial / MANIFEST_COPY, *partial.rglob("*.tmp")):
            if stray.is_file():  # drafts of a killed process, among others
                stray.unlink()
        yield partial


def _set_aside(partial: Path, out: Path) -> None:
    """Rename the unfinished artifact of another request; delete one without any work in it, as a mistake leaves it."""
    if {file.name for file in list_files(partial)} <= {REQUEST, TRACEBACK}:
        shutil.rmtree(partial)
    else:
        partial.rename(_free_name(out, "set-aside"))


def save_result(partial: Path, result: dict) -> None:
    """Store what a stage returned, once its files are on the disk: a kill while they are hashed must not cost them."""
    for file in list_files(partial):
        sync_to_disk(file)
    write_json(partial / RESULT, result)


def load_result(partial: Path) -> dict | None:
    """Load what a stage returned before it was killed; None: it had not ended."""
    return read_json_object(partial / RESULT)


def publish(partial: Path, out: Path, manifest: dict) -> Path | None:
    """Add the size and SHA-256 of every file to the manifest, write it last, and rename the folder to `out`.

    A finished artifact of another request that was there moves to .old/; its new path is returned.
    """
    files = [file for file in list_files(partial) if file.name not in (MANIFEST, REQUEST, RESULT)]
    listed = {str(file.relative_to(partial)): {"bytes": file.stat().st_size, "sha256": sha256}
              for file, sha256 in hash_files(files)}
    for name in (MANIFEST_COPY, MANIFEST):
        write_json(partial / name, manifest | {"files": listed})
    old = _replace(out, partial)
    (out / RESULT).unlink(missing_ok=True)
    return old


def restore(out: Path, request: dict) -> bool:
    """Take the finished artifact of this request back from .old/; return False if there is none."""
    old = _old_folder(out, request)
    if not old.exists():
        return False
    with _lock(out):
        if read_request(old) != request or not is_whole(old) or (out / FORCED).exists():
            return False
        _replace(out, old)
        return recover_manifest(out)


def list_old(out: Path, last: Path | None = None) -> list[Path]:
    """List the artifacts of this name in .old/, those first that a kill has cut short, then as they were replaced.

    Args:
        last: the one that was replaced last, whatever the clock says.
    """
    paths = (out.parent / OLD).glob(f"{glob.escape(out.name)}-{'[0-9a-f]' * DIGEST_CHARACTERS}")
    return sorted(paths, key=lambda path: (path == last, is_whole(path), path.stat().st_mtime_ns))


def _replace(out: Path, new: Path) -> Path | None:
    """Rename the artifact `new` to `out`.

    A finished artifact of another request that is there moves to .old/, and its new path is returned. An unfinished
    one, and one of the same request, is deleted.
    """
    request = read_request(out)
    stays = request is not None and request != read_request(new) and is_whole(out)
    old = _old_folder(out, request) if stays else _free_name(out, "replaced")
    if stays:
        (out / FORCED).unlink(missing_ok=True)
        recover_manifest(out)
        shutil.rmtree(old, ignore_errors=True)  # an earlier one of the same request
        old.parent.mkdir(exist_ok=True)
    if out.exists():
        out.rename(old)
        os.utime(old)  # list_old goes by when an artifact was replaced
    new.rename(out)
    if stays:
        return old
    shutil.rmtree(old, ignore_errors=True)
    return None


def _old_folder(out: Path, request: dict) -> Path:
    """Return the folder in .old/ of an artifact of this request."""
    return out.parent / OLD / f"{out.name}-{digest_request(request)}"


def _free_name(out: Path, suffix: str) -> Path:
    """Return the first of NAME.SUFFIX-1, NAME.SUFFIX-2, ... that does not exist."""
    number = 1
    while (name := out.with_name(f"{out.name}.{suffix}-{number}")).exists():
        number += 1
    return name


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel releases it when the process ends, however it ends."""
    path = out.with_name(f".{out.name}{LOCK}")
    with open(path, "w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArtifactError(f"another process is making {out} at this moment") from None
        yield
