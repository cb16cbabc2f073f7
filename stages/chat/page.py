"""Build the demo page with Gradio and serve it."""

from pathlib import Path

import gradio as gr
from starlette.middleware import Middleware

from stages.chat import views
from stages.chat.controller import ChatController
from stages.chat.model_background import ModelBackground
from stages.chat.refused_requests import shorten_tracebacks
from stages.chat.request_guard import RequestGuard
from stages.chat.tabs.blind import add_blind_tab
from stages.chat.tabs.question_inputs import add_question_inputs
from stages.chat.tabs.side_by_side import add_side_by_side_tab

STYLE, SCRIPT = (Path(__file__).with_name(name) for name in ("style.css", "keys.js"))
FONTS = ("system-ui", "sans-serif"), ("ui-monospace", "monospace")  # of the reader's machine: none is downloaded


def build_page(controller: ChatController, title: str, facts: ModelBackground, defaults: dict) -> gr.Blocks:
    """Build the page; defaults: initial temperature and most_tokens."""
    with gr.Blocks(title=title, analytics_enabled=False, fill_width=True) as blocks:
        gr.HTML(views.render_heading(title, facts))
        inputs = add_question_inputs(controller, defaults)
        with gr.Tabs():
            with gr.Tab("Side by side", id="side"):
                add_side_by_side_tab(controller, inputs)
            with gr.Tab("Blind", id="blind") as blind:
                add_blind_tab(controller, inputs, blind)
        _forget_closed_pages(controller, blocks)
    return blocks.queue(max_size=32, api_open=False)


def serve_page(blocks: gr.Blocks, host: str, port: int | None, wait: bool = True) -> str:
    """Serve the page, until Ctrl-C if `wait`; return its address. Raises OSError if the port is taken."""
    theme = gr.themes.Base(font=FONTS[0], font_mono=FONTS[1], primary_hue="blue", neutral_hue="slate")
    _, address, _ = blocks.launch(
        server_name=host, server_port=port, share=False, theme=theme, css_paths=STYLE, js=SCRIPT.read_text("utf-8"),
        footer_links=[], run_history=False, quiet=True, ssr_mode=False, enable_monitoring=False, pwa=False,
        mcp_server=False, prevent_thread_lock=True, app_kwargs={"middleware": [Middleware(RequestGuard, host=host)]})
    shorten_tracebacks()
    if wait:
        print(f"demo: {address} (Ctrl-C ends it)", flush=True)
        blocks.block_thread()
    return address


def _forget_closed_pages(controller: ChatController, blocks: gr.Blocks) -> None:
    def forget(request: gr.Request) -> None:
        controller.sessions.remove(request.session_hash)

    blocks.unload(forget)
