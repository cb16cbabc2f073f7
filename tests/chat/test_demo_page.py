"""The demo page in headless Chromium: it answers, streams, switches models, records a vote, and shows text as text.

Every page that a test opens is watched: no request leaves this machine or fails, nothing is written to the console as
an error, no dialog opens. The server's own connections are watched as well.
"""

import re
import shutil
import socket
import time
from urllib.parse import urlsplit

import pyarrow.parquet as pq
import pytest
import torch
from bs4 import BeautifulSoup

from tests.helpers import demo_run

gradio = pytest.importorskip("gradio", reason="the page needs gradio: make extras")
playwright = pytest.importorskip("playwright.sync_api", reason="a browser is driven by playwright: make extras")

from stages import demo  # noqa: E402
from stages.chat import page as chat_page  # noqa: E402
from stages.chat.streaming import ChatModels  # noqa: E402
from stages.chat.votes import Votes  # noqa: E402
from stages.generation.sampler import sample  # noqa: E402
from stages.render.markdown_html import render_markdown  # noqa: E402
from stages.runtime.files import write_json  # noqa: E402
from stages.stackexchange.prompt import prompt_ids  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = '<script>alert(1)</script> "quoted" & \'it\' ${alert(2)} {{alert(3)}} <img src=x onerror=alert(4)> שלום عربي'
MARKDOWN = """Use **this**:

```
ls <folder>
```

See [the page](https://a.example/x), [not this](javascript:alert(5)) and ![a cat](https://evil.example/cat.png).
<img src=https://evil.example/pixel.png onerror=alert(6)>"""
PAIRS = {"sites": {EVIL: {"questions": 900}, "demo.stackexchange.com": {"questions": 100}},
         "questions_by_split": {"evaluation": 50}}
BASE = {"stage": "base", "config": {"model": "scratch"}, "metrics": {"parameters": 990_976}}
DEFAULTS = {"temperature": 1.0, "most_tokens": 40}
SECONDS = 20_000  # in milliseconds: how long anything may take
HERE = {"127.0.0.1", "localhost", "::1"}


@pytest.fixture(scope="module")
def connections():
    """Addresses that this process, the server, has connected to."""
    actual, connect = [], socket.socket.connect

    def noted(self, address):
        actual.append(address)
        return connect(self, address)

    socket.socket.connect = noted
    yield actual
    socket.socket.connect = connect
    assert all(isinstance(address, str) or address[0] in HERE for address in actual), actual


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = demo_run.save_run(tmp_path_factory.mktemp("runs") / "tiny", EVIL, EVIL)
    write_json(run / "pairs/manifest.json", {"stage": "pairs", "metrics": PAIRS})
    (run / "base").mkdir()
    write_json(run / "base/manifest.json", BASE)
    return run


@pytest.fixture(scope="module")
def chat(run):
    return chat_page.ChatPage(ChatModels(run, [("other", run / "other")]), run / "pairs", Votes(run / "votes"))


@pytest.fixture(scope="module")
def address(chat, run, connections):
    """The page is served as stages.demo does, and with a proxy that must not be asked."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"HTTP_PROXY": "http://127.0.0.1:9", **demo.OFFLINE_ENVIRONMENT}.items():
            patched.setenv(name, value)
        patched.setattr(chat_page, "EXAMPLES", len(chat.questions))  # the hostile one is the last
        blocks = chat_page.build_page(chat, run, DEFAULTS)
        yield chat_page.serve_page(blocks, "127.0.0.1", None, wait=False)
        blocks.close(verbose=False)


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser, address):
    """A page of its own for each test; what must never happen is looked for when it is closed."""
    page, faults = browser.new_page(), []
    page.set_default_timeout(SECONDS)
    page.on("request", lambda request: faults.append(request.url) if _leaves(request.url) else None)
    page.on("response", lambda answer: faults.append(f"{answer.status} {answer.url}") if answer.status >= 400 else None)
    page.on("requestfailed", lambda request: faults.append(f"{request.failure} {request.url}")
            if not _is_closed_stream(request) else None)
    page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: (faults.append(dialog.message), dialog.dismiss()))
    page.goto(address)
    page.wait_for_selector("#ask")
    yield page
    page.close()
    assert not faults


def _leaves(url: str) -> bool:
    return urlsplit(url).scheme in ("http", "https", "ws", "wss") and urlsplit(url).hostname not in HERE


def _is_closed_stream(request) -> bool:
    """Gradio's client closes the stream of events itself, once it has all of them."""
    return "/queue/data" in request.url and "ERR_ABORTED" in request.failure


