"""Which numbers of which history are drawn: stage, key, title. One line each."""

import json
from pathlib import Path

from stages.text.figures import Curves

HISTORY = "history.jsonl"
# stage: (file name, title, x, {label: key})
DRAWN = {
    "base": [("base-loss", "Base: training loss, nats a token", "step", {"loss": "loss"})],
    "sft": [("sft-loss", "SFT: training loss, nats a token", "step", {"loss": "loss"}),
            ("sft-perplexity", "SFT: perplexity of held-out answers", "step", {"perplexity": "validation_perplexity"})],
    "reward": [("reward-loss", "Reward: training loss", "step", {"loss": "loss"}),
               ("reward-accuracy", "Reward: accuracy on validation pairs", "step",
                {"accuracy": "validation_accuracy"})],
    "ppo": [("ppo-reward", "PPO: mean reward", "iteration", {"rollouts": "reward", "validation": "validation_reward"}),
            ("ppo-kl", "PPO: KL to SFT, nats a response", "iteration",
             {"rollouts": "kl", "validation": "validation_kl"}),
            ("ppo-entropy", "PPO: entropy, nats a token", "iteration", {"entropy": "entropy"}),
            ("ppo-length", "PPO: response length, tokens", "iteration",
             {"rollouts": "response_tokens", "validation": "validation_response_tokens"}),
            ("ppo-eos", "PPO: share ended by EOS", "iteration",
             {"rollouts": "eos_rate", "validation": "validation_eos_rate"})],
}


def history_of(artifact: Path) -> list[dict]:
    """The rows of an artifact's history; none when it has no history (a base that was not trained here)."""
    path = Path(artifact) / HISTORY
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def curves_of(stage: str, history: list[dict]) -> dict[str, Curves]:
    """File name to figure, for all that this history has numbers for."""
    found = {}
    for name, title, x, keys in DRAWN[stage]:
        lines = {label: [(row[x], row[key]) for row in history if x in row and key in row]
                 for label, key in keys.items()}
        if lines := {label: points for label, points in lines.items() if points}:
            found[name] = Curves(title, x, lines)
    return found
