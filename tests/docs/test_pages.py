"""Check the pages: links and anchors lead somewhere, files and names in them exist, generated pages are current."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import make_dataclass, replace
from pathlib import Path

import pytest

from docs import recipe_page
from stages.recipe.ranges import Range
from stages.recipe.recipe import Recipe
from stages.recipe.schema import setting
from tests.helpers.documentation import GENERATED, PAGES, ROOT, page_name, read_code_spans, without_blocks

README = (ROOT / "README.md").read_text(encoding="utf-8")
SOURCES = "\n".join(
    path.read_text(encoding="utf-8") for folder in ("stages", "workflow", "configs", "tests", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".py", ".smk", ".yaml"))
FILE_SUFFIXES = ("py", "html", "md", "json", "jsonl", "parquet")
# The metrics in tests/training/test_trackers.py, settings beside those of other libraries in test_own_prompts_page.py.
CHECKED_ELSEWHERE = (page_name(GENERATED), "docs/metrics.md", "docs/own_prompts.md")
SECTIONS = "|".join(recipe_page.section_names())


def anchors(path: Path) -> set[str]:
    """List the anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r" ", "-", re.sub(r"[^\w\- ]", "", heading.lower())) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_and_anchors_lead_somewhere(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page.read_text(encoding="utf-8"))):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not re.match(r"https?://", link) and (not target.exists() or (anchor and anchor not in anchors(target))):
            broken.append(link)
    assert not broken


def test_headings_get_the_same_anchor_from_github_and_mkdocs():
    """MkDocs joins hyphens that follow each other, GitHub does not."""
    odd = {anchor for page in PAGES for anchor in anchors(page) if "--" in anchor or not anchor.isascii()}
    assert not odd


def test_readme_is_short_and_starts_with_the_first_commands():
    lines = README.splitlines()
    assert len(lines) <= 150
    first = "\n".join(lines[:30])
    picture = "docs/images/report.png"
    assert all(text in first for text in ("make ppo", "make test", "snakemake --cores all ppo", picture))
    assert (ROOT / picture).stat().st_size <= 150_000


def test_every_page_is_linked_from_the_readme_or_the_index():
    linked = {page.resolve() for start in (ROOT / "README.md", ROOT / "docs/index.md")
              for link in re.findall(r"\]\(([^)#\s]+)", start.read_text()) for page in [start.parent / link]}
    pages = {page for page in PAGES if page_name(page).startswith("docs/") and page.name != "index.md"}
    assert pages <= linked


def test_files_in_the_pages_exist():
    paths = r"(?<![\w./~-])(?:configs|data|profiles|stages|workflow|tests|benchmarks|docs)/[\w./*-]+\w"
    missing = {(page_name(page), path) for page in PAGES for path in re.findall(paths, page.read_text(encoding="utf-8"))
               if "NAME" not in path and not list(ROOT.glob(path)) and not path.startswith("data/beer")}
    assert not missing


def test_names_in_code_spans_exist():
    """A word_with_underscores is a name of the code, of a recipe or of a file; section.name is a setting."""
    unknown = set()
    for page, span in read_code_spans():
        if page in CHECKED_ELSEWHERE or page.startswith("docs/experiments/"):  # lab notes: names of their time
            continue
        for section, name in re.findall(rf"\b({SECTIONS})\.(\w+)", span):
            if name not in FILE_SUFFIXES and not hasattr(getattr(Recipe(), section), name):
                unknown.add((page, span))
        if re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", span) and not re.search(rf"(?<![a-z_]){span}(?![a-z_])", SOURCES):
            unknown.add((page, span))
    allowed = {"sft_merged", "ppo_train"}
    assert {(page, span) for page, span in unknown if span not in allowed} == set()


def test_recipe_page_is_current():
    assert GENERATED.read_text(encoding="utf-8") == recipe_page.render_page(), "run: python -m docs.recipe_page"


def test_recipe_page_shows_a_changed_default():
    changed = replace(Recipe().ppo, gamma=0.5)
    assert recipe_page.render_table(recipe_page.setting_rows(changed)) not in GENERATED.read_text(encoding="utf-8")
    assert recipe_page.render_table(recipe_page.setting_rows(Recipe().ppo)) in GENERATED.read_text(encoding="utf-8")


def test_a_setting_becomes_a_row():
    field = setting(None, "stop above; null: never [paper] or [ours]", within=Range(0, 1, below=True))
    kind = make_dataclass("Kind", [("max_kl_nats", float | None, field)])
    row = recipe_page.render_table(recipe_page.setting_rows(kind())).splitlines()[-1]
    assert row == ("| `max_kl_nats` | stop above; null: never (*paper*) or | `null` | "
                   "number or null, from 0 to below 1, nats | ours |")


def test_angle_brackets_in_a_meaning_are_text():
    """Python-Markdown knows no backslash before <: a browser would read a tag."""
    assert recipe_page.escape("into `results/<name>/` or results/<name>/ *") == (
        r"into `results/<name>/` or results/&lt;name>/ \*")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Build the documentation as a site; a warning is an error."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
                          cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr.strip(), done.stdout + done.stderr
    return folder


def test_the_site_loads_nothing_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 10
    elsewhere = r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)"
    loaded = {address for page in pages for address in re.findall(elsewhere, page.read_text(encoding="utf-8"))}
    assert not loaded
    assert not any('class="mermaid"' in page.read_text(encoding="utf-8") for page in pages), "Material fetches Mermaid"


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="a browser is driven by playwright: make extras")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("there is no chromium on PATH")
    with playwright.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])


def test_the_site_is_searched_from_disk_without_errors(site, browser):
    page, faults = browser.new_page(), []
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda asked: faults.append(asked.url) if asked.url.startswith("http") else None)
    page.goto((site / "index.html").as_uri())
    page.locator(".md-search__input").click()
    page.keyboard.type("kl_coefficient")
    page.wait_for_selector(".md-search-result__item")
    assert not faults


def test_no_table_of_the_site_is_cut_on_a_desk(site, browser):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    cut = {}
    for file in sorted(site.rglob("*.html")):
        page.goto(file.as_uri())
        cut[file.name] = page.locator(".md-typeset__scrollwrap").evaluate_all(
            "all => all.filter(one => one.scrollWidth > one.clientWidth + 1).map(one => one.innerText.slice(0, 80))")
    assert cut["recipe.html"] == [] and not any(cut.values()), cut
