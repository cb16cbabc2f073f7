"""Add the tab in which two answers without names are compared and voted on."""

from collections.abc import Callable
from typing import NamedTuple

import gradio as gr

from stages.chat import views
from stages.chat.controller import ChatController
from stages.chat.tabs.question_inputs import (
    IMMEDIATELY,
    ONE_AT_A_TIME,
    QuestionInputs,
    add_ask_buttons,
    default_model,
    sampling_settings,
)

INTRODUCTION = (
    "Two answers, in random order, without their writers' names: which is better? Votes are saved as preference pairs, "
    "from which `python -m stages.reward` can train the next reward model. Outside text fields, the keys **A** and "
    "**B** choose the better answer, **T** calls it a tie, and **N** asks the next question.")


class BlindOutputs(NamedTuple):
    """Components of the blind tab that events update."""

    notice: gr.HTML
    panels: list[gr.HTML]
    lines: list[gr.HTML]
    vote_buttons: list[gr.Button]
    tally: gr.HTML


def add_blind_tab(controller: ChatController, inputs: QuestionInputs, tab: gr.Tab) -> None:
    """Add the two answers, the buttons to vote and the tally of the votes."""
    gr.Markdown(INTRODUCTION)
    with gr.Row():
        names = [gr.Dropdown(controller.models.names, value=default_model(controller, index), label=label,
                             elem_id=f"between-{index}")
                 for index, label in enumerate(("Between", "and"))]
    asking, notice = add_ask_buttons(controller, inputs, "blind"), gr.HTML(elem_id="blind-notice")
    panels, lines = [], []
    with gr.Row():
        for letter in "AB":
            with gr.Column(min_width=300, elem_classes=["voice"]):
                gr.Markdown(f"### Answer {letter}")
                panels.append(gr.HTML(views.render_waiting("No question yet."), elem_id=f"blind-{letter}"))
                lines.append(gr.HTML(elem_id=f"who-{letter}"))
    with gr.Row():
        vote_buttons = [gr.Button(label, interactive=False, min_width=90, elem_id=f"vote-{label[0]}")
                        for label in ("A is better", "Tie, or both bad", "B is better")]
    tally = gr.HTML(elem_id="tally")
    _connect(controller, inputs, names, asking, BlindOutputs(notice, panels, lines, vote_buttons, tally))
    gr.on([tab.select, *(name.change for name in names)],
          lambda samples, *chosen: controller.tally_votes(list(chosen), int(samples)),
          [inputs.samples, *names], tally, **IMMEDIATELY)


def _connect(controller: ChatController, inputs: QuestionInputs, names: list, asking: list[Callable],
             outputs: BlindOutputs) -> None:
    notice, panels, lines, vote_buttons, tally = outputs

    def enable_votes(enabled: bool) -> list:
        return [gr.update(interactive=enabled)] * len(vote_buttons)

    def start(request: gr.Request):
        controller.sessions.take_comparison(request.session_hash)
        return ["", *[controller.start(request.session_hash)] * 2, "", "", *enable_votes(False)]

    def answer(request: gr.Request, question, temperature, most_tokens, samples, *chosen):
        sampling = sampling_settings(temperature, most_tokens, samples)
        for message, a, b, can_vote in controller.stream_blind(
                request.session_hash, question, sampling, list(chosen)):
            yield [message, a, b, *enable_votes(can_vote)]

    def vote_handler(choice: int | None):
        def vote(request: gr.Request, samples, *chosen):
            result = controller.vote(request.session_hash, choice)
            return [result.notice, *result.lines, *enable_votes(result.can_retry),
                    controller.tally_votes(list(chosen), int(samples))]
        return vote

    for event in asking:
        event(start, None, [notice, *panels, *lines, *vote_buttons], **IMMEDIATELY).then(
            answer, [*inputs.answer_inputs, *names], [notice, *panels, *vote_buttons], **ONE_AT_A_TIME)
    for button, choice in zip(vote_buttons, (0, None, 1), strict=True):
        button.click(vote_handler(choice), [inputs.samples, *names], [notice, *lines, *vote_buttons, tally],
                     **IMMEDIATELY)
