"""The report in a browser: headless Chromium opens it from disk, sorts, filters, prints; no request but the file."""

import json
import re
import shutil
import statistics
import time
from pathlib import Path

import pytest

from stages import compare, export_gguf
from stages.recipe.sections import evaluate
from stages.reporting.curves import CURVES
from tests.helpers import finished_run
from tests.helpers.finished_run import EVIL, around, metrics, page_of, sample, write

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make extras")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on PATH")
BIDI = "\u202egnp.exe\u202c \u2067שלום\u2069 مرحبا \u200f"
ACTIVE = "<img src=http://evil.example/x.png onerror=\"document.title='hit'\"> <style>*{display:none}</style>"
HOSTILE = f"{EVIL} {BIDI} {ACTIVE}"
IS_DARK = "image => image.currentSrc === image.parentElement.querySelector('source').srcset"
CARDS = 'section:has(h2:text-is("Answers side by side"))'
CELL = "cell => cell.querySelector('data')?.value ?? cell.innerText.trim()"
# Of each column: the marks of all heads and the shown cells of the column, before and after each of three clicks.
SORT_BY_EVERY_COLUMN = """table => [...table.querySelectorAll("thead th button")].map((button, at) => {
    const rows = () => [...table.querySelectorAll("tbody tr")].filter(row => row.checkVisibility());
    const state = () => [[...table.querySelectorAll("thead th")].map(head => head.ariaSort),
                         rows().map(row => row.cells[at]).map(CELL)];
    return [state(), ...[1, 2, 3].map(() => { button.click(); return state(); })];
})""".replace("CELL", CELL)
CUT = "all => all.filter(one => one.scrollWidth > one.clientWidth + 1).map(one => one.textContent.slice(0, 60))"
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1200, "height": 900}


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def rows() -> list[dict]:
    """Questions whose rewards are in another order as numbers than as text, some of them unknown."""
    rewards = [3.0, -10.5, 20.0, 0.5, -2.0, None, 100.0]
    texts = {2: HOSTILE, 3: "text 3\n" * 100, 5: f"text 5 https://example.org/{'long' * 40}"}
    return [sample(number, texts.get(number, f"text {number}")) | {"reward_sft": reward}
            for number, reward in enumerate(rewards, 1)]


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """The report of a small run."""
    place = tmp_path_factory.mktemp("report")
    folders = finished_run.artifacts(place)
    write(folders, metrics(), rows())
    page_of(folders, place)
    return place / "out" / "report.html"


