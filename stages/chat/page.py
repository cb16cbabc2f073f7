"""Build the demo page with Gradio, and serve it."""

import html
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import gradio as gr
from starlette.middleware import Middleware

from stages.chat import views
from stages.chat.request_guard import RequestGuard
from stages.chat.streaming import BEST_OF_N, ChatModels, SamplingSettings
from stages.chat.views import Answer
from stages.chat.votes import Comparison, Votes
from stages.render.html import Html
from stages.render.terminal import shorten
from stages.stackexchange.pairs.table import best_rows, first_question_keys, read_first_rows

STYLE, SCRIPT = (Path(__file__).with_name(name) for name in ("style.css", "keys.js"))
FONTS = ("system-ui", "sans-serif"), ("ui-monospace", "monospace")  # of the reader's machine: none is downloaded
MAX_TOKENS, MAX_SAMPLES, MAX_TEMPERATURE = 512, 16, 2  # of the sliders, unless the run's own values are larger
MAX_QUESTIONS, TITLE_CHARACTERS, EXAMPLES = 2000, 160, 4
SHOW_EVERY_SECONDS = 0.1  # a page cannot draw faster, and every update costs tokens
PANELS, SIDE, BLIND = 3, "Side by side", "Blind vote"
USER_ERRORS = ValueError, RuntimeError  # an invalid question; out of memory
RANDOM = random.SystemRandom()
NO_PROGRESS = {"show_progress": "hidden", "api_visibility": "private"}
KEYS = ("Enter asks; Shift-Enter breaks the line; Escape leaves the field. Outside text fields, N asks the next "
        "question: a random held-out one.")
NUMBERS = (
    "The reward is that of the reward model; 0 is the mean of good human answers. The KL is the sum of the log-ratios "
    "of this one answer, an estimate that may be below 0; for best-of-n it is a bound, log n - (n-1)/n. Tokens a "
    "second are of the time that the panel itself took. Colours: blue where a word is likelier than under {reference}, "
    "orange where it is less likely, full from 1 nat (a factor of 2.7) on; point at a word to see its number.")
VOTING = (
    "Two answers of the first two models, in random order and without names: which is better? Votes are saved as "
    "preference pairs, from which `python -m stages.reward` can train the next reward model. Outside text fields, the "
    "keys **A** and **B** choose the better answer, **T** calls it a tie.")


