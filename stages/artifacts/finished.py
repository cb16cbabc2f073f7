"""Recognise finished artifacts, whatever became of their manifests, and keep those that another one replaces.

Snakemake deletes the manifest of a stage before the stage runs, and after a failure. So an artifact holds a copy of it.
A finished artifact that one of other settings or inputs replaces moves to `.old/NAME-DIGEST` beside it, and comes back
when its request does: nothing is trained twice. The last `MAX_OLD` of each name stay there.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from stages.runtime.files import DIGEST_CHARACTERS, atomic_path, read_json_object

MANIFEST = "manifest.json"
MANIFEST_COPY = ".manifest.json"
REQUEST = "request.json"
OLD_REQUEST = "order.json"  # its name in artifacts of older versions
CODE = "code"  # in the file of a request: the digest of the code at work, which is no part of the request
FORCED = ".forced"  # marks a finished artifact that is to be made anew although its request is the same
OLD = ".old"  # folder of the artifacts that were replaced
MAX_OLD = 3  # artifacts in .old/ of one name
DELETED = ".deleted"  # end of the name of a folder in .old/ that is being deleted


def request_file(folder: Path) -> Path:
    """Return the path of an artifact's request, which older versions called order.json."""
    old = folder / OLD_REQUEST
    return old if old.exists() else folder / REQUEST


def read_request(folder: Path) -> dict | None:
    """Read an artifact's request, without the digest of the code; None if there is none that can be read."""
    request = read_json_object(request_file(folder))
    return request and {name: value for name, value in request.items() if name != CODE}


def read_code_digest(folder: Path) -> str | None:
    """Read the digest of the code that last worked on an artifact; None if its request names none."""
    return (read_json_object(request_file(folder)) or {}).get(CODE)


def digest_request(request: dict) -> str:
    """Compute the abbreviated SHA-256 of a request."""
    text = json.dumps(request, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]


def has_manifest(folder: Path) -> bool:
    """Check whether the manifest is there and can be read."""
    return "stage" in (read_json_object(folder / MANIFEST) or {})


def copy_manifest(folder: Path) -> None:
    """Write the copy of the manifest, unless there is one; artifacts of older versions lack it."""
    if has_manifest(folder) and not (folder / MANIFEST_COPY).exists():
        _copy(folder / MANIFEST, folder / MANIFEST_COPY)


def recover_manifest(folder: Path) -> bool:
    """Write a lost or damaged manifest again from its copy, if all files are there; return whether there is one now."""
    if not has_manifest(folder) and is_whole(folder) and not (folder / FORCED).exists():
        _copy(folder / MANIFEST_COPY, folder / MANIFEST)
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
    old = unneeded = None
    if out.exists():
        request = read_request(out)
        if request is not None and request != read_request(new) and is_whole(out):
            (out / FORCED).unlink(missing_ok=True)
            recover_manifest(out)
            old = old_folder(out, request)
            shutil.rmtree(old, ignore_errors=True)  # an earlier one of the same request
            old.parent.mkdir(exist_ok=True)
        else:
            unneeded = free_name(out, "replaced")
        out.rename(old or unneeded)
    if old:
        os.utime(old)  # list_excess goes by when an artifact was replaced
    new.rename(out)
    if unneeded:
        shutil.rmtree(unneeded)
    return old


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


def list_excess(out: Path, last: Path) -> list[Path]:
    """List the artifacts of this name in .old/ that are more than MAX_OLD, those that were replaced first.

    Args:
        last: the one that was replaced last, whatever the clock says.
    """
    name = re.compile(re.escape(out.name) + rf"-[0-9a-f]{{{DIGEST_CHARACTERS}}}")
    others = [path for path in last.parent.iterdir() if name.fullmatch(path.name) and path != last and path.is_dir()]
    return sorted(others, key=lambda path: path.stat().st_mtime_ns)[:max(0, len(others) + 1 - MAX_OLD)]


def delete_old(folder: Path) -> None:
    """Delete an artifact in .old/, and what a kill has left of others; none is ever there in part under its name."""
    folder.rename(folder.with_name(folder.name + DELETED))
    for rest in folder.parent.glob(f"*{DELETED}"):
        shutil.rmtree(rest, ignore_errors=True)


def free_name(out: Path, suffix: str) -> Path:
    """Return the first of NAME.SUFFIX-1, NAME.SUFFIX-2, ... that does not exist."""
    number = 1
    while (name := out.with_name(f"{out.name}.{suffix}-{number}")).exists():
        number += 1
    return name


def _copy(source: Path, target: Path) -> None:
    with atomic_path(target) as draft:
        shutil.copyfile(source, draft)