def choose(page, menu: str, name: str) -> None:
    page.click(f"{menu} input")
    page.get_by_role("option", name=name, exact=True).click()
    page.wait_for_selector("[role=option]", state="detached")


def greedy(page, tokens: int) -> None:
    if not page.is_visible("#temperature"):
        page.click("#settings button")
    set_number(page, "temperature", 0)
    set_number(page, "length", tokens)


def set_number(page, control: str, value: int) -> None:
    """Fill in a number until the slider has it: a page that still loads sets its own values once more."""
    deadline = time.monotonic() + SECONDS / 1000
    while True:
        page.fill(f"#{control} input[type=number]", str(value))
        page.press(f"#{control} input[type=number]", "Tab")
        page.wait_for_timeout(200)
        if page.input_value(f"#{control} input[type=range]") == str(value):
            return
        assert time.monotonic() < deadline, f"the slider of {control} does not take {value}"


def vote_blind(page) -> None:
    page.get_by_label("Blind vote").check()
    page.wait_for_selector("#tally", state="visible")


def ask(page) -> None:
    """Ask, and wait until the answers before it are gone."""
    page.click("#ask")
    page.wait_for_function("!document.querySelector('#panel-0 .numbers')?.textContent.match(/reward[+−]/)")


def finished(page, panel: str) -> str:
    """The text of an answer that is done, without what a cut made of its last character."""
    page.wait_for_function("panel => document.querySelector(`${panel} .numbers`)?.textContent.match(/reward[+−]/)",
                           arg=panel)
    text = page.evaluate("panel => document.querySelector(`${panel} .words`).textContent", panel)
    return text.removesuffix(" … cut off").rstrip("\ufffd")


def expected(chat, name: str, question: str, tokens: int) -> str:
    prompts = [prompt_ids(chat.models.tokenizer, question)]
    rollout = sample(chat.models.policies[name], prompts, max_new_tokens=tokens, temperature=0, stop_ids=[2],
                     generator=torch.Generator())
    return shown_text(rollout.decode(chat.models.tokenizer)[0].rstrip("\ufffd"))


def shown_text(text: str) -> str:
    """As HTML holds it: control characters as their signs."""
    return re.sub(r"[\x00-\x08\x0b-\x1f]", lambda sign: chr(0x2400 + ord(sign[0])), text).replace("\x7f", "\u2421")


def test_a_runs_own_length_and_temperature_fit_on_the_controls(chat, run, monkeypatch):
    from stages.chat import page as chat_page
    monkeypatch.setattr(chat.models, "max_positions", 4096)
    for given in ({"temperature": 2.5, "most_tokens": 1024}, {"temperature": 0.5, "most_tokens": 4}):
        blocks = chat_page.build_page(chat, run, given)
        sliders = {block.elem_id: block for block in blocks.blocks.values() if isinstance(block, gradio.Slider)}
        actual = {name: sliders[name].preprocess(sliders[name].value) for name in ("temperature", "length")}
        assert actual == {"temperature": given["temperature"], "length": given["most_tokens"]}


