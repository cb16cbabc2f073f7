"""What the pages say of a shipped recipe is in that recipe, and a change that they propose changes something."""

import re
import shlex
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import yaml
from snakemake.cli import parse_config

from stages.recipe.recipe import Recipe, load_recipe
from stages.recipe.schema import flatten
from tests.helpers.documentation import PAGES, ROOT, page_name, read_code_spans, read_commands, without_blocks

SECTIONS = [field.name for field in fields(Recipe) if is_dataclass(getattr(Recipe(), field.name))]
NAMED = re.compile(r"`configs/(\w+)\.yaml`|\b[Tt]he (demo) recipe (?:departs|has|takes)\b")
CLAIM = re.compile(rf"`(?:({'|'.join(SECTIONS)})\.)?([a-z][\w.]*): ([^`{{]+)`")


def read_paragraphs(path: Path) -> list[str]:
    """List the paragraphs, each with the list that follows it, and the rows of tables."""
    text = without_blocks(path.read_text(encoding="utf-8"))
    parts = re.split(r"\n\n(?![-*] )|\n(?=\|)", text)
    return [part for part in parts if part.strip()]


def find_claims() -> list[tuple[str, str, str, str, str]]:
    """List (page, recipe, section or '', setting, value) of what is said of the one recipe that a paragraph names."""
    claims = []
    for path in PAGES:
        if path.name == "CHANGELOG.md":  # it says what was
            continue
        for paragraph in read_paragraphs(path):
            recipes = {file or demo for file, demo in NAMED.findall(paragraph)}
            if len(recipes) == 1:
                claims += [(page_name(path), *recipes, *claim) for claim in CLAIM.findall(paragraph)]
    return claims


CLAIMS = find_claims()


@pytest.mark.parametrize(("page", "recipe", "section", "name", "value"), CLAIMS)
def test_what_is_said_of_a_recipe_is_in_it(page, recipe, section, name, value):
    loaded = load_recipe(ROOT / f"configs/{recipe}.yaml")
    settings = [{dotted: plain for dotted, plain, _ in flatten(getattr(loaded, part))}
                for part in ([section] if section else SECTIONS)]
    assert yaml.safe_load(value) in [part[name] for part in settings if name in part]


def test_claims_are_read():
    """The paragraph on the demo recipe among them."""
    assert ("docs/pipeline.md", "demo", "reward", "tune", "full") in CLAIMS and len(CLAIMS) >= 5


def test_one_time_is_told_of_make_ppo():
    """By README and docs; no other number of minutes stands beside the command or its recipe."""
    pages = {page_name(path): without_comments(path) for path in PAGES if page_name(path) != "CHANGELOG.md"}
    lines = [line for text in pages.values() for line in text.splitlines()
             if re.search(r"make ppo\b(?! TORCH)|`configs/demo.yaml` \|", line) and re.search(r"\bmin(utes)?\b", line)]
    times = {time for line in lines for time in re.findall(r"(?:about )?\d[\d,.]* min(?:utes)?(?: \d+ s)?", line)}
    assert times - {"12 minutes"} == {"23 min 16 s"} and len(lines) >= 3  # 12: a goal


def without_comments(path: Path) -> str:
    return re.sub(r"<!--.*?-->", "", path.read_text(encoding="utf-8"))


def list_changes() -> list[tuple[str, tuple[str, ...]]]:
    """List (page, words of a command) of each that overrides settings of a section."""
    commands = [(command.page, command.words) for command in read_commands() if command.words[0] == "snakemake"]
    spans = [(page, tuple(shlex.split(span))) for page, span in read_code_spans()
             if re.search(r"--config .*=\{", span) and "..." not in span and page != "docs/troubleshooting.md"]
    return [(page, words) for page, words in commands + spans if any(re.match(r"\w+=\{", word) for word in words)]


@pytest.mark.parametrize(("page", "words"), list_changes(), ids=str)
def test_a_change_of_a_recipe_changes_each_section_that_it_names(page, words, monkeypatch):
    """Otherwise its run repeats the recipe's own."""
    monkeypatch.chdir(ROOT)
    config = parse_config([word for word in words if re.match(r"\w+=", word)])
    overrides = {name: values for name, values in config.items() if name in SECTIONS and isinstance(values, dict)}
    recipe = config.get("recipe") or ("sites" if "dump" in config else "demo")
    before, after = load_recipe(recipe), load_recipe(recipe, overrides)
    unchanged = [name for name in overrides if getattr(before, name) == getattr(after, name)]
    assert not unchanged, f"{page}: {recipe} has these values"