class ChatPage:
    """The demo page's events: stream answers, save votes.

    Args:
        pairs: artifact with the held-out questions to choose from.
    """

    def __init__(self, models: ChatModels, pairs: Path, votes: Votes):
        self.models, self.votes = models, votes
        keys = first_question_keys(pairs, views.HELD_OUT, 1.0, MAX_QUESTIONS)
        rows = best_rows(read_first_rows(pairs, views.HELD_OUT, keys))
        self.rows = {row["question"].strip(): row for row in rows}
        self.questions = list(self.rows)
        self.titles = [shorten(" ".join(text.split()), TITLE_CHARACTERS) for text in self.questions]

    def question_text(self, index: int | None) -> str:
        return self.questions[index] if isinstance(index, int) else ""  # Gradio lets other types pass

    def choose_question(self) -> tuple[int | None, str]:
        """Return the index and the text of a random held-out question."""
        index = RANDOM.randrange(len(self.questions)) if self.questions else None
        return index, self.question_text(index)

    def best_human_answer(self, question: str) -> Html:
        return views.render_human_answer(self.rows.get((question or "").strip()))

    def answer(self, mode: str, question: str, temperature: float, most_tokens: float, samples: float, *names: str
               ) -> Iterator[list]:
        """Yield the panels, the comparison to vote on (or None) and the buttons to vote, while the answers grow."""
        sampling = SamplingSettings(float(temperature), int(most_tokens), int(samples))
        is_blind, shown = mode == BLIND, 0.0
        chosen = RANDOM.sample(names[:2], 2) if is_blind else list(names)
        try:
            for answers in self.models.stream_side_by_side(chosen, question, sampling, RANDOM.randrange(2**31)):
                if time.monotonic() - shown >= SHOW_EVERY_SECONDS or all(answer.done for answer in answers):
                    shown = time.monotonic()
                    yield self._show_blind(question, sampling, answers) if is_blind else _fill_outputs([
                        views.render_answer(answer, self.models.reference, answer.policy) for answer in answers])
        except USER_ERRORS as error:
            gr.Warning(html.escape(str(error)))
            yield _fill_outputs([views.render_waiting("No answer.")] * PANELS)

    def vote(self, choice: int | None, comparison: Comparison | None, samples: float, *names: str) -> list:
        """Save the vote on the two answers (the better one, 0 or 1; None: a tie), and reveal the policies.

        If it cannot be saved nothing is revealed, and the vote can be repeated, when the disk has room again.
        """
        if comparison is None:  # a second click
            return [gr.skip()] * (PANELS + 5)
        try:
            gr.Info(html.escape(f"Saved in {self.votes.add(comparison, choice)}."))
        except (ValueError, OSError) as error:
            gr.Warning(html.escape(f"The vote is not saved: {error}"))
            return [*[gr.skip()] * PANELS, comparison, *_enable_votes(True), gr.skip()]
        verdicts = [("tie" if choice is None else "chosen" if i == choice else "not chosen") for i in (0, 1)]
        panels = [views.render_answer(answer, self.models.reference, f"{answer.policy}: {verdict}")
                  for answer, verdict in zip(comparison.answers, verdicts, strict=True)]
        return [*_fill_outputs(panels), self.tally(samples, *names)]

    def tally(self, samples: float, *names: str) -> Html:
        """Tally the votes between the first two models as they are now; others of these names do not count."""
        one, other = ((f"best of {int(samples)}" if name == BEST_OF_N else name, self.models.digests.get(name, ""))
                      for name in names[:2])
        try:
            return views.render_tally(one[0], other[0], *self.votes.count(one, other))
        except ValueError as error:
            return views.render_waiting(str(error))

    def _show_blind(self, question: str, sampling: SamplingSettings, answers: list[Answer]) -> list:
        """Show two answers once both are done: best-of-n could be recognised by the way it grows."""
        if not all(answer.done for answer in answers):
            tokens = sum(answer.sampled_tokens for answer in answers)
            return _fill_outputs([views.render_waiting(f"Both are being written: {tokens} tokens so far…")] * 2)
        panels = [views.render_text(answer.text or "(an empty answer)") for answer in answers]
        if answers[0].text.strip() == answers[1].text.strip():
            gr.Info("Both wrote the very same: there is nothing to choose. Ask again, or something else.")
            return _fill_outputs(panels)
        row = self.rows.get(question.strip())
        return _fill_outputs(panels, Comparison(question, row, answers, sampling._asdict()))


def build_page(chat: ChatPage, run: Path, defaults: dict) -> gr.Blocks:
    """Build the page; defaults: initial temperature and most_tokens."""
    with gr.Blocks(title=f"Talking to {run}", analytics_enabled=False, fill_width=True) as blocks:
        gr.HTML(views.render_heading(run))
        question, picked = _add_question(chat)
        with gr.Row():
            ask = gr.Button("Ask", variant="primary", scale=4, min_width=100, elem_id="ask")
            following = gr.Button("Next question", scale=2, min_width=110, elem_id="next")
            stop = gr.Button("Stop", scale=1, min_width=70, elem_id="stop")
        mode, sliders, names = _add_settings(chat, defaults)
        gr.Checkbox(label="Show answers as they were written, each word with its colour", elem_id="colours")
        panels, columns = [], []
        with gr.Row():
            for index in range(PANELS):
                with gr.Column(min_width=300) as column:
                    panels.append(gr.HTML(views.render_waiting("No question yet."), elem_id=f"panel-{index}",
                                          container=True, padding=True))
                columns.append(column)
        with gr.Column(visible=False) as voting:
            with gr.Row():
                buttons = [gr.Button(label, interactive=False, min_width=90, elem_id=f"vote-{label[0]}")
                           for label in ("A is better", "Tie, or both bad", "B is better")]
            tally = gr.HTML(elem_id="tally")
            gr.Markdown(VOTING)
        gr.Markdown(NUMBERS.format(reference=chat.models.reference))
        comparison = gr.State()

        outputs, asking = [*panels, comparison, *buttons], [ask.click, question.submit]
        answers = gr.on(asking, lambda: _fill_outputs([views.render_waiting("Waiting…")] * PANELS), None, outputs,
                        js="() => document.activeElement.blur()", queue=False, **NO_PROGRESS).then(
            chat.answer, [mode, question, *sliders, *names], outputs, concurrency_limit=1, concurrency_id="models",
            show_progress="minimal", show_progress_on=picked, api_visibility="private", trigger_mode="multiple")
        gr.on([*asking, stop.click], None, cancels=[answers])
        following.click(chat.choose_question, None, [picked, question], queue=False, **NO_PROGRESS).then(
            None, js="() => document.querySelector('#ask').click()")
        for button, choice in zip(buttons, (0, None, 1), strict=True):
            button.click(partial(chat.vote, choice), [comparison, sliders[-1], *names], [*outputs, tally],
                         concurrency_limit=1, concurrency_id="votes", api_name="vote", **NO_PROGRESS)
        gr.on([mode.change, *(name.change for name in names)], chat.tally,
              [sliders[-1], *names], tally, queue=False, **NO_PROGRESS)
        mode.change(lambda mode: [gr.update(visible=mode == SIDE)] * 2 + [gr.update(visible=mode == BLIND)],
                    mode, [columns[-1], names[-1], voting], queue=False, **NO_PROGRESS)
    return blocks.queue(max_size=32, api_open=False)


