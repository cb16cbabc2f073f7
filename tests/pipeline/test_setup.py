"""Set-up: the pins agree with each other and with the ranges. tests/docs checks what README and docs say."""

import re
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


def pins(lines) -> dict[str, str]:
    return dict(line.strip().lower().split("==") for line in lines if line.strip() and not line.startswith("#"))


CORE = pins((ROOT / "constraints.txt").read_text().splitlines())
EXTRAS = pins((ROOT / "constraints-extras.txt").read_text().splitlines())
TESTED = CORE | EXTRAS
OPTIONAL = PROJECT["optional-dependencies"]
RANGES = [Requirement(text) for text in sum(OPTIONAL.values(), PROJECT["dependencies"])]


@pytest.mark.parametrize("wanted", RANGES, ids=lambda wanted: wanted.name)
def test_the_tested_version_is_in_its_range(wanted):
    assert wanted.specifier.contains(TESTED[wanted.name])
    assert {clause.operator for clause in wanted.specifier} == {">=", "<"}, "a tested range has two ends"


def test_this_python_has_the_tested_set():
    differing = {wanted.name: version(wanted.name) for wanted in RANGES
                 if version(wanted.name).split("+")[0] != TESTED[wanted.name]}
    assert not differing, "run make install"


@pytest.mark.parametrize("hook", ["get_requires_for_build_wheel", "build_editable", "build_sdist"])
def test_an_installation_is_refused_in_one_line(hook):
    """As pip calls the hooks of pyproject.toml's build backend; before, it installed an empty package."""
    system = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    assert system["requires"] == [] and system["backend-path"] == ["."]
    done = subprocess.run([sys.executable, "-c", f"import {system['build-backend']} as backend; "
                           f"backend.{hook}('folder', config_settings=None)"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "the project runs from its folder" in done.stderr


def test_conda_users_get_the_same_set():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, _, pip = environment["dependencies"]
    assert pins(pip["pip"]) == CORE
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(python.split("=")[1] + ".0")


def test_extras_add_and_change_nothing():
    assert not CORE.keys() & EXTRAS.keys()
    optional = {Requirement(text).name for group, texts in OPTIONAL.items()
                for text in texts if group != "dev"}
    assert optional <= EXTRAS.keys() | CORE.keys()
    assert {Requirement(text).name for text in PROJECT["dependencies"]} <= CORE.keys()


def test_every_import_is_a_stated_dependency():
    source = "\n".join(path.read_text() for path in (ROOT / "stages").rglob("*.py"))
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", source, re.MULTILINE)) - set(sys.stdlib_module_names)
    renamed = {"pyyaml": "yaml", "beautifulsoup4": "bs4", "pillow": "PIL",
               "scikit-learn": "sklearn", "markdown-it-py": "markdown_it"}
    stated = {renamed.get(wanted.name, wanted.name) for wanted in RANGES} | {"stages"}
    assert imported <= stated, f"not in pyproject.toml: {imported - stated}"


def test_the_licence_and_the_citation_agree_with_the_project():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys() and citation["authors"]
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()
