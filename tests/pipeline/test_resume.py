"""A kill or a stop in the middle of a stage, then the same command: the same artifact (M4, M5)."""

import json
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stages.artifacts.artifact import read_manifest
from tests.helpers import tiny_models
from tests.helpers.library_forks import LibraryForks

RECIPE = """
sft: {precision: fp32, sequence_length_tokens: 64, batch_sequences: 2, microbatch_sequences: 1, max_steps: 20,
      learning_rate: 1.0e-3, warmup_steps: 2, save_every_steps: 5, evaluate_every_steps: 10}
reward: {precision: fp32, batch_pairs: 2, microbatch_pairs: 1, epochs: 1.0, learning_rate: 1.0e-3, save_every_steps: 5,
         validation_share: 0.2}
dpo: {precision: fp32, batch_pairs: 4, microbatch_pairs: 2, epochs: 1.0, learning_rate: 1.0e-3, save_every_steps: 5,
      warmup_steps: 2, validation_share: 0.2, lora: {dropout: 0.1}}
ppo: {precision: fp32, iterations: 8, rollout_prompts: 8, minibatch_prompts: 4, microbatch_prompts: 4, epochs: 2,
      max_response_tokens: 8, learning_rate: 1.0e-3, validation_prompts: 8, evaluate_every_iterations: 4,
      save_every_iterations: 3, require_reward: none, reward_scaling: running, optimizer: adamw_8bit,
      critic_warmup_iterations: 2, final_temperatures: [1.1, 0.95, 0.9]}
rloo: {precision: fp32, iterations: 6, rollout_prompts: 4, responses_per_prompt: 2, minibatch_prompts: 2,
       microbatch_prompts: 2,
       max_response_tokens: 8, learning_rate: 1.0e-3, validation_prompts: 8, evaluate_every_iterations: 4,
       save_every_iterations: 3, require_reward: none, optimizer: adamw_8bit}
grpo: {precision: fp32, iterations: 6, rollout_prompts: 4, responses_per_prompt: 2, minibatch_prompts: 2,
       microbatch_prompts: 2,
       max_response_tokens: 8, learning_rate: 1.0e-3, validation_prompts: 8, evaluate_every_iterations: 4,
       save_every_iterations: 3, require_reward: none, epochs: 2}
best_of_n: {precision: fp32, n: 4, save_every_prompts: 3, batch_prompts: 1, max_response_tokens: 8,
            require_reward: none}
expert_iteration: {precision: fp32, rounds: 2, n: 4, save_every_prompts: 8, max_response_tokens: 8, epochs: 2,
                   sequence_length_tokens: 64, batch_sequences: 2, microbatch_sequences: 1, learning_rate: 1.0e-3,
                   save_every_steps: 3, validation_prompts: 8, require_reward: none, patience_rounds: null}
ilql: {precision: fp32, batch_answers: 4, microbatch_answers: 2, max_steps: 16, learning_rate: 1.0e-3, target_rate: 0.2,
       target_every_steps: 2, max_length_tokens: 64, save_every_steps: 5, evaluate_every_steps: 10}
"""
CHANGING = {"timing.jsonl"}  # seconds: the only file that may differ
BY_TIME = ("--save-every-minutes", "1e-9")  # a checkpoint after each step


@pytest.fixture(scope="module")
def others():
    """Forks with another order of sets of strings than those of `library_forks`, as two real processes have."""
    with LibraryForks() as forks:
        yield forks


