"""Format the results of a benchmark: an aligned table, its goals, and JSON beside the facts of the machine."""

import importlib.metadata
import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("lxml", "markdownify", "beautifulsoup4", "pyarrow", "datasets", "numpy")


@dataclass(frozen=True)
class Goal:
    """A figure and the bounds that it is to keep."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool:
        return ((self.at_least is None or self.value >= self.at_least)
                and (self.at_most is None or self.value <= self.at_most))

    def row(self) -> list:
        bounds = [f"{word} {bound:.4g}" for word, bound in (("at least", self.at_least), ("at most", self.at_most))
                  if bound is not None]
        exact = self.at_least is not None and self.at_least == self.at_most
        return [self.name, self.value, f"exactly {self.at_most:.4g}" if exact else ", ".join(bounds),
                "met" if self.met else "MISSED"]


@dataclass(frozen=True)
class Result:
    """A benchmark's table and goals, and every single run for the JSON file."""

    title: str
    columns: list[str]
    rows: list[list]
    goals: list[Goal] = field(default_factory=list)
    runs: list[dict] = field(default_factory=list)

    def show(self) -> None:
        print(f"\n{self.title}\n\n{table(self.columns, self.rows)}")
        if self.goals:
            print(f"\n{table(['goal', 'measured', 'required', ''], [goal.row() for goal in self.goals])}")

    def write(self, path: Path, facts: dict) -> None:
        goals = [asdict(goal) | {"met": goal.met} for goal in self.goals]
        table = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        content = {"title": self.title, "machine": facts, "table": table, "goals": goals, "runs": self.runs}
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def table(columns: list[str], rows: list[list]) -> str:
    """Plain text: words to the left, numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    right = [any(isinstance(row[i], int | float) for row in rows) for i in range(len(columns))]
    lines = [columns, ["-" * width for width in widths], *cells]
    return "\n".join("  ".join(cell.rjust(width) if numeric else cell.ljust(width) for cell, width, numeric
                               in zip(line, widths, right, strict=True)).rstrip() for line in lines)


def _cell(value) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def machine() -> dict:
    """Where and on what the figures were measured; the load says whether others worked there, too."""
    commit = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"],
                            capture_output=True, text=True, check=False).stdout.strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "memory_gb": round(memory / 1e9, 1),
            "load_average_before": os.getloadavg(), "system": platform.platform(), "python": platform.python_version(),
            "versions": {name: importlib.metadata.version(name) for name in PACKAGES}, "commit": commit or None}


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
