"""The mistakes of docs/troubleshooting.md, typed: each ends in the line that the table has, and in time.

A stage's mistakes are found before torch is imported, so each takes a fraction of a second.
"""

import fcntl
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.documentation import ROOT
from tests.helpers.snakemake_runs import Outcome

PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `((?:snakemake|python) [^`]+)` \| `([^`]+)` \| .+ \|$", re.MULTILINE)
MISTAKES = ROW.findall(PAGE)  # command, line
SNAKEMAKE = [command for command, _ in MISTAKES if command.startswith("snakemake ")]
REAL_RUNS = ("snakemake ppo", "snakemake --cores all ppo --config name=busy")  # a dry run is allowed to do this
OWN_MESSAGES = {  # of Snakemake
    "snakemake --cores all ppo -n --confg seed=1": "unrecognized arguments"}
MAX_CPU_SECONDS = 2.0
OF_THE_MACHINE = {  # what a test cannot type: words of the line, and the file that prints them
    "Python 3.11 or newer is needed, and": "Makefile",
    "is neither 'scratch' nor a local folder, and cannot be downloaded from the hub; check its":
        "stages/modeling/pretrained.py",
    "which is not installed: make extras": "stages/recipe/checks.py",
    "no space left on the disk of": "stages/command_line/failures.py",
    "out of memory: take smaller batches or microbatches, or a machine with more": "stages/command_line/failures.py",
    "out of memory, it seems: a library aborted (": "stages/runtime/processes.py",
    "is damaged:": "stages/artifacts/manifest.py", "another process is making": "stages/artifacts/artifact.py"}


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of the project by links, and artifacts to make mistakes with."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("Snakefile", "environment.yml", "workflow", "profiles", "configs", "stages", "data", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    for stage in ("posts", "pairs"):
        (folder / stage).mkdir()
        (folder / stage / "manifest.json").write_text(f'{{"stage": "{stage}", "files": {{}}}}')
        (folder / stage / "request.json").write_text("{}")
    (folder / "partial").mkdir()
    (folder / "partial/request.json").write_text("{}")
    (folder / "results/taken").mkdir(parents=True)
    (folder / "results/taken/recipe.yaml").write_text("dump: [other.7z]\n")
    (folder / "results/busy").mkdir()
    return folder


@pytest.fixture(scope="module")
def outcomes(project, snakemake_forks) -> dict[str, Outcome]:
    commands = [*SNAKEMAKE, *OWN_MESSAGES]
    words = [[*shlex.split(command)[1:], *["-n"] * (command not in REAL_RUNS)] for command in commands]
    with open(project / "results/busy/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return {command: snakemake_forks.run(given, project) for command, given in zip(commands, words, strict=True)}


def pattern(line: str) -> str:
    return re.escape(line).replace(re.escape("..."), ".*")


@pytest.mark.parametrize(("command", "line"), MISTAKES, ids=[command for command, _ in MISTAKES])
def test_a_mistake_is_the_line_of_the_table_and_quick(command, line, project, request):
    if command in SNAKEMAKE:
        outcome = request.getfixturevalue("outcomes")[command]
    else:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, *shlex.split(command)[1:]], cwd=project, capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = sum(getattr(after, kind) - getattr(before, kind) for kind in ("ru_utime", "ru_stime"))
        outcome = Outcome(done.returncode, done.stdout + done.stderr, seconds)
    assert outcome.code not in (0, -1)
    (seen,) = outcome.lines
    assert re.fullmatch(pattern(line), seen)
    assert outcome.cpu_seconds < MAX_CPU_SECONDS


@pytest.mark.parametrize("command", OWN_MESSAGES)
def test_snakemakes_own_messages_are_as_the_page_says(command, outcomes):
    assert outcomes[command].code and OWN_MESSAGES[command] in outcomes[command].text and OWN_MESSAGES[command] in PAGE


@pytest.mark.parametrize(("words", "file"), OF_THE_MACHINE.items())
def test_lines_of_the_machine_are_those_of_the_code(words, file):
    source = re.sub(r'"\s*\\?\n\s*f?"', "", (ROOT / file).read_text(encoding="utf-8"))
    assert words in PAGE and words in re.sub(r"\s+", " ", source)


def test_there_are_at_least_twenty():
    assert len(MISTAKES) >= 20 and len(dict(MISTAKES)) == len(MISTAKES)
    assert PAGE.count("\n| `snakemake ") + PAGE.count("\n| `python ") == len(MISTAKES), "a row that ROW does not match"
