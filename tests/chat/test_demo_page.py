"""The demo page in headless Chromium: it answers, streams, switches models, records a vote, and shows text as text.

Every page that a test opens is watched: no request leaves this machine or fails, nothing is written to the console as
an error, no dialog opens. The server's own connections are watched as well.
"""

import json
import logging
import re
import shutil
import socket
import sys
import time
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pyarrow.parquet as pq
import pytest
import torch
from bs4 import BeautifulSoup

from tests.helpers import demo_run

gradio = pytest.importorskip("gradio", reason="the page needs gradio: make extras")
playwright = pytest.importorskip("playwright.sync_api", reason="a browser is driven by playwright: make extras")

from stages import demo  # noqa: E402
from stages.chat import controller as controller_module  # noqa: E402
from stages.chat import refused_requests  # noqa: E402
from stages.chat.load import load_controller  # noqa: E402
from stages.chat.model_background import ModelBackground  # noqa: E402
from stages.chat.token_text import StreamingDecoder, TextPiece  # noqa: E402
from stages.generation.sampler import sample  # noqa: E402
from stages.render.markdown_html import render_markdown  # noqa: E402
from stages.stackexchange.prompt import prompt_ids  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = '<script>alert(1)</script> "quoted" & \'it\' ${alert(2)} {{alert(3)}} <img src=x onerror=alert(4)> שלום عربي'
MARKDOWN = """Use **this**:

```
ls <folder>
```

See [the page](https://a.example/x), [not this](javascript:alert(5)) and ![a cat](https://evil.example/cat.png).
<img src=https://evil.example/pixel.png onerror=alert(6)>"""
FACTS = ModelBackground({EVIL: 900, "demo.stackexchange.com": 100}, 50, "scratch", 990_976)
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
def controller(tmp_path_factory):
    run = demo_run.save_run(tmp_path_factory.mktemp("runs") / "tiny", EVIL, EVIL)
    return load_controller(run, [("other", run / "other")], run / "votes", "fp32", "off")


@pytest.fixture(scope="module")
def address(controller, connections):
    """The page is served as stages.demo does, and with a proxy that must not be asked."""
    from stages.chat import page as chat_page
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"HTTP_PROXY": "http://127.0.0.1:9", **demo.OFFLINE_ENVIRONMENT}.items():
            patched.setenv(name, value)
        patched.setattr(controller_module, "EXAMPLES", len(controller.questions))  # the hostile one is the last
        defaults = {"temperature": 1.0, "most_tokens": 40}
        blocks = chat_page.build_page(controller, "Talking to a tiny run", FACTS, defaults)
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
    page.wait_for_selector("#ask-side")
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
    for control, value in (("temperature", 0), ("length", tokens)):
        page.fill(f"#{control} input[type=number]", str(value))
        page.press(f"#{control} input[type=number]", "Tab")


def finished(page, panel: str) -> str:
    """The text of an answer that is done, without what a cut made of its last character."""
    page.wait_for_selector(f"{panel} .words .end", state="attached")
    text = page.evaluate("""panel => { const answer = document.querySelector(`${panel} .words`).cloneNode(true);
        answer.querySelectorAll(".end").forEach(e => e.remove()); return answer.textContent; }""", panel)
    return text.rstrip("\ufffd")


def expected(controller, name: str, question: str, tokens: int) -> str:
    prompts = [prompt_ids(controller.models.tokenizer, question)]
    rollout = sample(controller.models.policies[name], prompts, max_new_tokens=tokens, temperature=0, stop_ids=[2],
                     generator=torch.Generator())
    return shown_text(rollout.decode(controller.models.tokenizer)[0].rstrip("\ufffd"))


def shown_text(text: str) -> str:
    """As HTML holds it: control characters as their signs."""
    return re.sub(r"[\x00-\x08\x0b-\x1f]", lambda sign: chr(0x2400 + ord(sign[0])), text).replace("\x7f", "\u2421")


def test_a_runs_own_length_and_temperature_fit_on_the_controls(controller, monkeypatch):
    from stages.chat import page as chat_page
    monkeypatch.setattr(controller.models, "max_positions", 4096)
    for given in ({"temperature": 2.5, "most_tokens": 1024}, {"temperature": 0.5, "most_tokens": 4}):
        blocks = chat_page.build_page(controller, "A run", ModelBackground(), given)
        sliders = {block.elem_id: block for block in blocks.blocks.values() if isinstance(block, gradio.Slider)}
        actual = {name: sliders[name].preprocess(sliders[name].value) for name in ("temperature", "length")}
        assert actual == {"temperature": given["temperature"], "length": given["most_tokens"]}


