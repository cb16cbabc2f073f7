"""Compare the bytes of every artifact file of two runs: does a change of the code change a result?

    python -m benchmarks.quality.compare_artifacts BEFORE AFTER

BEFORE and AFTER are folders of runs, as results/tiny. Run both with the same recipe, the same dump and
OMP_NUM_THREADS=1. Prints each file that differs, each metric that differs, and exits with 1 if there is any.

Not compared: measurements of time and of this machine (timing.jsonl and its series in curves.csv, the figures of
seconds, the report page, the request with the digests of the inputs' manifests) and README.md cards, which name the
stages' seconds and digests.
"""

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path

MEASURED = ("manifest.json", ".manifest.json", "order.json", "request.json", "timing.jsonl", "report.html", "README.md",
            *(f"{figure}{end}" for figure in ("pipeline", "ppo-seconds") for end in (".svg", ".png", "-dark.png")))
MEASURED_SERIES = re.compile(rb"^\w+,\d+,(\w+_seconds|\w+_tokens_per_second|peak_memory_mib),.*\n", re.MULTILINE)
MEASURED_METRICS = ("page_bytes",)


def file_digests(run: Path) -> dict[str, str]:
    """Hash every result file of a run: relative path to SHA-256."""
    files = (path for artifact in sorted(run.glob("*/manifest.json")) for path in sorted(artifact.parent.rglob("*")))
    return {str(path.relative_to(run)): _hash(path)
            for path in files if path.is_file() and path.name not in MEASURED}


def _hash(path: Path) -> str:
    content = path.read_bytes()
    if path.name == "curves.csv":
        content = MEASURED_SERIES.sub(b"", content)
    return hashlib.sha256(content).hexdigest()


def stage_metrics(run: Path) -> dict[str, dict]:
    """Read the metrics in every manifest of a run, by artifact."""
    metrics = {path.parent.name: json.loads(path.read_text(encoding="utf-8"))["metrics"]
               for path in sorted(run.glob("*/manifest.json"))}
    return {artifact: {name: value for name, value in row.items() if name not in MEASURED_METRICS}
            for artifact, row in metrics.items()}


def differences(before: dict, after: dict) -> list[str]:
    """List the keys whose values differ, or that only one side has."""
    return [f"{key}: {'only after' if key not in before else 'only before' if key not in after else 'differs'}"
            for key in sorted(before | after) if before.get(key) != after.get(key)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    given = parser.parse_args(arguments)
    files = {name: file_digests(run) for name, run in vars(given).items()}
    if not files["before"]:
        parser.error(f"{given.before} holds no artifact")
    lines = differences(files["before"], files["after"])
    lines += [f"metrics of {line}" for line in differences(stage_metrics(given.before), stage_metrics(given.after))]
    print("\n".join([*lines, f"{len(files['before'])} files compared, {len(lines)} differences"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
