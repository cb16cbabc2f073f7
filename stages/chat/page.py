"""The page itself, in Gradio: where things stand, and which click calls what."""

from pathlib import Path
from typing import NamedTuple

import gradio as gr

from stages.chat import views
from stages.chat.controller import ChatController

STYLE = Path(__file__).with_name("style.css")
FONTS = ("system-ui", "sans-serif"), ("ui-monospace", "monospace")  # of the reader's machine: none is fetched
PANELS = 3
MOST_TOKENS, MOST_SAMPLES, MOST_TEMPERATURE = 512, 16, 2  # of the sliders; a run's own values fit on them, too
ONE_AT_A_TIME = {"concurrency_limit": 1, "concurrency_id": "models", "show_progress": "hidden",
                 "api_visibility": "private"}
AT_ONCE = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


class Asking(NamedTuple):
    """Components that say what is asked, and how."""

    question: gr.Textbox
    temperature: gr.Slider
    most_tokens: gr.Slider
    samples: gr.Slider


def page(talk: ChatController, title: str, defaults: dict) -> gr.Blocks:
    """The whole page; defaults: temperature and most_tokens to begin with."""
    with gr.Blocks(title=title, analytics_enabled=False, fill_width=True) as blocks:
        gr.HTML(views.heading(title))
        asking = _asking(talk, defaults)
        with gr.Tabs():
            with gr.Tab("Side by side", id="side"):
                _side_by_side(talk, asking)
            with gr.Tab("Blind", id="blind") as blind:
                _blind(talk, asking, blind)
        _forget_closed_pages(talk, blocks)
    return blocks.queue(max_size=32, api_open=False)


def serve(blocks: gr.Blocks, host: str, port: int | None, wait: bool = True) -> str:
    """Serve the page, until Ctrl-C unless wait is False; its address. OSError where the port is taken."""
    theme = gr.themes.Base(font=FONTS[0], font_mono=FONTS[1], primary_hue="blue", neutral_hue="slate")
    _, address, _ = blocks.launch(
        server_name=host, server_port=port, share=False, theme=theme, css_paths=STYLE, footer_links=[], quiet=True,
        ssr_mode=False, enable_monitoring=False, pwa=False, mcp_server=False, prevent_thread_lock=True)
    if wait:
        print(f"demo: {address} (Ctrl-C ends it)", flush=True)
        blocks.block_thread()
    return address


def _asking(talk: ChatController, defaults: dict) -> Asking:
    titles = [(title, number) for number, title in enumerate(talk.titles())]
    with gr.Row(elem_id="picking"):
        picked = gr.Dropdown(titles, value=None, label="Held-out questions: type to search", scale=5, min_width=280,
                             elem_id="picked")
        draw = gr.Button("Random question", scale=1, min_width=160, elem_id="random")
    question = gr.Textbox(label="Question", lines=3, max_lines=12, elem_id="question",
                          placeholder="Type a question, or pick one above.")
    most_tokens = max(1, min(max(MOST_TOKENS, defaults["most_tokens"]), talk.speakers.longest - 1))
    with gr.Row():
        asking = Asking(
            question,
            gr.Slider(0, max(MOST_TEMPERATURE, defaults["temperature"]), defaults["temperature"], step=0.05,
                      label="Temperature (0: greedy)", min_width=220, elem_id="temperature"),
            gr.Slider(1, most_tokens, min(defaults["most_tokens"], most_tokens), step=1,
                      label="Longest answer, tokens", min_width=220, elem_id="length"),
            gr.Slider(2, MOST_SAMPLES, 4, step=1, label="n of best-of-n", min_width=220, elem_id="samples"))
    with gr.Accordion("Best human answer", open=False):
        human = gr.HTML(talk.human(""), elem_id="human")
    picked.input(talk.question, picked, question, **AT_ONCE)
    draw.click(lambda: (number := talk.random(), talk.question(number)), None, [picked, question], **AT_ONCE)
    question.change(talk.human, question, human, trigger_mode="always_last", **AT_ONCE)
    return asking


def _buttons(talk: ChatController, name: str) -> gr.Button:
    """To ask, which is given back, and to stop."""
    with gr.Row():
        ask = gr.Button("Ask", variant="primary", scale=4, min_width=140, elem_id=f"ask-{name}")
        stop = gr.Button("Stop", scale=1, min_width=100, elem_id=f"stop-{name}")

    def stopped(request: gr.Request) -> None:
        talk.stop(request.session_hash)

    stop.click(stopped, None, None, **AT_ONCE)
    return ask