def test_it_answers_streams_and_switches_models(opened, chat, monkeypatch):
    monkeypatch.setattr(chat_page, "SHOW_EVERY_SECONDS", 0.02)
    opened.evaluate("""() => { window.seen = []; new MutationObserver(() => window.seen.push(
        document.querySelector("#panel-0 .answer")?.textContent.length ?? 0)).observe(
        document.querySelector("#panel-0"), {childList: true, subtree: true, characterData: true}); }""")
    greedy(opened, 120)
    opened.click("#next")
    opened.wait_for_function("document.querySelector('#question textarea').value")
    question = opened.input_value("#question textarea")
    assert question.strip() in chat.rows
    answers = [finished(opened, f"#panel-{place}") for place in range(3)]
    assert answers[:2] == [expected(chat, name, question, 120) for name in ("SFT", "PPO")]
    lengths = [n for n, after in zip(*(opened.evaluate("window.seen")[i:] for i in (0, 1)), strict=False) if n < after]
    assert len(lengths) >= 3, "it grew before the reader's eyes"
    numbers = opened.text_content("#panel-1 .numbers")
    assert re.search(r"reward[+−]\d", numbers) and re.search(r"KL to SFT, nats[+−]\d", numbers)
    assert re.search(r"tokens a second\d", numbers) and "Rewards of all 4" in opened.text_content("#panel-2")
    coloured = opened.locator("#panel-1 .more, #panel-1 .less")
    assert coloured.count() > 5 and "nats to SFT" in coloured.first.get_attribute("title")
    assert not opened.locator("#panel-0 .more, #panel-0 .less").count(), "SFT is as likely as itself"
    choose(opened, "#model-0", "other")
    ask(opened)
    assert finished(opened, "#panel-0") == expected(chat, "other", question, 120) != answers[0]


def test_a_blind_vote_is_recorded(opened, chat):
    vote_blind(opened)
    assert not opened.is_visible("#panel-2") and not opened.is_visible("#model-2")
    choose(opened, "#model-1", "other")
    opened.fill("#question textarea", "which port")
    assert opened.is_disabled("#vote-A")
    opened.click("#ask")
    opened.wait_for_selector("#vote-B:not([disabled])")
    blind = "".join(opened.inner_html(part) for part in ("#panel-0", "#panel-1"))
    assert not any(word in blind for word in ("SFT", "other", "nats", "reward", "--w"))
    shown = [opened.text_content(f"#panel-{index} .answer") for index in (0, 1)]
    opened.click("#vote-B")
    opened.wait_for_selector("#panel-1 .revealed")
    [vote] = pq.read_table(chat.votes.folder / "reward").to_pylist()
    rendered = [BeautifulSoup(render_markdown(vote[side]), "lxml").text for side in ("response_k", "response_j")]
    assert rendered == shown
    revealed = [opened.text_content(f"#panel-{index} .revealed") for index in (0, 1)]
    assert revealed == [f"{vote['authors'][2]}: not chosen", f"{vote['authors'][1]}: chosen"]
    assert vote["question"] == "which port" and "Saved in" in opened.text_content(".toast-body")
    assert "1 vote on 1 question" in opened.text_content("#tally") and opened.is_disabled("#vote-A")


def test_hostile_text_is_text(opened, chat, monkeypatch):
    """In a held-out post, in the menu, in a person's question and in what a model writes."""
    monkeypatch.setattr(chat.models, "_decode", lambda tokens: (EVIL * 100)[:len(tokens)])
    opened.click("#picked input")
    opened.get_by_role("option", name=EVIL, exact=True).click()
    opened.wait_for_function("document.querySelector('#question textarea').value")
    assert opened.input_value("#question textarea") == EVIL
    opened.get_by_role("button", name="Best human answer").click()
    opened.wait_for_function("document.querySelector('#human')?.textContent.includes('alert(4)')")
    assert opened.text_content("#human .answer") == EVIL
    for place in (1, 2):
        choose(opened, f"#model-{place}", "SFT")
    opened.click("#ask")
    answers = [finished(opened, f"#panel-{place}") for place in range(3)]
    assert all(EVIL.startswith(answer[:len(EVIL)]) and answer in EVIL * 100 for answer in answers)
    assert opened.locator("#panel-0 .answer[dir=auto]").count() == 2
    vote_blind(opened)
    opened.click("#ask")
    opened.wait_for_function("document.querySelector('.toast-body')?.textContent.includes('the very same') || "
                             "!document.querySelector('#vote-A').disabled")
    injected = "#human script, #human img, .answer script, .answer img, [role=option] img, [onerror]"
    assert not opened.locator(injected).count()


