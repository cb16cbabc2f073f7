"""Set-up: the pins agree with each other and with the ranges, and what the README shows exists."""

import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines()
            if line and not line.startswith("#")]


def pins(lines) -> dict[str, str]:
    return dict(line.strip().lower().split("==") for line in lines if line.strip() and not line.startswith("#"))


CORE = pins((ROOT / "constraints.txt").read_text().splitlines())
EXTRAS = pins((ROOT / "constraints-extras.txt").read_text().splitlines())
TESTED = CORE | EXTRAS
RANGES = [Requirement(text) for text in sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])]


@pytest.mark.parametrize("wanted", RANGES, ids=lambda wanted: wanted.name)
def test_the_tested_version_is_in_its_range(wanted):
    assert wanted.specifier.contains(TESTED[wanted.name])
    assert {clause.operator for clause in wanted.specifier} == {">=", "<"}, "a tested range has two ends"


def test_this_python_has_the_tested_set():
    differing = {wanted.name: version(wanted.name) for wanted in RANGES
                 if version(wanted.name).split("+")[0] != TESTED[wanted.name]}
    assert not differing, "run make install"


def test_conda_users_get_the_same_set():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, _, pip = environment["dependencies"]
    assert pins(pip["pip"]) == CORE
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(python.split("=")[1] + ".0")


def test_extras_add_and_change_nothing():
    assert not CORE.keys() & EXTRAS.keys()
    optional = {Requirement(text).name for group, texts in PROJECT["optional-dependencies"].items()
                for text in texts if group != "dev"}
    assert optional <= EXTRAS.keys()
    assert {Requirement(text).name for text in PROJECT["dependencies"]} <= CORE.keys()


def test_every_import_is_a_stated_dependency():
    source = "\n".join(path.read_text() for path in (ROOT / "stages").rglob("*.py"))
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", source, re.MULTILINE)) - set(sys.stdlib_module_names)
    renamed = {"pyyaml": "yaml", "beautifulsoup4": "bs4", "pillow": "PIL",
               "scikit-learn": "sklearn"}
    stated = {renamed.get(wanted.name, wanted.name) for wanted in RANGES} | {"stages"}
    assert imported <= stated, f"not in pyproject.toml: {imported - stated}"


def test_the_readmes_first_screen_has_the_first_commands():
    first = "\n".join(README.splitlines()[:30])
    assert all(command in first for command in ("make ppo", "make test", "snakemake --cores all ppo"))


def test_make_targets_in_the_readme_exist():
    targets = {word for line in COMMANDS for word in re.findall(r"^make (\w+)", line)}
    assert targets >= {"ppo", "test"}
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def test_files_and_stages_in_the_readme_exist():
    words = set(re.findall(r"(?<![\w./])(?:configs|data|profiles|stages|workflow|tests)/[\w./-]+\w", README))
    missing = [word for word in words if not (ROOT / word).exists() and "NAME" not in word]
    assert not missing
    for stage in re.findall(r"python -m stages\.(\w+)", README):
        assert (ROOT / "stages" / f"{stage}.py").exists()


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("snakemake")])
def test_snakemake_commands_in_the_readme_plan(command, tmp_path):
    """Each as it is written, dry, in a copy with nothing made yet. The example dump stands for anybody's."""
    if "--report" in command or "--profile" in command:
        pytest.skip("needs a finished run, or a cluster")
    for name in ("Snakefile", "environment.yml", "workflow", "profiles", "configs", "stages", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "beer.stackexchange.com.7z").write_text("")
    words = [word.replace("/path/to/", "") for word in shlex.split(command, comments=True)]
    done = subprocess.run([sys.executable, "-m", *words, "-n"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