class Opened:
    """A page with what a browser had to say of it."""

    def __init__(self, browser, file: Path, **how):
        self.context = browser.new_context(**({"viewport": DESK} | how))
        self.page, self.requests, self.said = self.context.new_page(), [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.goto(file.as_uri())

    def column(self, table, number: int) -> list[str]:
        """The shown cells of a column, from the top."""
        return table.locator("tbody tr:visible").evaluate_all(
            f"(rows, at) => rows.map(row => row.cells[at]).map({CELL})", number)


@pytest.fixture
def opened(chromium, file):
    actual = Opened(chromium, file)
    yield actual
    actual.context.close()
    assert not actual.said
    assert {url for url in actual.requests if not url.startswith("data:")} == {file.as_uri()}


def table_with(opened: Opened, head: str):
    """The table one of whose columns is called so."""
    return opened.page.locator("table").filter(has=opened.page.get_by_role("button", name=head, exact=True)).first


def number(text: str) -> float | None:
    actual = re.match(r"[+-]?[\d,.]+(?:e[+-]?\d+)?", text)
    return float(actual[0].replace(",", "")) if actual else None


# --- tables ---------------------------------------------------------------------------------------------------------


def test_every_table_sorts_up_down_and_back_by_every_column(opened):
    tables = opened.page.locator("table").all()
    assert len(tables) >= 12
    for table in tables:
        if table.locator("tbody tr").count() < 2 or not table.is_visible():
            continue
        buttons = table.locator("thead th button").count()
        assert buttons == table.locator("thead th").count() > 0
        for at, turns in enumerate(table.evaluate(SORT_BY_EVERY_COLUMN)):
            (_, before), *after = turns
            for (marks, _), direction in zip(after, ("ascending", "descending", "none"), strict=True):
                assert marks == ["none"] * at + [direction] + ["none"] * (buttons - at - 1)
            ascending, descending, unsorted = (cells for _, cells in after)
            assert unsorted == before
            assert sorted(ascending) == sorted(descending) == sorted(before)
            numbers = [number(text) for text in ascending]
            if None not in numbers:
                assert numbers == sorted(numbers)
                assert [number(text) for text in descending] == sorted(numbers, reverse=True)


def test_numbers_sort_as_numbers_and_what_has_none_comes_last(opened):
    cards = opened.page.locator(f"{CARDS} table")
    by_reward = cards.get_by_role("button", name="SFT: reward", exact=True)
    places = [cards.locator("tbody tr").all_text_contents() for _ in range(2) if by_reward.click() is None]
    numbers = [[re.search(r"question (\d+)", text)[1] for text in column] for column in places]
    assert numbers == [["2", "5", "4", "1", "3", "7", "6"], ["7", "3", "1", "4", "5", "2", "6"]]
    cards.get_by_role("button", name="question", exact=True).click()
    turns = cards.locator("thead th").evaluate_all("heads => heads.map(head => head.ariaSort)")
    assert turns == ["ascending"] + ["none"] * 7
    assert cards.locator("details[open]").count() == 5  # however they are sorted


def test_times_sort_by_their_seconds(opened):
    """'1 min 15 s' is more than '75.0 s' would suggest."""
    opened.page.locator("summary", has_text="Pipeline").click()
    table = table_with(opened, "time")
    opened.page.evaluate("""() => { const [first, second] = [...document.querySelectorAll('#s9 data')];
                                    first.textContent = '9.0 s'; first.value = '9'; }""")
    table.get_by_role("button", name="time", exact=True).click()
    assert opened.column(table, 1)[:2] == ["9", "75"]


def test_the_keyboard_sorts_and_filters(opened):
    cards = opened.page.locator(f"{CARDS} table")
    opened.page.locator(f"{CARDS} input").focus()
    opened.page.keyboard.type("question 4")
    assert cards.locator("tbody tr:visible").count() == 1
    for _ in range(20):
        opened.page.keyboard.press("Tab")
        if opened.page.evaluate("document.activeElement.textContent") == "question":
            break
    opened.page.keyboard.press("Enter")
    assert cards.locator("thead th").first.get_attribute("aria-sort") == "ascending"
    opened.page.keyboard.press("Space")
    assert cards.locator("thead th").first.get_attribute("aria-sort") == "descending"


def test_a_filter_hides_rows_and_counts_those_left(opened):
    for field in opened.page.get_by_role("searchbox").all():
        if not field.is_visible():
            continue
        tools = field.locator("xpath=..")
        shown = tools.locator("xpath=following-sibling::*[1]").locator("tbody tr")
        every = shown.count()
        words = shown.nth(1).locator("th").inner_text().split()[:2]
        assert tools.locator("output").inner_text() == f"{every} rows"
        field.fill(" ".join(word.upper() for word in reversed(words)))
        left = [row for row in shown.all() if row.is_visible()]
        assert left and all(word.lower() in row.inner_text().lower() for row in left for word in words)
        field.fill("no such row anywhere")
        assert not any(row.is_visible() for row in shown.all())
        assert tools.locator("output").inner_text() == f"0 of {every} rows"
        field.fill("")
        assert all(row.is_visible() for row in shown.all()) and tools.locator("output").inner_text() == f"{every} rows"


def test_a_filter_stays_while_the_order_changes(opened):
    opened.page.locator(f"{CARDS} input").fill("text")
    cards = opened.page.locator(f"{CARDS} table")
    assert opened.page.locator(f"{CARDS} output").inner_text() == "6 of 7 rows"
    cards.get_by_role("button", name="question", exact=True).click()
    assert cards.locator("tbody tr:visible").count() == 6


def test_without_a_script_it_is_the_same_page(chromium, file):
    plain = Opened(chromium, file, java_script_enabled=False)
    assert plain.page.locator("button, input").count() == 0
    assert plain.page.locator(f"{CARDS} tbody tr:visible").count() == 7
    plain.context.close()


# --- what is shown --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_are_there_in_the_readers_colours(chromium, file, scheme):
    actual = Opened(chromium, file, color_scheme=scheme)
    images = actual.page.locator("img").evaluate_all(
        "images => Promise.all(images.map(i => i.decode().then(() => [i.naturalWidth, i.currentSrc.length, i.alt])))")
    assert len(images) >= 10 and all(width > 200 and length > 1000 and alt for width, length, alt in images)
    ground = actual.page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", ground))) / 3
    assert brightness > 200 if scheme == "light" else brightness < 60
    dark = actual.page.locator("img").first.evaluate(IS_DARK)
    assert dark == (scheme == "dark")
    assert not actual.said
    actual.context.close()


def test_hostile_text_is_text(opened):
    page = opened.page
    assert page.locator("script").count() == 1 and page.title() != "hit"
    assert page.locator(f"{CARDS} img, {CARDS} style, section script, [onerror]").count() == 0
    shown = page.locator(f"{CARDS} .post").all_inner_texts()
    assert shown.count(HOSTILE.replace("\x08", "␈").rstrip()) == 6


def test_text_from_right_to_left_stays_in_its_place(chromium, tmp_path, monkeypatch):
    finished_run.draw_dots(monkeypatch)
    folders = finished_run.artifacts(tmp_path)
    write(folders, metrics(), [sample(1, "שלום עולם \u202e"), sample(2, "plain")])
    page_of(folders, tmp_path)
    actual = Opened(chromium, tmp_path / "out" / "report.html")
    styles = actual.page.locator(f"{CARDS} .post").evaluate_all(
        "all => all.map(getComputedStyle).map(style => [style.direction, style.textAlign])")
    assert styles == [["rtl", "start"]] * 6 + [["ltr", "start"]] * 6
    label = actual.page.locator(f"{CARDS} tbody tr").first.locator("b").first
    cell = actual.page.locator(f"{CARDS} tbody tr").first.locator(".answer").first
    assert label.bounding_box()["x"] - cell.bounding_box()["x"] < 2  # what is ours still begins at the left
    asked = actual.page.locator(f"{CARDS} th .faint").first.inner_text()
    assert asked.startswith("beer, question 1, asked by ש") and asked.endswith(", CC BY-SA.")
    actual.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_down_only(chromium, file, scheme):
    actual = Opened(chromium, file, viewport=PHONE, color_scheme=scheme, device_scale_factor=2)
    for folded in actual.page.locator("summary").all():
        folded.click()
    assert actual.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    wide = actual.page.evaluate("""() => [...document.querySelectorAll('body *')].filter(one =>
        !one.closest('.scroll') && one.getBoundingClientRect().right > innerWidth + 1).map(one => one.outerHTML)""")
    assert wide == []
    cards = actual.page.locator(".scroll:has(> .cards)").evaluate_all(
        "all => all.map(one => one.scrollWidth - one.clientWidth)")
    assert cards == [0, 0]  # only tables of numbers scroll sideways, by themselves
    actual.context.close()


def test_paper_shows_all_of_it(chromium, file):
    actual = Opened(chromium, file, color_scheme="dark")
    actual.page.emulate_media(media="print")
    assert actual.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert actual.page.evaluate("getComputedStyle(document.body).getPropertyValue('--accent')") == "#0072b2"
    hidden = actual.page.evaluate("""() => [...document.querySelectorAll('tbody tr, .post')].filter(one =>
        !one.checkVisibility({contentVisibilityAuto: true}) || one.getBoundingClientRect().height < 1
        || one.scrollHeight > one.clientHeight + 1 && getComputedStyle(one).overflowY !== 'visible')
        .map(one => one.outerHTML.slice(0, 80))""")
    assert hidden == []
    actual.page.set_viewport_size({"width": 703, "height": 1000})  # A4 less its margins
    assert actual.page.evaluate("document.documentElement.scrollWidth") == 703
    clipped = actual.page.locator(".scroll").evaluate_all(
        "all => all.filter(one => getComputedStyle(one).overflowX !== 'visible').length")
    assert clipped == 0 and not actual.page.locator("input").first.is_visible()
    dark = actual.page.locator("img").first.evaluate(IS_DARK)
    assert not dark  # dark figures waste ink
    pdf = actual.page.pdf(format="A4")
    assert pdf.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 4
    actual.context.close()

# --- the first look ------------------------------------------------------------------------------------------------


def test_the_first_look_comes_before_any_number_side_by_side(opened):
    parts = opened.page.locator(".first > div")
    assert parts.locator("h2").all_inner_texts() == ["A question, before and after", "Training", "Did it work?"]
    boxes = [part.bounding_box() for part in parts.all()]
    assert len({box["y"] for box in boxes}) == 1 and [box["x"] for box in boxes] == sorted(box["x"] for box in boxes)
    assert boxes[0]["y"] < opened.page.locator(".verdict").first.bounding_box()["y"]
    assert parts.nth(0).locator("b").all_inner_texts() == ["Before: SFT", "After: PPO"]
    assert parts.nth(0).get_by_role("link", name="beer, question").count() == 1
    assert parts.nth(1).locator("img").count() == 2
    policies = opened.column(parts.nth(2).locator("table"), 0)
    assert policies[-1] == "PPO at temperature 0.3" and any("best-of-4" in name for name in policies)


def test_the_title_has_run_day_and_commit(opened):
    assert re.search(r"\(.+, \d{4}-\d\d-\d\d, commit unknown\)$", opened.page.title())


def test_five_cards_are_open_and_a_click_opens_another(opened):
    cards = opened.page.locator(f"{CARDS} details")
    assert [card.get_attribute("open") is not None for card in cards.all()] == [True] * 5 + [False] * 2
    answer = cards.nth(6).locator(".answer").first
    assert not answer.is_visible()
    cards.nth(6).locator("summary").click()
    assert answer.is_visible() and answer.locator("p").first.inner_text() == "SFT at best reward 0.90, gold 2.50"


def test_a_link_to_a_folded_section_opens_it(opened):
    section = opened.page.locator("section:has(h2:text-is('Recipe'))")
    assert not section.locator("table").first.is_visible()
    opened.page.locator("nav a", has_text="Recipe").click()
    assert section.locator("table").first.is_visible()


def test_the_verdict_is_short(opened):
    """Three bullets of at most two numbers each; the paragraphs are folded."""
    bullets = opened.page.locator(".verdict:not(.run) li").all_inner_texts()
    assert len(bullets) == 3
    assert all(len(re.findall(r"\d[\d,.]*", bullet)) <= 2 for bullet in bullets), bullets
    assert not opened.page.get_by_text("It cost a KL of").is_visible()


def test_markdown_of_posts_is_rendered(chromium, tmp_path, monkeypatch):
    finished_run.draw_dots(monkeypatch)
    folders = finished_run.artifacts(tmp_path)
    write(folders, metrics(), [sample(1, "**bold** and `code`\n\n- one\n- two")])
    page_of(folders, tmp_path)
    actual = Opened(chromium, tmp_path / "out" / "report.html")
    answer = actual.page.locator(f"{CARDS} .answer").first
    assert [answer.locator(name).count() for name in (".post strong", ".post code", ".post li")] == [1, 1, 2]
    actual.context.close()


@pytest.mark.parametrize("width", [1280, 1024])
def test_nothing_is_cut_on_a_desk(chromium, file, width):
    actual = Opened(chromium, file, viewport={"width": width, "height": 900})
    actual.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert actual.page.locator(".scroll").evaluate_all(CUT) == []
    actual.context.close()


def test_the_page_that_compares_runs_is_not_cut_on_a_desk(chromium, tmp_path):
    """The meaning of a setting stands beside values of any length."""
    for name, template in (("a", "Question: {question}" * 9), ("b", "x" * 90)):
        (tmp_path / name).mkdir()
        finished_run.artifacts(tmp_path / name)
        (tmp_path / name / "recipe.yaml").write_text(json.dumps({"ppo": {"rewards": [{"template": template}]}}))
        manifest = json.loads((tmp_path / name / "ppo/manifest.json").read_text())
        manifest["config"]["rewards"] = [{"source": "model", "template": template}]
        (tmp_path / name / "ppo/manifest.json").write_text(json.dumps(manifest))
    compare.main([str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "compare.html")])
    actual = Opened(chromium, tmp_path / "compare.html", viewport={"width": 1280, "height": 900})
    assert "reward functions whose weighted sum" in actual.page.locator(".recipe").inner_text()
    assert actual.page.locator(".scroll").evaluate_all(CUT) == []
    actual.context.close()


