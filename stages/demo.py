"""Demo: serve a page on this machine to chat with a run's models: answers side by side, and blind votes on them.

    python -m stages.demo                                             # results/demo, on http://127.0.0.1:7860
    python -m stages.demo --run results/mine --port 8000 --model base=results/mine/base
    make demo RUN=results/mine PORT=8000                              # after installing gradio

Not a stage: it makes no artifact. Reads the run's sft-merged, ppo-merged, reward-merged and pairs; writes votes to the
folder RUN/votes, in the form of the pairs. Needs gradio (`make extras`).
"""

import argparse
import importlib.util
import os
import socket
import sys
from functools import partial
from pathlib import Path

from stages.artifacts.artifact import MANIFEST
from stages.command_line.option_parser import OptionParser
from stages.command_line.start import run_tool
from stages.recipe.recipe import read_mapping
from stages.recipe.schema import override
from stages.recipe.sections.evaluate import Evaluate
from stages.runtime.environment import let_idle_threads_sleep

RUN, PORT = Path("results/demo"), 7860
REQUIRED_ARTIFACTS = ("pairs", "sft-merged", "ppo-merged", "reward-merged")
PRECISIONS = ("fp32", "bf16", "int8", "nf4")
# Read when the libraries are imported. Gradio requests its own page once at the start, which must not go to a proxy.
OFFLINE_ENVIRONMENT = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1", "NO_PROXY": "*", "no_proxy": "*"}


def serve(args: argparse.Namespace) -> None:
    """Load the models and serve the page until Ctrl-C; ValueError or OSError, in one line, if something is missing."""
    let_idle_threads_sleep()
    check_run(args.run)
    check_port(args.host, args.port)
    os.environ |= OFFLINE_ENVIRONMENT
    from stages.modeling import torch_setup
    torch_setup.prepare()  # before the imports below, whose warnings it silences
    from stages.chat.page import ChatPage, build_page, serve_page
    from stages.chat.streaming import ChatModels
    from stages.chat.votes import Votes

    settings = evaluate_settings(args.run)
    print("demo: loading the models", flush=True)
    models = ChatModels(args.run, args.model, args.precision, settings.cpu_kernels)
    chat = ChatPage(models, args.run / "pairs", Votes(args.votes or args.run / "votes"))
    defaults = {"temperature": settings.temperature, "most_tokens": settings.max_response_tokens}
    serve_page(build_page(chat, args.run, defaults), args.host, args.port)


def check_run(run: Path) -> None:
    """Raise ValueError unless gradio is installed and the run is finished."""
    if importlib.util.find_spec("gradio") is None:
        raise ValueError("the page needs gradio, which is not installed: make extras")
    if not run.is_dir():
        raise ValueError(f"{run} is not a folder: name a finished run, or make the bundled one (make ppo)")
    seeds = sorted(str(folder) for folder in run.glob("seed-*/") if (folder / "recipe.yaml").is_file())
    if seeds:
        raise ValueError(f"{run} is a run of several seeds, each with its own models: give one of {', '.join(seeds)}")
    missing = [name for name in REQUIRED_ARTIFACTS if not (run / name / MANIFEST).is_file()]
    if missing:
        raise ValueError(f"{run} has no finished {', '.join(missing)}: make it first (the bundled run: make ppo)")


def check_port(host: str, port: int) -> None:
    """Raise ValueError or OSError unless the page can be served there."""
    if not 0 < port < 2**16:
        raise ValueError(f"--port must be from 1 to {2**16 - 1}, not {port}")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            raise OSError(f"cannot listen at {host}, port {port} ({error.strerror}): give another --port") from None


def evaluate_settings(run: Path) -> Evaluate:
    """Return the settings that the run was evaluated with, or the published ones if it has no recipe.

    Other sections are not read: an older run may have keys that no longer exist.
    """
    recipe = run / "recipe.yaml"
    section = read_mapping(recipe).get("evaluate", {}) if recipe.is_file() else {}
    return override(Evaluate(), section, f"{recipe}: evaluate")


def parse_model(text: str) -> tuple[str, Path]:
    """Parse NAME=FOLDER."""
    name, _, folder = text.partition("=")
    if not name or not Path(folder, "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=FOLDER, the folder of a whole model")
    return name, Path(folder)


def build_parser() -> argparse.ArgumentParser:
    parser = OptionParser("demo", __doc__)
    parser.add_argument("--run", type=Path, default=RUN, metavar="FOLDER", help=f"a finished run (default: {RUN})")
    parser.add_argument("--model", type=parse_model, action="append", default=[], metavar="NAME=FOLDER",
                        help="one more model to choose from; may be given several times")
    parser.add_argument("--votes", type=Path, metavar="FOLDER", help="where votes are saved (default: RUN/votes)")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="of all models (default: fp32)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine only)")
    parser.add_argument("--port", type=int, default=PORT, help=f"port to listen at (default: {PORT})")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Serve the page; return 1, with one line on stderr, for errors that the user can fix."""
    args = build_parser().parse_args(arguments)
    try:
        return run_tool("demo", args.run, partial(serve, args))
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