def test_it_answers_streams_and_switches_models(opened, controller, monkeypatch):
    monkeypatch.setattr(controller_module, "SHOW_EVERY_SECONDS", 0.02)
    opened.evaluate("""() => { window.seen = []; new MutationObserver(() => window.seen.push(
        document.querySelector("#panel-0 .answer")?.textContent.length ?? 0)).observe(
        document.querySelector("#panel-0"), {childList: true, subtree: true, characterData: true}); }""")
    greedy(opened, 120)
    opened.click("#random")
    opened.wait_for_function("document.querySelector('#question textarea').value")
    question = opened.input_value("#question textarea")
    assert question.strip() in controller.rows
    opened.click("#ask-side")
    answers = [finished(opened, f"#panel-{place}") for place in range(3)]
    assert answers[:2] == [expected(controller, name, question, 120) for name in ("SFT", "PPO")]
    lengths = [n for n, after in zip(*(opened.evaluate("window.seen")[i:] for i in (0, 1)), strict=False) if n < after]
    assert len(lengths) >= 3, "it grew before the reader's eyes"
    numbers = opened.text_content("#panel-1 .numbers")
    assert re.search(r"reward[+−]\d", numbers) and re.search(r"KL to SFT, nats[+−]\d", numbers)
    assert re.search(r"tokens a second\d", numbers) and "Rewards of all 4" in opened.text_content("#panel-2")
    coloured = opened.locator("#panel-1 .more, #panel-1 .less")
    assert coloured.count() > 5 and "nats to SFT" in coloured.first.get_attribute("title")
    assert not opened.locator("#panel-0 .more, #panel-0 .less").count(), "SFT is as likely as itself"
    choose(opened, "#model-0", "other")
    opened.click("#ask-side")
    opened.wait_for_function("before => !document.querySelector('#panel-0').textContent.includes(before)",
                             arg=answers[0][:20])
    assert finished(opened, "#panel-0") == expected(controller, "other", question, 120) != answers[0]


def test_a_blind_vote_is_recorded(opened, controller):
    opened.get_by_role("tab", name="Blind").click()
    choose(opened, "#between-1", "other")
    opened.fill("#question textarea", "which port")
    assert opened.is_disabled("#vote-A")
    opened.click("#ask-blind")
    opened.wait_for_selector("#vote-B:not([disabled])")
    blind = "".join(opened.inner_html(part) for part in ("#blind-A", "#blind-B", "#blind-notice"))
    assert not any(word in blind for word in ("SFT", "other", "nats", "reward", "--w"))
    shown = [opened.text_content(f"#blind-{letter} .answer") for letter in "AB"]
    opened.click("#vote-B")
    opened.wait_for_selector("#who-B .revealed")
    [vote] = pq.read_table(controller.votes.folder / "reward").to_pylist()
    rendered = [BeautifulSoup(render_markdown(vote[side]), "lxml").text for side in ("response_k", "response_j")]
    assert rendered == shown
    assert vote["authors"][1] in opened.text_content("#who-B") and vote["question"] == "which port"
    assert "chosen" in opened.text_content("#who-B") and "not chosen" in opened.text_content("#who-A")
    assert "1 vote on 1 question" in opened.text_content("#tally") and opened.is_disabled("#vote-A")


def test_hostile_text_is_text(opened, controller, monkeypatch):
    """In a held-out post, in the menu, in a person's question and in what a model writes."""
    signs = iter(EVIL * 100)
    monkeypatch.setattr(StreamingDecoder, "add",
                        lambda decoder, token, ratio: decoder.pieces.append(TextPiece(next(signs), ratio)))
    opened.click("#picked input")
    opened.get_by_role("option", name=EVIL, exact=True).click()
    opened.wait_for_function("document.querySelector('#question textarea').value")
    assert opened.input_value("#question textarea") == EVIL
    opened.get_by_role("button", name="Best human answer").click()
    opened.wait_for_function("document.querySelector('#human')?.textContent.includes('alert(4)')")
    assert opened.text_content("#human .answer") == EVIL
    for place in (1, 2):
        choose(opened, f"#model-{place}", "SFT")
    opened.click("#ask-side")
    answers = [finished(opened, f"#panel-{place}") for place in range(3)]
    assert sorted("".join(answers)) == sorted((EVIL * 100)[:sum(map(len, answers))]), "all signs, and no others"
    choose(opened, "#model-0", "best of n")  # its tokens come all at once: the text in one piece
    opened.click("#ask-side")
    opened.wait_for_function("document.querySelector('#panel-0').textContent.includes('Rewards of all')")
    assert opened.locator("#panel-0 .answer[dir=auto]").count() == 2
    opened.get_by_role("tab", name="Blind").click()
    opened.click("#ask-blind")
    opened.wait_for_selector("#vote-A:not([disabled])")
    injected = "#human script, #human img, .answer script, .answer img, [role=option] img, [onerror]"
    assert not opened.locator(injected).count()