def test_the_page_of_exports_is_not_cut_on_a_desk(chromium, tmp_path):
    numbers = {"posts": 1000, "answers": 50, "other_answers": 11, "mean_nats": 0.00034, "most_nats": 0.0021,
               "judge": "reward-merged", "reward": -4.111, "reward_of_folder": -4.239}
    tensors = {kind: {"count": 128, "largest_error": 0.546} for kind in ("Q8_0", "Q4_1", "F32")}
    report = {"type": "Q4_1", "bytes": 716_083, "pre_tokenizer": "llama-bpe", "tensors": tensors, "llama_cpp": numbers}
    out = tmp_path / "ppo-of-a-long-name.q4_1.gguf"
    (tmp_path / "gguf.html").write_text(export_gguf.render_exports(out, report))
    actual = Opened(chromium, tmp_path / "gguf.html", viewport={"width": 1280, "height": 900})
    assert actual.page.locator(".scroll").evaluate_all(CUT) == []
    actual.context.close()


# --- size and time --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seven_sites(tmp_path_factory) -> Path:
    """The report of a run with as much to show as seven real sites give: every figure, long posts, sites, 20 tags."""
    place = tmp_path_factory.mktemp("seven")
    folders = finished_run.artifacts(place)
    numbers = metrics(gold=None)
    for kind, count in (("by_site", 7), ("by_tag", 20)):
        numbers["reward_model"][kind] = {f"{kind}-{at}.stackexchange.com": around(0.6) for at in range(count)}
    text = "A long & <careful> answer.\n" * 250
    write(folders, finished_run.with_summary(numbers), [sample(at, text) for at in range(128)])
    trained = folders | folders["policy"]
    for stage, curves in CURVES.items():
        if stage not in trained:  # a run with a gold score has no judge
            continue
        keys = [key for curve in curves for key in curve.lines.values()]
        history = [json.dumps({"step": at, "iteration": at} | dict.fromkeys(keys, at % 7)) for at in range(200)]
        (trained[stage] / "history.jsonl").write_text("\n".join(history))
    page_of(folders, place, evaluate.Report())
    return place / "out" / "report.html"


