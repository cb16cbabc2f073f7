"""Load what the demo page needs from a run: models, held-out questions, the folder of votes."""

from collections.abc import Sequence
from pathlib import Path

from stages.chat.controller import ChatController
from stages.chat.streaming import BEST_OF_N, ChatModels
from stages.chat.votes import Votes
from stages.runtime.files import hash_file
from stages.runtime.finished import DIGEST_CHARACTERS, MANIFEST


def load_controller(
    run: Path, models: Sequence[tuple[str, Path]], votes: Path, precision: str, cpu_kernels: str
) -> ChatController:
    """Load the run's SFT and PPO models, further `models` by name, and the reward model."""
    folders = {"SFT": run / "sft-merged", "PPO": run / "ppo-merged"}
    for name, folder in models:
        if name in folders or name == BEST_OF_N:
            raise ValueError(f"--model {name}: there is a model of that name already")
        folders[name] = folder
    reward = run / "reward-merged"
    digests = {name: model_digest(folder) for name, folder in folders.items()}
    digests[BEST_OF_N] = f"{digests['SFT']} by {model_digest(reward)}"
    print(f"demo: loading {', '.join(folders)} and the reward model", flush=True)
    chat_models = ChatModels(folders, reward, precision, cpu_kernels)
    return ChatController(chat_models, run / "pairs", Votes(votes), digests)


def model_digest(folder: Path) -> str:
    """Return the start of the manifest's SHA-256, which identifies a model in a vote; '' if no stage made it."""
    manifest = folder / MANIFEST
    return hash_file(manifest)[:DIGEST_CHARACTERS] if manifest.is_file() else ""
