"""make install: the version of Python is checked, and a broken .venv is made again. Programs that only log stand in."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
echo "$*" >> LOG
case "$1 $2" in
  "-m venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python; cp "$0" .venv/bin/pip;;
  "--version "*) echo "Python VERSION";;
  "-c "*) exit EXIT;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


@pytest.fixture
def project(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-extras.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def write_python(path: Path, log: Path, version: str = "3.12.1", is_new_enough: bool = True) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = PYTHON.replace("LOG", str(log)).replace("VERSION", version).replace("EXIT", str(int(not is_new_enough)))
    path.write_text(text)
    path.chmod(0o755)
    return path


def install(project: Path, python: Path | str) -> tuple[subprocess.CompletedProcess, list[str]]:
    """Run make install, and list the arguments of the commands that its Pythons were called with."""
    done = subprocess.run(["make", "install", f"PYTHON={python}"], cwd=project, capture_output=True, text=True,
                          env=os.environ | {"MAKEFLAGS": ""})
    log = project / "log"
    return done, log.read_text().splitlines() if log.exists() else []


def make_ready(project: Path, folder: str = ".venv") -> None:
    """Make a .venv that works and is newer than what it was made from."""
    for name in ("python", "pip"):
        write_python(project / folder / "bin" / name, project / "log")
    (project / folder / "ready").touch()


def test_a_python_that_is_too_old_or_missing_is_one_line(project):
    old = write_python(project / "old", project / "log", "3.9.2", is_new_enough=False)
    for python, version in ((old, "Python 3.9.2"), ("no-such-python", "")):
        done, _ = install(project, python)
        errors = [line for line in done.stderr.splitlines() if "***" not in line]
        assert done.returncode and len(errors) == 1 and not (project / ".venv").exists()
        assert errors[0].startswith(f"make: error: Python 3.11 or newer is needed, and {python} is {version}")
        assert errors[0].endswith("name another, as in make ppo PYTHON=python3.12")


def test_a_new_environment(project):
    done, calls = install(project, write_python(project / "new", project / "log"))
    assert not done.returncode and "-m venv .venv" in calls and (project / ".venv/ready").exists()
    assert any(call.startswith("-m pip install") for call in calls)


def test_one_that_works_is_left_alone_whatever_the_systems_python(project):
    make_ready(project)
    done, calls = install(project, "no-such-python")
    assert not done.returncode and not [call for call in calls if "venv" in call or "install" in call]


@pytest.mark.parametrize("damage", ["gone", "too old", "moved"])
def test_a_broken_one_is_made_again(project, damage):
    make_ready(project)
    python, pip = project / ".venv/bin/python", project / ".venv/bin/pip"
    if damage == "gone":
        python.unlink()
        python.symlink_to("/nowhere/python3.11")
    elif damage == "too old":
        write_python(python, project / "log", is_new_enough=False)
    else:
        pip.write_text("#!/nowhere/.venv/bin/python\n")
    (project / ".venv/stale").touch()
    done, calls = install(project, write_python(project / "new", project / "log"))
    assert not done.returncode and "-m venv .venv" in calls
    assert (project / ".venv/ready").exists() and not (project / ".venv/stale").exists()


def test_a_link_to_a_broken_one_is_replaced_and_what_it_leads_to_stays(project):
    (project / "elsewhere").mkdir()
    (project / "elsewhere/ready").touch()
    (project / ".venv").symlink_to("elsewhere")
    done, calls = install(project, write_python(project / "new", project / "log"))
    assert not done.returncode and "-m venv .venv" in calls
    assert not (project / ".venv").is_symlink() and (project / "elsewhere").is_dir()


def test_the_version_is_that_of_the_project():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    text = (ROOT / "Makefile").read_text()
    assert f"sys.version_info < ({', '.join(wanted.split('.'))})" in text and f"Python {wanted} or newer" in text


@pytest.mark.parametrize(("given", "passed"), [
    ({}, "-m stages.demo "), ({"RUN": "results/mine"}, "-m stages.demo --run=results/mine "),
    ({"RUN": "my run; touch x", "PORT": "8000"}, "-m stages.demo --run=my run; touch x --port=8000")])
def test_the_demo_takes_a_run_and_a_port(project, given, passed):
    make_ready(project)
    (project / ".venv/extras").touch()
    words = [f"{name}={value}" for name, value in given.items()]
    subprocess.run(["make", "demo", *words], cwd=project, check=True, capture_output=True,
                   env={name: value for name, value in os.environ.items() if name not in ("RUN", "PORT")})
    assert (project / "log").read_text().splitlines()[-1].strip() == passed.strip() and not (project / "x").exists()
