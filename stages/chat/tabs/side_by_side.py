"""Add the tab in which several models answer the same question side by side."""

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

PANELS = 3


def add_side_by_side_tab(controller: ChatController, inputs: QuestionInputs) -> None:
    """Add the panels, each with its menu of models, and the legend of their colours."""
    asking = add_ask_buttons(controller, inputs, "side")
    notice, reference = gr.HTML(elem_id="notice"), controller.models.reference
    gr.Checkbox(label=f"Colour each word by how much likelier it is than under {reference}, instead of formatting",
                container=False, elem_id="colours")
    gr.HTML(views.render_legend(reference), elem_id="legend")
    names, panels = [], []
    with gr.Row():
        for index in range(PANELS):
            with gr.Column(min_width=300, elem_classes=["voice"]):
                names.append(gr.Dropdown(
                    controller.models.names, value=default_model(controller, index), show_label=False,
                    container=False, label=f"Model of panel {index + 1}", elem_id=f"model-{index}"))
                panels.append(gr.HTML(views.render_waiting("No question yet."), elem_id=f"panel-{index}"))

    def start(request: gr.Request):
        return ["", *[controller.start(request.session_hash)] * PANELS]

    def answer(request: gr.Request, question, temperature, most_tokens, samples, *chosen):
        sampling = sampling_settings(temperature, most_tokens, samples)
        yield from map(list, controller.stream_side_by_side(request.session_hash, question, sampling, list(chosen)))

    outputs = [notice, *panels]
    for event in asking:
        event(start, None, outputs, **IMMEDIATELY).then(
            answer, [*inputs.answer_inputs, *names], outputs, **ONE_AT_A_TIME)