@pytest.fixture(scope="module")
def made(tmp_path_factory, library_forks):
    """A recipe and the inputs of the stages."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "recipe.yaml").write_text(RECIPE)
    tiny_models.save_base(folder / "base")
    tiny_models.save_pairs(folder / "pairs")
    run(library_forks, folder, "reward", "scorer", base="base", pairs="pairs")
    run(library_forks, folder, "merge", "scorer-merged", base="base", adapter="scorer", pairs="pairs")
    return folder


def command(folder: Path, stage: str, out: str, flags: tuple[str, ...] = (), **inputs: str) -> list[str]:
    named = [part for name, value in inputs.items() for part in (f"--{name}", str(folder / value))]
    return [f"stages.{stage}", "--recipe", str(folder / "recipe.yaml"), *named, *flags, "--out", str(folder / out)]


def run(forks: LibraryForks, folder: Path, stage: str, out: str, flags: tuple[str, ...] = (), **inputs: str) -> str:
    done = forks.run(command(folder, stage, out, flags, **inputs))
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr


def killed_after_a_checkpoint(forks: LibraryForks, folder: Path, stage: str, out: str, mark: str,
                              number=signal.SIGKILL, flags: tuple[str, ...] = (), **inputs: str) -> tuple[int, str]:
    """Return the exit code and the last line of the stage."""
    process = forks.start(command(folder, stage, out, flags, **inputs))
    partial = folder / f"{out}.partial"
    deadline = time.monotonic() + 120
    while not list(partial.glob(mark)):
        assert process.poll() is None and time.monotonic() < deadline, "it ended before it could be killed"
        time.sleep(0.002)
    process.send_signal(number)
    _, lines = process.communicate(timeout=60)
    assert partial.exists() and not (folder / out).exists()
    return process.returncode, lines.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "stage, number, mark, inputs",
    [
        ("sft", signal.SIGTERM, "checkpoints/*/complete.json", {"base": "base", "pairs": "pairs"}),
        ("reward", signal.SIGINT, "checkpoints/*/complete.json", {"base": "base", "pairs": "pairs"}),
        ("judge", signal.SIGKILL, "checkpoints/*/complete.json", {"base": "base", "pairs": "pairs"}),
        ("dpo", signal.SIGKILL, "checkpoints/*/complete.json", {"policy": "base", "pairs": "pairs"}),
        ("ppo", signal.SIGTERM, "checkpoint-*/complete.json",
         {"policy": "base", "reward": "scorer-merged", "pairs": "pairs"}),
        ("rloo", signal.SIGKILL, "checkpoint-*/complete.json",
         {"policy": "base", "reward": "scorer-merged", "pairs": "pairs"}),
        ("grpo", signal.SIGKILL, "checkpoint-*/complete.json",
         {"policy": "base", "reward": "scorer-merged", "pairs": "pairs"}),
        ("expert_iteration", signal.SIGKILL, "round-0002/checkpoints/*/complete.json",
         {"policy": "base", "reward": "scorer-merged", "pairs": "pairs"}),
        ("ilql", signal.SIGKILL, "checkpoints/*/complete.json", {"policy": "base", "pairs": "pairs"}),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(library_forks, others, made, stage, number, mark, inputs):
    """Although the run that is killed saves after every step, and the other one does not."""
    run(others, made, stage, f"{stage}-whole", **inputs)
    code, last_line = killed_after_a_checkpoint(library_forks, made, stage, f"{stage}-cut", mark, number, BY_TIME,
                                                **inputs)
    if number == signal.SIGKILL:
        assert code == -number
    else:
        stopped = re.fullmatch(rf"{stage}: stopped by {number.name} at (step|iteration) (\d+), with a checkpoint: .*",
                               last_line)
        assert code == 128 + number and stopped
        newest = max((made / f"{stage}-cut.partial").glob(mark), key=lambda file: file.stat().st_mtime).parent.name
        assert int(newest.removeprefix("checkpoint-")) == int(stopped[2])
    said = run(library_forks, made, stage, f"{stage}-cut", BY_TIME, **inputs)
    whole, cut = (read_manifest(made / f"{stage}-{way}") for way in ("whole", "cut"))
    assert {name: f["sha256"] for name, f in whole["files"].items() if name not in CHANGING} == {
        name: f["sha256"] for name, f in cut["files"].items() if name not in CHANGING
    }
    assert "adapter_model.safetensors" in whole["files"] and "history.jsonl" in whole["files"]
    assert whole["metrics"] == cut["metrics"] and "resumed at" in said
    assert ("final_temperatures.json" in whole["files"]) == (stage == "ppo")
    assert not (made / f"{stage}-cut.partial").exists()


def test_best_of_n_killed_and_resumed_equals_uninterrupted(library_forks, others, made):
    inputs = {"policy": "base", "reward": "scorer-merged", "pairs": "pairs"}
    run(others, made, "best_of_n", "best-whole", **inputs)
    killed_after_a_checkpoint(library_forks, made, "best_of_n", "best-cut", "parts/*/complete.json", **inputs)
    run(library_forks, made, "best_of_n", "best-cut", **inputs)
    whole, cut = (read_manifest(made / f"best-{way}") for way in ("whole", "cut"))
    assert whole["files"] == cut["files"] and whole["metrics"] == cut["metrics"]


def test_a_flipped_byte_in_a_checkpoint_is_noticed_and_what_is_before_it_goes_on(library_forks, made):
    killed_after_a_checkpoint(library_forks, made, "sft", "sft-flipped", "checkpoints/checkpoint-*/complete.json",
                              base="base", pairs="pairs")
    checkpoints = (made / "sft-flipped.partial/checkpoints").glob("*/optimizer.pt")
    newest = max(checkpoints, key=lambda file: file.stat().st_mtime)
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    said = run(library_forks, made, "sft", "sft-flipped", base="base", pairs="pairs")
    assert f"{newest.parent.name} is damaged (optimizer.pt has changed)" in said
    whole, flipped = (read_manifest(made / name)["files"] for name in ("sft-whole", "sft-flipped"))
    assert whole["adapter_model.safetensors"] == flipped["adapter_model.safetensors"]


def test_history_holds_every_iteration_once(made):
    rows = [json.loads(line) for line in (made / "ppo-cut" / "history.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if "policy_loss" in row] == list(range(1, 9))
    assert [row["iteration"] for row in rows if "validation_reward" in row] == [0, 4, 8]


def test_no_pickle_in_any_artifact(made):
    files = [f for f in made.rglob("*") if f.is_file()]
    assert files and not [f for f in files if f.suffix in {".pt", ".bin", ".pkl", ".pth"}]


def test_a_base_weight_never_moves(made):
    """The adapters hold LoRA matrices and the score head, nothing of the base (CORRECTNESS S5); but a policy with a
    final temperature has the base's final norm, divided by it."""
    base = load_file(made / "base/model.safetensors")["model.norm.weight"]
    for stage in ("sft-whole", "reward-whole", "ppo-whole"):
        tensors = load_file(made / stage / "adapter_model.safetensors")
        temperature = read_manifest(made / stage)["metrics"].get("final_temperature", 1.0)
        norm = tensors.pop("base_model.model.model.norm.weight", None)
        assert (norm is None) == (temperature == 1)
        assert norm is None or torch.allclose(norm, base / temperature)
        assert all("lora_" in name or "score" in name for name in tensors)
