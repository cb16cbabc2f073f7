"""Recognise finished artifacts, whatever became of their manifests, and keep those that another one replaces.

Snakemake deletes the manifest of a stage before the stage runs, and after a failure. So an artifact holds a copy of it.
A finished artifact that one of other settings or inputs replaces moves to `.old/NAME-DIGEST` beside it, and comes back
when its request does: nothing is trained twice. The last `MAX_OLD` of each name stay there.
"""

import glob
import hashlib
import json
import os
import shutil
from pathlib import Path

from stages.runtime.files import DIGEST_CHARACTERS, read_json_object, write_text

MANIFEST = "manifest.json"
MANIFEST_COPY = ".manifest.json"
REQUEST = "request.json"
CODE = "code"  # in the file of a request: the digest of the code at work, which is no part of the request
FORCED = ".forced"  # marks a finished artifact that is to be made anew although its request is the same
OLD = ".old"  # folder of the artifacts that were replaced
MAX_OLD = 3  # artifacts in .old/ of one name


def read_request(folder: Path) -> dict | None:
    """Read an artifact's request, without the digest of the code; None if there is none that can be read."""
    request = read_json_object(folder / REQUEST)
    return request and {name: value for name, value in request.items() if name != CODE}


def digest_request(request: dict) -> str:
    """Compute the abbreviated SHA-256 of a request."""
    text = json.dumps(request, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]


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
    manifest = read_json_object(folder / MANIFEST_COPY) or {}
    files = manifest.get("files")
    return isinstance(files, dict) and all(
        (folder / name).is_file() and entry.get("bytes") == (folder / name).stat().st_size
        for name, entry in files.items())


def replace(out: Path, new: Path) -> Path | None:
    """Rename the artifact `new` to `out`.

    A finished artifact of another request that is there moves to .old/, and its new path is returned. An unfinished
    one, and one of the same request, is deleted.
    """
    request = read_request(out)
    stays = request is not None and request != read_request(new) and is_whole(out)
    old = old_folder(out, request) if stays else free_name(out, "replaced")
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


def restore(out: Path, request: dict) -> bool:
    """Move the artifact of this request from .old/ back to `out`; return False if there is none."""
    old = old_folder(out, request)
    if read_request(old) != request or not is_whole(old) or (out / FORCED).exists():
        return False
    replace(out, old)
    return recover_manifest(out)


def force(out: Path) -> None:
    """Mark a finished artifact to be made anew; the mark goes with the artifact when another one replaces it."""
    if out.is_dir():
        (out / FORCED).touch()


def old_folder(out: Path, request: dict) -> Path:
    """Return the folder in .old/ of an artifact of this request."""
    return out.parent / OLD / f"{out.name}-{digest_request(request)}"


def list_old(out: Path, last: Path | None = None) -> list[Path]:
    """List the artifacts of this name in .old/, those first that a kill has cut short, then as they were replaced.

    Args:
        last: the one that was replaced last, whatever the clock says.
    """
    paths = (out.parent / OLD).glob(f"{glob.escape(out.name)}-{'[0-9a-f]' * DIGEST_CHARACTERS}")
    return sorted(paths, key=lambda path: (path == last, is_whole(path), path.stat().st_mtime_ns))


def free_name(out: Path, suffix: str) -> Path:
    """Return the first of NAME.SUFFIX-1, NAME.SUFFIX-2, ... that does not exist."""
    number = 1
    while (name := out.with_name(f"{out.name}.{suffix}-{number}")).exists():
        number += 1
    return name
