"""Compare two artifacts: settings, inputs, code and packages, metrics."""

from pathlib import Path
from typing import Any

from stages.runs.lineage import check_inputs
from stages.runtime.manifest import Record, diff_trees, read_record

CODE_KEYS = ("stage", "commit", "python", "device", "versions")


def diff_artifacts(a: Path, b: Path) -> dict[str, Any]:
    """List what differs between two artifacts; ArtifactError if a folder is not one."""
    records = [read_record(a), read_record(b)]
    manifests = [record.manifest for record in records]
    code = [{key: manifest[key] for key in CODE_KEYS if key in manifest} for manifest in manifests]
    metrics = diff_trees(*(manifest.get("metrics") for manifest in manifests))
    return {"a": str(a), "b": str(b),
            "problems": [f"{record.folder}: {line}" for record in records for line in _list_problems(record)],
            "settings": diff_trees(*(manifest.get("config") for manifest in manifests)),
            "inputs": _diff_inputs(*records),
            "code": diff_trees(*code),
            "metrics": [row | _subtract(row) for row in metrics]}


def _diff_inputs(a: Record, b: Record) -> list[dict]:
    """Compare inputs by digest, or by name for those from a hub, wherever the folders are."""
    sides = {side: {link.name: link for link in check_inputs(record)} for side, record in (("a", a), ("b", b))}
    rows = diff_trees(*({name: link.sha256 or link.path for name, link in links.items()} for links in sides.values()))
    return [{"name": row["name"]} | {side: {"path": links[row["name"]].path, "sha256": links[row["name"]].sha256}
                                     for side, links in sides.items() if side in row} for row in rows]


def _list_problems(record: Record) -> list[str]:
    return [*record.problems, *([] if "metrics" in record.manifest else [f"{record.state}: it has no metrics yet"])]


def _subtract(row: dict) -> dict[str, float]:
    """Return b - a and b / a if both are numbers."""
    a, b = (row.get(side) for side in ("a", "b"))
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in (a, b)):
        return {}
    return {"difference": b - a} | ({"ratio": b / a} if a else {})
