"""Show a run on the terminal in the stages' own lines: without Snakemake's, and with the cause of a failure last.

Snakemake's own log, in .snakemake/log/, still has everything.
"""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from stages.artifacts.artifact import MANIFEST, MANIFEST_COPY, list_old
from stages.artifacts.lineage import RECIPE, SEED_FOLDER, section_name
from stages.recipe.recipe import Recipe, read_mapping
from stages.recipe.schema import SettingsError, complete_settings, result_settings
from stages.render.terminal import escape_controls
from stages.render.units import format_duration
from stages.runtime.files import read_json_object, read_last_lines
from stages.runtime.stage_lines import export_plan

PAIRS, SHARES = "pairs", "pairs-shares"
LOGGER, HANDLER = "snakemake.logging", "DefaultStreamHandler"
# What Snakemake logs of a run in which all goes well: by event or, where it names none, by the function that logs.
EVENTS = ("WORKFLOW_STARTED", "RUN_INFO", "RESOURCES_INFO", "JOB_INFO", "JOB_STARTED", "JOB_FINISHED", "PROGRESS",
          "SHELLCMD", "GROUP_INFO")
FUNCTIONS = ("execute_workflow", "_build_dag", "execute", "schedule", "logfile_hint", "log_workflow_runtime")
RESULTS = ("Nothing to be done", "Will exit after finishing")
SUMMARIES = ("Exiting because a job execution failed", "WorkflowError:\nAt least one job did not complete")
# Not srun's, which only says that a stage has ended.
ERROR_LINE = re.compile(r"(?:\[\d+/\d+[^]]*\] )?(?!srun:)[\w-]+: error: (.+)")
STOP_LINE = re.compile(r"(?:\[\d+/\d+[^]]*\] )?[\w-]+: (stopped by SIG\w+.*)")


class Console(logging.Filter):
    """Leave Snakemake's progress out of what its stream handler prints, and note which jobs fail.

    failed: log and rule of each failed job.
    shows_jobs: leave Snakemake's lines about jobs; on a cluster, those of the stages are only in their logs.
    """

    def __init__(self):
        super().__init__()
        self.failed: dict[Path, str] = {}
        self.shows_jobs = False
        self.log_sizes: dict[Path, int] = {}  # when the job started: stages append to their logs

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether Snakemake may print this record."""
        event = getattr(getattr(record, "event", None), "name", None)
        logs = [Path(log) for log in getattr(record, "log", None) or ()]
        if event == "JOB_INFO":
            self.log_sizes |= {log: log.stat().st_size if log.exists() else 0 for log in logs}
        if event == "JOB_ERROR" and logs:
            self.failed[logs[0]] = record.rule_name
            return False
        text = str(record.msg)
        if event == "ERROR" and "CalledProcessError in " in text:  # the stage has said why
            return False
        if record.levelno > logging.INFO:
            return not (self.failed and text.startswith(SUMMARIES))
        return self.shows_jobs or text.startswith(RESULTS) or not (event in EVENTS or record.funcName in FUNCTIONS)

    def describe_failures(self) -> list[str]:
        """Say in one line each why jobs failed; the text of their logs cannot control the terminal."""
        return [f"snakemake: error: {rule} failed: {self._find_cause(log)} (log: {log})"
                for log, rule in self.failed.items()]

    def _find_cause(self, log: Path) -> str:
        lines = read_last_lines(log, self.log_sizes.get(log, 0))
        for line in reversed(lines):
            if match := ERROR_LINE.fullmatch(line) or STOP_LINE.fullmatch(line):
                return escape_controls(match[1])
        if not lines:
            return "it wrote nothing to its log"
        if lines[-1] == "KeyboardInterrupt":  # in the first moments of a program
            return "stopped by SIGINT: the same command continues"
        if any(line.startswith("Traceback ") for line in lines):
            return f"{escape_controls(lines[-1])}: a mistake in this program"
        return f"it ended without an error message, as if killed; its last line was: {escape_controls(lines[-1])}"


def quieten_snakemake() -> Console:
    """Install a Console on the handler that prints Snakemake's log."""
    console = Console()
    for handler in logging.getLogger(LOGGER).handlers:
        if handler.name == HANDLER:
            handler.filters.insert(0, console)  # before Snakemake's own, which may stop the records of failures
    return console