def _forget_closed_pages(talk: ChatController, blocks: gr.Blocks) -> None:
    def forget(request: gr.Request) -> None:
        talk.sessions.forget(request.session_hash)

    blocks.unload(forget)


def _side_by_side(talk: ChatController, asking: Asking) -> None:
    ask, notice = _buttons(talk, "side"), gr.HTML(elem_id="notice")
    names, panels = [], []
    with gr.Row():
        for place in range(PANELS):
            with gr.Column(min_width=300, elem_classes=["voice"]):
                known = _starting(talk, place)
                names.append(gr.Dropdown(talk.speakers.names, value=known, show_label=False, container=False,
                                         label=f"Model of panel {place + 1}", elem_id=f"model-{place}"))
                panels.append(gr.HTML(views.waiting("No question yet."), elem_id=f"panel-{place}"))
    gr.HTML(views.legend(talk.speakers.reference))

    def begin(request: gr.Request):
        return ["", *[talk.begin(request.session_hash)] * PANELS]

    def answer(request: gr.Request, question, temperature, most_tokens, samples, *chosen):
        how = _how(temperature, most_tokens, samples)
        yield from map(list, talk.side_by_side(request.session_hash, question, how, list(chosen)))

    outputs = [notice, *panels]
    ask.click(begin, None, outputs, **AT_ONCE).then(
        answer, [*asking, *names], outputs, **ONE_AT_A_TIME)


def _blind(talk: ChatController, asking: Asking, tab: gr.Tab) -> None:
    gr.Markdown("Two answers, in random order, without their writers' names: which is better? Votes are kept as "
                "preference pairs, from which `python -m stages.reward` can train the next reward model.")
    with gr.Row():
        names = [gr.Dropdown(talk.speakers.names, value=_starting(talk, place), label=label, elem_id=f"between-{place}")
                 for place, label in enumerate(("Between", "and"))]
    ask, notice = _buttons(talk, "blind"), gr.HTML(elem_id="blind-notice")
    panels, lines = [], []
    with gr.Row():
        for letter in "AB":
            with gr.Column(min_width=300, elem_classes=["voice"]):
                gr.Markdown(f"### Answer {letter}")
                panels.append(gr.HTML(views.waiting("No question yet."), elem_id=f"blind-{letter}"))
                lines.append(gr.HTML(elem_id=f"who-{letter}"))
    with gr.Row():
        choices = [gr.Button(words, interactive=False, elem_id=f"vote-{words[0]}")
                   for words in ("A is better", "Tie, or both bad", "B is better")]
    tally = gr.HTML(elem_id="tally")
    _blind_events(talk, asking, names, ask, (notice, panels, lines, choices, tally))
    gr.on([tab.select, *(name.change for name in names)], lambda n, *chosen: talk.tally(list(chosen), int(n)),
          [asking.samples, *names], tally, **AT_ONCE)


def _blind_events(talk: ChatController, asking: Asking, names: list, ask: gr.Button, shown: tuple) -> None:
    notice, panels, lines, choices, tally = shown

    def usable(whether: bool) -> list:
        return [gr.update(interactive=whether)] * len(choices)

    def begin(request: gr.Request):
        talk.sessions.take_duel(request.session_hash)
        return ["", *[talk.begin(request.session_hash)] * 2, "", "", *usable(False)]

    def answer(request: gr.Request, question, temperature, most_tokens, samples, *chosen):
        how = _how(temperature, most_tokens, samples)
        for said, a, b, open_ in talk.blind(request.session_hash, question, how, list(chosen)):
            yield [said, a, b, *usable(open_)]

    def vote(choice: int | None):
        def voted(request: gr.Request, samples, *chosen):
            verdict = talk.vote(request.session_hash, choice)
            return [verdict.notice, *verdict.lines, *usable(verdict.open), talk.tally(list(chosen), int(samples))]
        return voted

    ask.click(begin, None, [notice, *panels, *lines, *choices], **AT_ONCE).then(
        answer, [*asking, *names], [notice, *panels, *choices], **ONE_AT_A_TIME)
    for button, choice in zip(choices, (0, None, 1), strict=True):
        button.click(vote(choice), [asking.samples, *names], [notice, *lines, *choices, tally], **AT_ONCE)


def _how(temperature: float, most_tokens: float, samples: float) -> dict:
    return {"temperature": float(temperature), "most_tokens": int(most_tokens), "samples": int(samples)}


def _starting(talk: ChatController, place: int) -> str:
    """SFT, PPO and best-of-n, however many models there are."""
    first, *others, best = talk.speakers.names
    return [first, *others[:1], best][min(place, 1 + len(others[:1]))]
