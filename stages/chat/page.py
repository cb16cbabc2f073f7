"""Build the demo page with Gradio: layout, and which event calls which method of the controller."""

from pathlib import Path
from typing import NamedTuple

import gradio as gr
from starlette.middleware import Middleware

from stages.chat import views
from stages.chat.controller import ChatController
from stages.chat.request_guard import RequestGuard

STYLE = Path(__file__).with_name("style.css")
FONTS = ("system-ui", "sans-serif"), ("ui-monospace", "monospace")  # of the reader's machine: none is downloaded
PANELS = 3
MAX_TOKENS, MAX_SAMPLES, MAX_TEMPERATURE = 512, 16, 2  # of the sliders, unless the run's own values are larger
ONE_AT_A_TIME = {"concurrency_limit": 1, "concurrency_id": "models", "show_progress": "hidden",
                 "api_visibility": "private"}
IMMEDIATELY = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


class QuestionInputs(NamedTuple):
    """Components with the question and its sampling settings."""

    question: gr.Textbox
    temperature: gr.Slider
    most_tokens: gr.Slider
    samples: gr.Slider


class BlindOutputs(NamedTuple):
    """Components of the blind tab that events update."""

    notice: gr.HTML
    panels: list[gr.HTML]
    lines: list[gr.HTML]
    vote_buttons: list[gr.Button]
    tally: gr.HTML


def build_page(controller: ChatController, title: str, defaults: dict) -> gr.Blocks:
    """Build the page; defaults: initial temperature and most_tokens."""
    with gr.Blocks(title=title, analytics_enabled=False, fill_width=True) as blocks:
        gr.HTML(views.render_heading(title))
        inputs = _add_question_inputs(controller, defaults)
        with gr.Tabs():
            with gr.Tab("Side by side", id="side"):
                _add_side_by_side(controller, inputs)
            with gr.Tab("Blind", id="blind") as blind:
                _add_blind(controller, inputs, blind)
        _forget_closed_pages(controller, blocks)
    return blocks.queue(max_size=32, api_open=False)


def serve_page(blocks: gr.Blocks, host: str, port: int | None, wait: bool = True) -> str:
    """Serve the page, until Ctrl-C if `wait`; return its address. Raises OSError if the port is taken."""
    theme = gr.themes.Base(font=FONTS[0], font_mono=FONTS[1], primary_hue="blue", neutral_hue="slate")
    _, address, _ = blocks.launch(
        server_name=host, server_port=port, share=False, theme=theme, css_paths=STYLE, footer_links=[], quiet=True,
        ssr_mode=False, enable_monitoring=False, pwa=False, mcp_server=False, prevent_thread_lock=True,
        app_kwargs={"middleware": [Middleware(RequestGuard, host=host)]})
    if wait:
        print(f"demo: {address} (Ctrl-C ends it)", flush=True)
        blocks.block_thread()
    return address


def _add_question_inputs(controller: ChatController, defaults: dict) -> QuestionInputs:
    titles = [(title, index) for index, title in enumerate(controller.question_titles())]
    with gr.Row(elem_id="picking"):
        picked = gr.Dropdown(titles, value=None, label="Held-out questions: type to search", scale=5, min_width=280,
                             elem_id="picked")
        draw = gr.Button("Random question", scale=1, min_width=160, elem_id="random")
    question = gr.Textbox(label="Question", lines=3, max_lines=12, elem_id="question",
                          placeholder="Type a question, or pick one above.")
    max_tokens = max(1, min(max(MAX_TOKENS, defaults["most_tokens"]), controller.models.max_positions - 1))
    with gr.Row():
        inputs = QuestionInputs(
            question,
            gr.Slider(0, max(MAX_TEMPERATURE, defaults["temperature"]), defaults["temperature"], step=0.05,
                      label="Temperature (0: greedy)", min_width=220, elem_id="temperature"),
            gr.Slider(1, max_tokens, min(defaults["most_tokens"], max_tokens), step=1,
                      label="Longest answer, tokens", min_width=220, elem_id="length"),
            gr.Slider(2, MAX_SAMPLES, 4, step=1, label="n of best-of-n", min_width=220, elem_id="samples"))
    with gr.Accordion("Best human answer", open=False):
        human = gr.HTML(controller.best_human_answer(""), elem_id="human")
    picked.input(controller.question_text, picked, question, **IMMEDIATELY)
    draw.click(lambda: (index := controller.random_question(), controller.question_text(index)), None,
               [picked, question], **IMMEDIATELY)
    question.change(controller.best_human_answer, question, human, trigger_mode="always_last", **IMMEDIATELY)
    return inputs


def _add_ask_and_stop(controller: ChatController, name: str) -> gr.Button:
    """Add both buttons; return the one to ask."""
    with gr.Row():
        ask = gr.Button("Ask", variant="primary", scale=4, min_width=140, elem_id=f"ask-{name}")
        stop_button = gr.Button("Stop", scale=1, min_width=100, elem_id=f"stop-{name}")

    def stop(request: gr.Request) -> None:
        controller.stop(request.session_hash)

    stop_button.click(stop, None, None, **IMMEDIATELY)
    return ask


