"""Demo: a page on this machine to talk to a run's models: answers side by side, and blind votes on them.

    python -m stages.demo                                             # results/demo, on http://127.0.0.1:7860
    python -m stages.demo --run results/mine --port 8000 --model base=results/mine/base

Not a stage: it makes no artifact. Reads the run's sft-merged, ppo-merged, reward-merged and pairs; writes votes into
the folder RUN/votes, in the form of the pairs. Needs gradio (`make extras`); `make demo` brings it.
"""

import argparse
import importlib.util
import os
import socket
import sys
from pathlib import Path

from stages.recipe.evaluate import Evaluate
from stages.recipe.recipe import load
from stages.recipe.schema import SettingsError
from stages.runtime.artifact import DIGEST_CHARACTERS, MANIFEST, sha256_of_file

RUN, PORT = Path("results/demo"), 7860
PRECISIONS = ("fp32", "bf16", "int8", "nf4")
NEEDED = ("pairs", "sft-merged", "ppo-merged", "reward-merged")
# Read when the libraries are imported. A proxy would be asked for the page itself: Gradio calls it once at the start.
STAY_HERE = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1", "NO_PROXY": "*", "no_proxy": "*"}


def serve(asked: argparse.Namespace) -> None:
    """Load the models and serve the page until Ctrl-C; ValueError, in one line, where something is missing."""
    from stages.modeling import torch_setup

    torch_setup.prepare()
    check(asked.run)
    check_port(asked.host, asked.port)
    os.environ |= STAY_HERE
    from stages.chat import page
    blocks = page.page(talk_of(asked), f"Talking to {asked.run}", defaults_of(asked.run))
    page.serve(blocks, asked.host, asked.port)


def check(run: Path) -> None:
    """ValueError unless gradio is installed and the run is finished."""
    if importlib.util.find_spec("gradio") is None:
        raise ValueError("the page needs gradio, which is not installed: make extras")
    missing = [name for name in NEEDED if not (run / name / MANIFEST).is_file()]
    if missing:
        raise ValueError(f"{run} has no finished {', '.join(missing)}: make it first (the bundled run: make ppo)")


def check_port(host: str, port: int) -> None:
    """OSError unless the page can be served there; before the models are loaded, which may take minutes."""
    if not 0 < port < 2**16:
        raise ValueError(f"--port must be from 1 to {2**16 - 1}, not {port}")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            raise OSError(f"cannot listen at {host}, port {port} ({error.strerror}): give another --port") from None


def talk_of(asked: argparse.Namespace):
    """What is behind the page: models in memory, held-out questions, the folder of votes."""
    from stages.chat.controller import ChatController
    from stages.chat.streaming import BEST_OF_N, ChatModels
    from stages.chat.votes import Votes
    folders = {"SFT": asked.run / "sft-merged", "PPO": asked.run / "ppo-merged"}
    for name, folder in asked.model:
        if name in folders or name == BEST_OF_N:
            raise ValueError(f"--model {name}: there is a model of that name already")
        folders[name] = folder
    reward = asked.run / "reward-merged"
    digests = {name: digest_of(folder) for name, folder in folders.items()}
    digests[BEST_OF_N] = f"{digests['SFT']} by {digest_of(reward)}"
    print(f"demo: loading {', '.join(folders)} and the reward model", flush=True)
    return ChatController(ChatModels(folders, reward, asked.precision), asked.run / "pairs",
                Votes(asked.votes or asked.run / "votes"), digests)


def defaults_of(run: Path) -> dict:
    """Temperature and length that the run was evaluated with; the published ones where it has no recipe."""
    recipe = run / "recipe.yaml"
    evaluate = load(recipe).evaluate if recipe.is_file() else Evaluate()
    return {"temperature": evaluate.temperature, "most_tokens": evaluate.max_response_tokens}


def digest_of(folder: Path) -> str:
    """What names a model in a vote: the beginning of its manifest's sha256; '' for one that no stage made."""
    manifest = folder / MANIFEST
    return sha256_of_file(manifest)[:DIGEST_CHARACTERS] if manifest.is_file() else ""


def named_folder(text: str) -> tuple[str, Path]:
    """NAME=FOLDER."""
    name, _, folder = text.partition("=")
    if not name or not Path(folder, "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=FOLDER, the folder of a whole model")
    return name, Path(folder)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m stages.demo", description=__doc__,
                                    formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    found.add_argument("--run", type=Path, default=RUN, metavar="FOLDER", help=f"a finished run (default: {RUN})")
    found.add_argument("--model", type=named_folder, action="append", default=[], metavar="NAME=FOLDER",
                       help="one more model to choose from; may be given again")
    found.add_argument("--votes", type=Path, metavar="FOLDER", help="where votes are kept (default: RUN/votes)")
    found.add_argument("--precision", choices=PRECISIONS, default="fp32", help="of all models (default: fp32)")
    found.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine alone)")
    found.add_argument("--port", type=int, default=PORT, help=f"port to listen at (default: {PORT})")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Serve the page; 1, with one line, for what a user can mend."""
    asked = parser().parse_args(arguments)
    try:
        serve(asked)
    except (ValueError, OSError, SettingsError) as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