def test_markdown_and_code_are_rendered(opened, chat, monkeypatch):
    """Nothing of a hostile text runs or is loaded: `opened` notes every dialog and every request that leaves."""
    monkeypatch.setattr(chat.models, "_decode", lambda tokens: MARKDOWN)
    opened.fill("#question textarea", "which port")
    greedy(opened, 8)
    opened.click("#ask")
    finished(opened, "#panel-1")
    shown = opened.locator("#panel-1 .markdown")
    assert shown.locator("strong").text_content() == "this"
    assert shown.locator("pre code").text_content() == "ls <folder>\n"
    links = [(link.text_content(), link.get_attribute("href")) for link in shown.locator("a").all()]
    assert links == [("the page", "https://a.example/x"), ("image: a cat", "https://evil.example/cat.png")]
    assert "not this" in shown.text_content() and "<img src=" in shown.text_content()
    assert not opened.locator("#panel-1 img, #panel-1 script").count()
    assert shown.is_visible() and not opened.is_visible("#panel-1 .words")
    opened.check("#colours input")
    assert opened.is_visible("#panel-1 .words") and not shown.is_visible()
    assert MARKDOWN in opened.text_content("#panel-1 .words")


def test_it_says_what_the_models_know_offers_questions_and_asks_by_enter(opened, chat):
    heading = " ".join(opened.locator("p.lead").all_text_contents())
    assert f"learnt from 950 questions of {EVIL}, demo.stackexchange.com; 50 more were held out" in heading
    assert "twelve invented command-line tools" in heading and "of 990,976 parameters without pretraining" in heading
    examples, question = opened.locator("#examples button"), opened.locator("#question textarea")
    shown = sorted(text.strip().removesuffix("...") for text in examples.all_text_contents())  # Gradio cuts long ones
    assert all(map(str.startswith, sorted(chat.titles), shown)) and len(shown) == len(chat.titles)
    greedy(opened, 8)
    opened.get_by_role("button", name=EVIL[:40]).click()
    opened.wait_for_function("document.querySelector('#question textarea').value")
    assert question.input_value() == EVIL and not opened.locator("#examples img").count()
    question.fill("a")
    question.press("Shift+Enter")
    opened.keyboard.type("nbt")
    assert question.input_value() == "a\nnbt" and "No question yet." in opened.text_content("#panel-0")
    question.press("Enter")
    assert finished(opened, "#panel-0") == expected(chat, "SFT", "a\nnbt", 8)
    assert question.input_value() == "a\nnbt"


def test_keys_vote_and_go_on_to_the_next_question(opened, chat):
    def count_votes() -> tuple[int, int]:
        return tuple(len(list((chat.votes.folder / kind).glob("*.parquet"))) for kind in ("reward", "ties"))

    def wait_for_answers() -> str:
        opened.wait_for_selector("#vote-A:not([disabled])")
        return opened.input_value("#question textarea")

    vote_blind(opened)
    pairs, ties = count_votes()
    opened.click("#question textarea")
    opened.keyboard.type("atnb")  # text, not votes
    opened.keyboard.press("Enter")
    assert wait_for_answers() == "atnb" and count_votes() == (pairs, ties)
    opened.keyboard.press("Control+b")
    opened.keyboard.press("b")
    opened.wait_for_selector("#panel-1 .revealed")
    assert "chosen" in opened.text_content("#panel-1") and count_votes() == (pairs + 1, ties)
    opened.keyboard.press("b")
    opened.keyboard.press("n")
    opened.wait_for_function("document.querySelector('#question textarea').value != 'atnb'")
    assert wait_for_answers().strip() in chat.rows
    opened.focus("#question textarea")
    opened.keyboard.press("Escape")
    opened.keyboard.press("t")
    opened.wait_for_selector("#panel-0 .revealed")
    assert "tie" in opened.text_content("#panel-0") and count_votes() == (pairs + 1, ties + 1)


