"""Describe one artifact: manifest, staleness, damage, ancestry, and the contents of its files."""

from pathlib import Path
from typing import Any

from stages.inspection.artifact_contents import read_contents
from stages.runs.lineage import diff_from_defaults, find_stale_reasons, trace_ancestry
from stages.runs.listing import last_write_time
from stages.runtime.manifest import find_damaged_files, read_record


def describe_artifact(folder: Path) -> dict[str, Any]:
    """Collect everything there is to say about an artifact, finished or not; ArtifactError if it is not one."""
    record = read_record(folder)
    contents = read_contents(folder)
    problems = [*record.problems, *find_damaged_files(record), *contents.pop("problems")]
    manifest = {key: value for key, value in record.manifest.items() if key != "files"}
    return {"artifact": str(folder), "state": record.state, "stale": find_stale_reasons(record), "problems": problems,
            "last_written": last_write_time(folder), "manifest": manifest, "settings": diff_from_defaults(record),
            "ancestry": trace_ancestry(record), **contents}
