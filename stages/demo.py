"""Demo: serve a page on this machine to chat with a run's models: answers side by side, and blind votes on them.

    python -m stages.demo                                             # results/demo, on http://127.0.0.1:7860
    python -m stages.demo --run results/mine --port 8000 --model base=results/mine/base
    make demo RUN=results/mine PORT=8000                              # after installing gradio

Not a stage: it makes no artifact. Reads the run's sft-merged, ppo-merged, reward-merged and pairs; writes votes to the
folder RUN/votes, in the form of the pairs. Needs gradio (`make extras`).
"""

import argparse
import os
import sys
from pathlib import Path

from stages.chat.checks import check_port, check_run
from stages.command_line.failures import describe_failure
from stages.command_line.option_parser import OptionParser
from stages.recipe.recipe_file import read_mapping
from stages.recipe.schema import override
from stages.recipe.sections.evaluate import Evaluate
from stages.runtime.environment import let_idle_threads_sleep

RUN, PORT = Path("results/demo"), 7860
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
    from stages.chat.load import load_controller
    from stages.chat.model_background import read_model_background
    from stages.chat.page import build_page, serve_page

    settings = evaluate_settings(args.run)
    votes = args.votes or args.run / "votes"
    controller = load_controller(args.run, args.model, votes, args.precision, settings.cpu_kernels)
    defaults = {"temperature": settings.temperature, "most_tokens": settings.max_response_tokens}
    page = build_page(controller, f"Talking to {args.run}", read_model_background(args.run), defaults)
    serve_page(page, args.host, args.port)


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
    parser = OptionParser(prog="python -m stages.demo", description=__doc__,
                          formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
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
        serve(args)
    except KeyboardInterrupt:
        pass
    except Exception as error:
        if (message := describe_failure(error, args.run)) is None:
            raise
        print(f"demo: error: {' '.join(message.split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