def _forget_closed_pages(controller: ChatController, blocks: gr.Blocks) -> None:
    def forget(request: gr.Request) -> None:
        controller.sessions.remove(request.session_hash)

    blocks.unload(forget)


def _add_side_by_side(controller: ChatController, inputs: QuestionInputs) -> None:
    ask, notice = _add_ask_and_stop(controller, "side"), gr.HTML(elem_id="notice")
    names, panels = [], []
    with gr.Row():
        for index in range(PANELS):
            with gr.Column(min_width=300, elem_classes=["voice"]):
                names.append(gr.Dropdown(
                    controller.models.names, value=_default_model(controller, index), show_label=False,
                    container=False, label=f"Model of panel {index + 1}", elem_id=f"model-{index}"))
                panels.append(gr.HTML(views.render_waiting("No question yet."), elem_id=f"panel-{index}"))
    gr.HTML(views.render_legend(controller.models.reference))

    def start(request: gr.Request):
        return ["", *[controller.start(request.session_hash)] * PANELS]

    def answer(request: gr.Request, question, temperature, most_tokens, samples, *chosen):
        sampling = _sampling(temperature, most_tokens, samples)
        yield from map(list, controller.stream_side_by_side(request.session_hash, question, sampling, list(chosen)))

    outputs = [notice, *panels]
    ask.click(start, None, outputs, **IMMEDIATELY).then(answer, [*inputs, *names], outputs, **ONE_AT_A_TIME)


def _add_blind(controller: ChatController, inputs: QuestionInputs, tab: gr.Tab) -> None:
    gr.Markdown("Two answers, in random order, without their writers' names: which is better? Votes are saved as "
                "preference pairs, from which `python -m stages.reward` can train the next reward model.")
    with gr.Row():
        names = [gr.Dropdown(controller.models.names, value=_default_model(controller, index), label=label,
                             elem_id=f"between-{index}")
                 for index, label in enumerate(("Between", "and"))]
    ask, notice = _add_ask_and_stop(controller, "blind"), gr.HTML(elem_id="blind-notice")
    panels, lines = [], []
    with gr.Row():
        for letter in "AB":
            with gr.Column(min_width=300, elem_classes=["voice"]):
                gr.Markdown(f"### Answer {letter}")
                panels.append(gr.HTML(views.render_waiting("No question yet."), elem_id=f"blind-{letter}"))
                lines.append(gr.HTML(elem_id=f"who-{letter}"))
    with gr.Row():
        vote_buttons = [gr.Button(label, interactive=False, elem_id=f"vote-{label[0]}")
                        for label in ("A is better", "Tie, or both bad", "B is better")]
    tally = gr.HTML(elem_id="tally")
    _connect_blind(controller, inputs, names, ask, BlindOutputs(notice, panels, lines, vote_buttons, tally))
    gr.on([tab.select, *(name.change for name in names)],
          lambda samples, *chosen: controller.tally_votes(list(chosen), int(samples)),
          [inputs.samples, *names], tally, **IMMEDIATELY)


def _connect_blind(
    controller: ChatController, inputs: QuestionInputs, names: list, ask: gr.Button, outputs: BlindOutputs
) -> None:
    notice, panels, lines, vote_buttons, tally = outputs

    def enable_votes(enabled: bool) -> list:
        return [gr.update(interactive=enabled)] * len(vote_buttons)

    def start(request: gr.Request):
        controller.sessions.take_comparison(request.session_hash)
        return ["", *[controller.start(request.session_hash)] * 2, "", "", *enable_votes(False)]

    def answer(request: gr.Request, question, temperature, most_tokens, samples, *chosen):
        sampling = _sampling(temperature, most_tokens, samples)
        for message, a, b, can_vote in controller.stream_blind(
                request.session_hash, question, sampling, list(chosen)):
            yield [message, a, b, *enable_votes(can_vote)]

    def vote_handler(choice: int | None):
        def vote(request: gr.Request, samples, *chosen):
            result = controller.vote(request.session_hash, choice)
            return [result.notice, *result.lines, *enable_votes(result.can_retry),
                    controller.tally_votes(list(chosen), int(samples))]
        return vote

    ask.click(start, None, [notice, *panels, *lines, *vote_buttons], **IMMEDIATELY).then(
        answer, [*inputs, *names], [notice, *panels, *vote_buttons], **ONE_AT_A_TIME)
    for button, choice in zip(vote_buttons, (0, None, 1), strict=True):
        button.click(vote_handler(choice), [inputs.samples, *names], [notice, *lines, *vote_buttons, tally],
                     **IMMEDIATELY)


def _sampling(temperature: float, most_tokens: float, samples: float) -> dict:
    return {"temperature": float(temperature), "most_tokens": int(most_tokens), "samples": int(samples)}


def _default_model(controller: ChatController, index: int) -> str:
    """Return the model that a menu starts with: SFT, PPO, best-of-n, however many models there are."""
    first, *others, best = controller.models.names
    return [first, *others[:1], best][min(index, 1 + len(others[:1]))]
