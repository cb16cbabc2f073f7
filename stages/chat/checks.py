"""Check run and port before the demo page is served: before torch and the models are loaded, which may take minutes."""

import importlib.util
import socket
from pathlib import Path

from stages.runtime.artifact import MANIFEST

REQUIRED_ARTIFACTS = ("pairs", "sft-merged", "ppo-merged", "reward-merged")


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