def announce_run(recipe: Recipe, run: str, outputs: Iterable[str], is_local: bool) -> None:
    """Print what a run makes, and tell the stages their place in it.

    Args:
        outputs: of the jobs to run, in their order.
        is_local: whether the stages run on this machine, whose terminal they may draw bars on.
    """
    manifests = [Path(file) for file in outputs if Path(file).name == MANIFEST]
    # Shares of the pairs are one stage: results/NAME/pairs-shares/1-of-9.
    folders = dict.fromkeys(file.parent.parent if file.parent.parent.name == SHARES else file.parent
                            for file in manifests)
    # Seeds side by side take less than the sum of their times.
    is_seeded = any(SEED_FOLDER.fullmatch(folder.parent.name) for folder in folders)
    seconds = dict.fromkeys(map(str, folders)) if is_seeded else estimate_seconds(recipe, folders)
    export_plan(seconds, _find_terminal() if is_local else None)
    if seconds:
        print(describe_plan(run, seconds), file=sys.stderr)


def start_plan(run: str, folders: Iterable[Path], threads: int) -> None:
    """Print in the background what the stages of a run will take, by the same plan; nothing if that fails.

    folders: of the artifacts that the run makes. threads: of a stage.
    """
    names = dict.fromkeys(folder.name for folder in folders if folder.parent == Path(run))
    if names:
        words = [sys.executable, "-m", "stages.plan", "--recipe", f"{run}/recipe.yaml", "--stages", *names]
        with suppress(OSError):
            subprocess.Popen(words, env=os.environ | {"OMP_NUM_THREADS": str(threads)}, stdin=subprocess.DEVNULL,
                             stdout=subprocess.DEVNULL, start_new_session=True)


def _find_terminal() -> str | None:
    """Return the path of the terminal that is stdout, where the stages' lines go; None if it is none."""
    try:
        return os.ttyname(sys.stdout.fileno())
    except (OSError, ValueError):  # a file, a pipe, or a terminal of another container
        return None


def estimate_seconds(recipe: Recipe, folders: Iterable[Path]) -> dict[str, float | None]:
    """Return how long each artifact took before, in any run beside this one; None where that is not known.

    Settings other than the seed must be the same. Of several times the longest counts: the time of a stage that was
    resumed leaves out what came before.

    Args:
        folders: of the artifacts.
    """
    folders = list(folders)
    recipes = [path for results in {folder.parent.parent for folder in folders} for path in results.glob(f"*/{RECIPE}")]
    runs = [path.parent for path in recipes if _read_dump(path) == list(recipe.dump)]
    scattered = any(folder.name == SHARES for folder in folders)  # then `pairs` only gathers them
    return {str(folder): None if scattered and folder.name == PAIRS
            else max(_list_seconds(folder.name, runs, recipe), default=None) for folder in folders}


def describe_plan(run: str, seconds: dict[str, float | None]) -> str:
    """Return the first line of a run: what is made, and how long that took before, as far as that is known."""
    stages = ", ".join(dict.fromkeys(Path(folder).name for folder in seconds))
    seeds = dict.fromkeys(name for name in (Path(folder).parent.name for folder in seconds)
                          if SEED_FOLDER.fullmatch(name))
    places = f" in {', '.join(seeds)}" if seeds else ""
    return f"{run}: {len(seconds)} stages to run{places}: {stages}; {_describe_time(seconds)}"


def _describe_time(seconds: dict[str, float | None]) -> str:
    """Say how long the stages took before, and which of them have no earlier time."""
    known = [number for number in seconds.values() if number is not None]
    if not known:
        return "no estimate of the time"
    unknown = dict.fromkeys(Path(folder).name for folder, number in seconds.items() if number is None)
    rest = f" without {', '.join(unknown)}, for which there is no estimate" if unknown else ""
    return f"it took about {format_duration(sum(known))} before{rest}"


def _list_seconds(name: str, runs: list[Path], recipe: Recipe) -> list[float]:
    """List the seconds of the finished artifacts of this name in these runs, replaced ones too."""
    seconds = []
    for artifact in (path for run in runs for path in (run / name, *list_old(run / name))):
        manifest = read_json_object(artifact / MANIFEST_COPY) or {}
        section = getattr(recipe, section_name(str(manifest.get("stage"))), None)
        config, took = manifest.get("config"), manifest.get("seconds")
        if section and isinstance(config, dict) and isinstance(took, int | float) and (
                complete_settings(section, config) | {"seed": None} == result_settings(section) | {"seed": None}):
            seconds.append(took)
    return seconds


def _read_dump(recipe: Path) -> object:
    try:
        return read_mapping(recipe).get("dump")
    except SettingsError:
        return None