def test_two_clicks_are_one_vote(opened, chat):
    vote_blind(opened)
    opened.fill("#question textarea", "which port")
    opened.click("#ask")
    opened.wait_for_selector("#vote-A:not([disabled])")
    before = len(list(chat.votes.folder.glob("*/*.parquet")))
    opened.evaluate("['#vote-A', '#vote-B', '#vote-A'].forEach(name => document.querySelector(name).click())")
    opened.wait_for_selector("#panel-0 .revealed")
    opened.wait_for_timeout(500)
    assert len(list(chat.votes.folder.glob("*/*.parquet"))) == before + 1


def test_it_refuses_a_question_that_is_too_long(opened):
    opened.fill("#question textarea", "port " * 400)
    opened.click("#ask")
    opened.wait_for_selector(".toast-body")
    assert re.search(r"The question has [\d,]+ tokens, .* shorten it\.\s*$", opened.text_content(".toast-body"))


def test_it_stops_when_asked_to_and_lets_another_page_wait(opened, browser, chat, monkeypatch):
    stream = chat.models.stream

    def slow(*given):
        for answer in stream(*given):
            time.sleep(0.02)
            yield answer

    monkeypatch.setattr(chat.models, "stream", slow)
    opened.fill("#question textarea", "which port")
    opened.click("#settings button")
    set_number(opened, "length", 200)
    opened.click("#ask")
    opened.wait_for_selector("#panel-0 .markdown")
    second = browser.new_page()
    second.goto(opened.url)
    second.fill("#question textarea", "which port")
    greedy(second, 5)
    second.click("#ask")
    second.wait_for_function("document.querySelector('#panel-0').textContent.includes('Waiting')")
    opened.click("#stop")
    finished(second, "#panel-0")
    second.close()
    shown = opened.text_content("#panel-0")
    assert "reward…" in re.sub(r"\s", "", shown) and "cut off" not in shown
    opened.wait_for_timeout(300)
    assert opened.text_content("#panel-0") == shown, "it writes no more"
    opened.click("#ask")
    opened.wait_for_selector("#panel-0 .markdown")
    opened.fill("#question textarea", "which flag")
    greedy(opened, 5)
    ask(opened)  # stops the answer that is being written
    assert finished(opened, "#panel-0") == expected(chat, "SFT", "which flag", 5)


def test_a_phone_shows_the_button_that_asks_at_once_and_the_settings_on_a_click(browser, address):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(address)
    asking = page.wait_for_selector("#ask").bounding_box()
    assert asking["y"] + asking["height"] <= 844
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert not page.locator("#temperature").is_visible()
    page.click("#settings button")
    page.wait_for_selector("#temperature")
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_on_a_colour_can_be_read(browser, address, scheme):
    """The strongest colours under the theme's text: a contrast of 4.5 at least (WCAG 2, AA)."""
    page = browser.new_page(color_scheme=scheme)
    page.goto(address)
    page.wait_for_selector("#ask")
    for kind in ("more", "less"):
        ink, ground = page.evaluate("""kind => {
            const panel = document.querySelector("#panel-0 .prose");
            panel.innerHTML = `<div class="answer"><span class="${kind}" style="--w:60%">word</span></div>`;
            const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
            const word = getComputedStyle(panel.querySelector("span"));
            const pixel = () => [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
            const paint = colour => { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); };
            paint(getComputedStyle(document.body).backgroundColor); paint(word.backgroundColor);
            const ground = pixel();
            paint(word.color);
            return [pixel(), ground]; }""", kind)
        assert contrast(ink, ground) >= 4.5, (kind, ink, ground)
    page.close()


def contrast(one: list[int], other: list[int]) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(rgb: list[int]) -> float:
    shares = [value / 255 for value in rgb]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