def serve_page(blocks: gr.Blocks, host: str, port: int | None, wait: bool = True) -> str:
    """Serve the page, until Ctrl-C if `wait`; return its address. Raises OSError if the port is taken."""
    theme = gr.themes.Base(font=FONTS[0], font_mono=FONTS[1], primary_hue="blue", neutral_hue="slate")
    _, address, _ = blocks.launch(
        server_name=host, server_port=port, share=False, theme=theme, css_paths=STYLE, js=SCRIPT.read_text("utf-8"),
        footer_links=[], run_history=False, quiet=True, ssr_mode=False, enable_monitoring=False, pwa=False,
        mcp_server=False, prevent_thread_lock=True, app_kwargs={"middleware": [Middleware(RequestGuard, host=host)]})
    if wait:
        print(f"demo: {address} (Ctrl-C ends it)", flush=True)
        blocks.block_thread()
    return address


def _add_question(chat: ChatPage) -> tuple[gr.Textbox, gr.Dropdown]:
    """Add the question, with the held-out ones to choose from and the best human answer."""
    picked = gr.Dropdown(list(zip(chat.titles, range(len(chat.titles)), strict=True)), value=None, elem_id="picked",
                         label="Held-out questions: type to search")
    question = gr.Textbox(label="Question", info=KEYS, max_lines=12, elem_id="question",
                          placeholder="Type a question, or choose one.")
    order = sorted(range(len(chat.titles)), key=lambda index: len(chat.questions[index]) > TITLE_CHARACTERS)[:EXAMPLES]
    if order:
        gr.Examples([[chat.questions[index]] for index in order], question, elem_id="examples",
                    example_labels=[chat.titles[index] for index in order], api_visibility="private")
    with gr.Accordion("Best human answer", open=False, elem_id="human-answer"):
        human = gr.HTML(chat.best_human_answer(""), elem_id="human")
    picked.input(chat.question_text, picked, question, queue=False, **NO_PROGRESS)
    question.change(chat.best_human_answer, question, human, trigger_mode="always_last", queue=False, **NO_PROGRESS)
    return question, picked


def _add_settings(chat: ChatPage, defaults: dict) -> tuple[gr.Radio, list[gr.Slider], list[gr.Dropdown]]:
    """Add the mode, the settings of sampling (temperature, length, n) and the models."""
    mode = gr.Radio([SIDE, BLIND], value=SIDE, show_label=False, container=False, elem_id="mode")
    models = list(chat.models.policies)
    with gr.Row():
        names = [gr.Dropdown(models, value=name, label=f"Model {index + 1}", min_width=200, elem_id=f"model-{index}")
                 for index, name in enumerate((models[0], models[1], BEST_OF_N))]
    max_tokens = max(1, min(max(MAX_TOKENS, defaults["most_tokens"]), chat.models.max_positions - 1))
    with gr.Accordion("Settings", open=False, elem_id="settings"), gr.Row():
        sliders = [
            gr.Slider(0, max(MAX_TEMPERATURE, defaults["temperature"]), defaults["temperature"], step=0.05,
                      label="Temperature (0: greedy)", min_width=220, elem_id="temperature"),
            gr.Slider(1, max_tokens, min(defaults["most_tokens"], max_tokens), step=1,
                      label="Longest answer, tokens", min_width=220, elem_id="length"),
            gr.Slider(2, MAX_SAMPLES, 4, step=1, label="n of best-of-n", min_width=220, elem_id="samples")]
    return mode, sliders, names


def _fill_outputs(panels: list[Html], comparison: Comparison | None = None) -> list:
    """Return the values of all panels, of the comparison to vote on, and of the buttons to vote."""
    return [*panels, *[""] * (PANELS - len(panels)), comparison, *_enable_votes(comparison is not None)]


def _enable_votes(enabled: bool) -> list:
    return [gr.update(interactive=enabled)] * 3