def test_markdown_and_code_are_rendered(opened, controller, monkeypatch):
    """Nothing of a hostile text runs or is loaded: `opened` notes every dialog and every request that leaves."""
    monkeypatch.setattr(StreamingDecoder, "add", lambda decoder, token, ratio: decoder.pieces.append(
        TextPiece(MARKDOWN if not decoder.pieces else " ", 1.0)))
    opened.fill("#question textarea", "which port")
    greedy(opened, 8)
    opened.click("#ask-side")
    finished(opened, "#panel-1")
    shown = opened.locator("#panel-1 .markdown")
    assert shown.locator("strong").text_content() == "this"
    assert shown.locator("pre code").text_content() == "ls <folder>\n"
    links = [(link.text_content(), link.get_attribute("href")) for link in shown.locator("a").all()]
    assert links == [("the page", "https://a.example/x"), ("image: a cat", "https://evil.example/cat.png")]
    assert "not this" in shown.text_content() and "<img src=" in shown.text_content()
    assert not opened.locator("#panel-1 img, #panel-1 script").count()
    assert shown.is_visible() and not opened.is_visible("#panel-1 .words") and not opened.is_visible("#legend .bar")
    opened.check("#colours input")
    assert opened.is_visible("#panel-1 .words") and not shown.is_visible() and opened.is_visible("#legend .bar")
    assert MARKDOWN in opened.text_content("#panel-1 .words")


def test_it_says_what_the_models_know_offers_questions_and_asks_by_enter(opened, controller):
    heading = " ".join(opened.locator("p.lead").all_text_contents())
    assert f"learnt from 950 questions of {EVIL}, demo.stackexchange.com; 50 more were held out" in heading
    assert "twelve invented command-line tools" in heading and "of 990,976 parameters without pretraining" in heading
    examples, question = opened.locator("#examples button"), opened.locator("#question textarea")
    titles = [controller.question_titles()[index] for index in controller.example_questions()]
    assert [text.strip() for text in examples.all_text_contents()] == titles
    greedy(opened, 8)
    opened.get_by_role("button", name=EVIL).click()
    opened.wait_for_function("document.querySelector('#question textarea').value")
    assert question.input_value() == EVIL and not opened.locator("#examples img").count()
    question.fill("a")
    question.press("Shift+Enter")
    opened.keyboard.type("b")
    question.press("Control+Enter")
    opened.keyboard.type("nbt")
    assert question.input_value() == "a\nb\nnbt" and "No question yet." in opened.text_content("#panel-0")
    question.press("Enter")
    assert finished(opened, "#panel-0") == expected(controller, "SFT", "a\nb\nnbt", 8)
    assert question.input_value() == "a\nb\nnbt"


def test_keys_vote_and_go_on_to_the_next_question(opened, controller):
    def last_vote() -> tuple[int, int]:
        return tuple(len(controller.votes.rows(kind)) for kind in ("reward", "ties"))

    def wait_for_answers() -> str:
        opened.wait_for_selector("#vote-A:not([disabled])")
        return opened.input_value("#question textarea")

    opened.get_by_role("tab", name="Blind").click()
    pairs, ties = last_vote()
    opened.click("#question textarea")
    opened.keyboard.type("atnb")  # text, not votes
    opened.keyboard.press("Enter")
    assert wait_for_answers() == "atnb" and last_vote() == (pairs, ties)
    opened.keyboard.press("Control+b")
    opened.keyboard.press("b")
    opened.wait_for_selector("#who-B .revealed")
    assert "chosen" in opened.text_content("#who-B") and last_vote() == (pairs + 1, ties)
    opened.keyboard.press("b")
    opened.keyboard.press("n")
    opened.wait_for_function("document.querySelector('#question textarea').value != 'atnb'")
    assert wait_for_answers().strip() in controller.rows
    opened.focus("#question textarea")
    opened.keyboard.press("Escape")
    opened.keyboard.press("t")
    opened.wait_for_selector("#who-A .revealed")
    assert "tie" in opened.text_content("#who-A") and last_vote() == (pairs + 1, ties + 1)


