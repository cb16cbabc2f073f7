"""Set-up: the pins agree with each other and with the ranges. tests/docs checks what README and docs say."""

import re
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from stages.modeling.replaced_layers import liger_package

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(lines) -> dict[str, str]:
    return dict(line.strip().lower().split("==") for line in lines if line.strip() and not line.startswith("#"))


CORE = pins((ROOT / "constraints.txt").read_text().splitlines())
EXTRAS = pins((ROOT / "constraints-extras.txt").read_text().splitlines())
TESTED = CORE | EXTRAS
OPTIONAL = PROJECT["optional-dependencies"]
FOR_A_GPU = {"liger": [Requirement(text) for text in OPTIONAL.pop("liger")]}  # not in the tested set
RANGES = [Requirement(text) for text in sum(OPTIONAL.values(), PROJECT["dependencies"])]


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
    optional = {Requirement(text).name for group, texts in OPTIONAL.items()
                for text in texts if group != "dev"}
    assert optional <= EXTRAS.keys() | CORE.keys()
    assert {Requirement(text).name for text in PROJECT["dependencies"]} <= CORE.keys()


def test_the_version_that_a_line_asks_for_is_in_its_range():
    line = Requirement(liger_package.INSTALL.removeprefix("pip install "))
    (wanted,) = FOR_A_GPU["liger"]
    assert line.name == wanted.name and all(wanted.specifier.contains(clause.version) for clause in line.specifier)


def test_every_import_is_a_stated_dependency():
    source = "\n".join(path.read_text() for path in (ROOT / "stages").rglob("*.py"))
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", source, re.MULTILINE)) - set(sys.stdlib_module_names)
    renamed = {"pyyaml": "yaml", "beautifulsoup4": "bs4", "pillow": "PIL",
               "scikit-learn": "sklearn", "markdown-it-py": "markdown_it", "liger-kernel": "liger_kernel"}
    stated = {renamed.get(wanted.name, wanted.name) for wanted in sum(FOR_A_GPU.values(), RANGES)} | {"stages"}
    assert imported <= stated, f"not in pyproject.toml: {imported - stated}"


def test_the_licence_and_the_citation_agree_with_the_project():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys() and citation["authors"]
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()