def test_the_report_of_seven_sites_is_small_and_opens_at_once(chromium, seven_sites):
    page = seven_sites.read_text(encoding="utf-8")
    assert page.count("<img") >= 24 and page.count('class="post"') == 40 * 6 + 3 * 4 + 3
    assert len(page.encode()) < 10_000_000
    seconds = []
    for _ in range(3):
        start = time.monotonic()
        actual = Opened(chromium, seven_sites)
        seconds.append(time.monotonic() - start)
        actual.context.close()
    assert statistics.median(seconds) < 5  # 0.2 on a quiet machine, 2 with five other busy processes on two cores


@pytest.mark.parametrize("width", [1280, 1160, 1060])
def test_the_first_table_is_not_cut_on_a_desk(chromium, file, width):
    actual = Opened(chromium, file, viewport={"width": width, "height": 900})
    cells = "<td>-0.94 <small>[-1.01, -0.86]</small></td><td>+0.49 <small>[+0.41, +0.56]</small></td><td>1</td>"
    row = f'<tr><th scope="row"><strong>PPO at temperature 0.7</strong></th>{cells}</tr>'
    actual.page.locator(".first tbody").evaluate("(body, row) => body.innerHTML = row", row)  # as wide as they get
    table = actual.page.locator(".first .scroll")
    assert table.count() == 1 and table.evaluate_all(CUT) == []
    actual.context.close()


@pytest.mark.parametrize("viewport", [{"width": 1280, "height": 900}, PHONE])
def test_what_is_long_is_folded(chromium, seven_sites, viewport):
    """With as many answers as a real run: less than a quarter of what all of it takes."""
    actual = Opened(chromium, seven_sites, viewport=viewport)
    folded = actual.page.evaluate("document.documentElement.scrollHeight")
    actual.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert folded < actual.page.evaluate("document.documentElement.scrollHeight") / 4
    actual.context.close()
