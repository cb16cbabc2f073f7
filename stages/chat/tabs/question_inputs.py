"""Add the inputs that both tabs share: the question, its sampling settings, and the buttons that ask it."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import gradio as gr
from gradio.events import Dependency

from stages.chat.controller import ChatController

MAX_TOKENS, MAX_SAMPLES, MAX_TEMPERATURE = 512, 16, 2  # of the sliders, unless the run's own values are larger
ONE_AT_A_TIME = {"concurrency_limit": 1, "concurrency_id": "models", "show_progress": "hidden",
                 "api_visibility": "private"}
IMMEDIATELY = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
KEYS_HINT = ("Enter asks; Ctrl-Enter or Shift-Enter breaks the line; Escape leaves the field. Outside text fields, N "
             "asks the next question: a random held-out one.")


class QuestionInputs(NamedTuple):
    """Components with the question and its sampling settings; picked: the menu of held-out questions."""

    picked: gr.Dropdown
    question: gr.Textbox
    temperature: gr.Slider
    most_tokens: gr.Slider
    samples: gr.Slider

    @property
    def answer_inputs(self) -> tuple:
        """Return the components whose values an answer depends on."""
        return self.question, self.temperature, self.most_tokens, self.samples


def add_question_inputs(controller: ChatController, defaults: dict) -> QuestionInputs:
    """Add the question with its menu and examples, the settings and the best human answer."""
    titles = controller.question_titles()
    with gr.Row(elem_id="examples"):
        examples = {index: gr.Button(titles[index], size="sm") for index in controller.example_questions()}
    with gr.Row(elem_id="picking"):
        picked = gr.Dropdown([(title, index) for index, title in enumerate(titles)], value=None, scale=5,
                             min_width=280, label="Held-out questions: type to search", elem_id="picked")
        random = gr.Button("Random question", scale=1, min_width=160, elem_id="random")
    question = gr.Textbox(label="Question", info=KEYS_HINT, lines=3, max_lines=12, elem_id="question",
                          placeholder="Type a question, or choose one above.")
    inputs = QuestionInputs(picked, question, *_add_settings(controller, defaults))
    with gr.Accordion("Best human answer", open=False):
        human = gr.HTML(controller.best_human_answer(""), elem_id="human")
    for index, button in examples.items():
        fill_in(button, partial(int, index), controller, inputs)
    picked.input(controller.question_text, picked, question, **IMMEDIATELY)
    fill_in(random, controller.random_question, controller, inputs)
    question.change(controller.best_human_answer, question, human, trigger_mode="always_last", **IMMEDIATELY)
    return inputs


def fill_in(button: gr.Button, choose: Callable[[], int | None], controller: ChatController, inputs: QuestionInputs
            ) -> Dependency:
    """Let the button fill in the held-out question whose index is chosen; return the event, which others may follow."""
    return button.click(lambda: (index := choose(), controller.question_text(index)), None,
                        [inputs.picked, inputs.question], **IMMEDIATELY)


def add_ask_buttons(controller: ChatController, inputs: QuestionInputs, name: str) -> list[Callable]:
    """Add the buttons to ask, to go on to a random question, and to stop; return the events that ask."""
    with gr.Row():
        ask = gr.Button("Ask", variant="primary", scale=4, min_width=100, elem_id=f"ask-{name}")
        following = gr.Button("Next question", scale=2, min_width=110, elem_id=f"next-{name}")
        stop_button = gr.Button("Stop", scale=1, min_width=70, elem_id=f"stop-{name}")

    def stop(request: gr.Request) -> None:
        controller.stop(request.session_hash)

    stop_button.click(stop, None, None, **IMMEDIATELY)
    return [ask.click, fill_in(following, controller.random_question, controller, inputs).then]


def sampling_settings(temperature: float, most_tokens: float, samples: float) -> dict:
    """Convert the values of the sliders."""
    return {"temperature": float(temperature), "most_tokens": int(most_tokens), "samples": int(samples)}


def default_model(controller: ChatController, index: int) -> str:
    """Return the model that a menu starts with: SFT, PPO, best-of-n, however many models there are."""
    first, *others, best = controller.models.names
    return [first, *others[:1], best][min(index, 1 + len(others[:1]))]


def _add_settings(controller: ChatController, defaults: dict) -> list[gr.Slider]:
    max_tokens = max(1, min(max(MAX_TOKENS, defaults["most_tokens"]), controller.models.max_positions - 1))
    with gr.Accordion("Settings", open=False, elem_id="settings"), gr.Row():
        return [
            gr.Slider(0, max(MAX_TEMPERATURE, defaults["temperature"]), defaults["temperature"], step=0.05,
                      label="Temperature (0: greedy)", min_width=220, elem_id="temperature"),
            gr.Slider(1, max_tokens, min(defaults["most_tokens"], max_tokens), step=1,
                      label="Longest answer, tokens", min_width=220, elem_id="length"),
            gr.Slider(2, MAX_SAMPLES, 4, step=1, label="n of best-of-n", min_width=220, elem_id="samples")]
