"""Compare two runs: settings, stages by the digests of their files, headline numbers."""

from pathlib import Path
from typing import Any

from stages.runs.run_facts import Run, common_settings, compare_headlines, list_digests, list_headlines, read_run
from stages.runtime.manifest import diff_trees


def diff_runs(a: Path, b: Path) -> dict[str, Any]:
    """Compare the finished artifacts of two runs; ArtifactError if a folder is not a run."""
    runs = [read_run(a), read_run(b)]
    return {"a": str(a), "b": str(b), "settings": diff_trees(*common_settings(runs)), "stages": _diff_stages(runs),
            "metrics": _diff_headlines(runs)}


def _diff_stages(runs: list[Run]) -> list[dict]:
    """List each stage as {name, state, files}: 'equal', 'different', 'only in a' or 'only in b'; files that differ."""
    a, b = map(list_digests, runs)
    rows = []
    for name in dict.fromkeys([*a, *b]):
        files = sorted(file for file in a.get(name, {}).keys() | b.get(name, {}).keys()
                       if a.get(name, {}).get(file) != b.get(name, {}).get(file))
        state = "only in b" if name not in a else "only in a" if name not in b else "different" if files else "equal"
        rows.append({"name": name, "state": state, "files": files if state == "different" else []})
    return rows


def _diff_headlines(runs: list[Run]) -> list[dict]:
    """List numbers as {name, a, b, difference}, without what a run does not have."""
    rows = []
    for (artifact, name), (a, b) in compare_headlines(list(map(list_headlines, runs))).items():
        sides = {side: estimate for side, estimate in (("a", a), ("b", b)) if estimate}
        difference = {"difference": b["mean"] - a["mean"]} if a and b else {}
        rows.append({"name": f"{artifact}: {name}"} | sides | difference)
    return rows