def test_it_refuses_a_question_that_is_too_long(opened):
    opened.fill("#question textarea", "port " * 400)
    opened.click("#ask-side")
    opened.wait_for_selector("#notice .notice")
    assert re.search(r"The question has [\d,]+ tokens, .* shorten it\.$", opened.text_content("#notice .notice"))


def test_it_stops_when_told_and_lets_another_page_wait(opened, browser, controller, monkeypatch):
    steps = controller.models._generate

    def slow(*given):
        for record in steps(*given):
            time.sleep(0.02)
            yield record

    monkeypatch.setattr(controller.models, "_generate", slow)
    opened.fill("#question textarea", "which port")
    opened.click("#settings button")
    opened.fill("#length input[type=number]", "200")
    opened.press("#length input[type=number]", "Tab")
    opened.click("#ask-side")
    opened.wait_for_selector("#panel-0 .markdown .caret")
    second = browser.new_page()
    second.goto(opened.url)
    second.fill("#question textarea", "which port")
    second.click("#ask-side")
    second.wait_for_function("document.querySelector('#panel-0').textContent.includes('another question is being')")
    opened.click("#stop-side")
    opened.wait_for_function("!document.querySelector('.caret')")
    assert "–" in opened.text_content("#panel-0 .numbers") and not opened.locator("#panel-0 .end").count()
    finished(second, "#panel-0")
    second.close()


def test_a_phone_shows_the_button_that_asks_at_once_and_the_settings_on_a_click(browser, address):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(address)
    asking = page.wait_for_selector("#ask-side").bounding_box()
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
    page.wait_for_selector("#ask-side")
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


NAN = float("nan")


@pytest.mark.parametrize(("path", "handler", "data"), [
    ("queue/join", "answer", [[]] * 6), ("queue/join", "answer", [None, 1, 8, 2, "SFT", "PPO"]),
    ("queue/join", "answer", ["q", NAN, NAN, 2, "SFT", "PPO"]), ("queue/join", "answer", ["q", 1, 8, 2, [], "PPO"]),
    ("run/predict", "vote", []), ("run/predict", "question_text", [[]]),
    ("run/predict", "best_human_answer", [None]), ("run/predict", "vote", ["x", "SFT", "PPO"])])
def test_a_request_made_by_hand_leaves_no_traceback_in_the_terminal(address, capfd, path, handler, data):
    handlers = json.loads(urlopen(f"{address}config").read())["dependencies"]
    numbers = [row["id"] for row in handlers
               if row["api_name"].startswith(handler) and len(row["inputs"]) in (1, 3, 6)]
    body = {"data": data, "fn_index": numbers[0], "session_hash": "by-hand"}
    request = Request(f"{address}gradio_api/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        urlopen(request, timeout=10).read()
        if path == "queue/join":
            urlopen(f"{address}gradio_api/queue/data?session_hash=by-hand", timeout=10).read()
    except HTTPError as error:
        assert error.code in (400, 403, 404, 500)
    said = capfd.readouterr().err.splitlines()
    assert all(line.startswith("demo: refused a request that the page does not make: ") for line in said)


def test_a_mistake_of_our_own_keeps_its_traceback(capsys):
    ours = controller_module.ChatController.stop
    for faulty, says in ((lambda: ours(None, ""), "Traceback"), (lambda: {}["x"], "demo: refused")):
        try:
            faulty()
        except Exception:
            refused_requests.print_error()
        assert capsys.readouterr().err.startswith(says)


def test_the_servers_log_has_one_line_for_a_request_that_is_refused():
    try:
        raise KeyError(999)
    except KeyError as error:
        record = logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "Exception in %s", ("x",), sys.exc_info())
        assert refused_requests.shorten_record(record) and str(error) in record.getMessage()
    assert record.exc_info is None and record.getMessage().startswith("refused a request")
