"""A signal between two rows of the history: a sealed checkpoint, and the resumed run logs what the whole one does."""

import signal

import pytest
import torch

from stages.runtime import stopping
from stages.training.callbacks import Evaluation
from stages.training.checkpoint import find_damage, list_checkpoints
from stages.training.trainer import CHECKPOINTS, TrainerSettings, train

SETTINGS = TrainerSettings(batch=2, microbatch=1, learning_rate=0.1, schedule="cosine", weight_decay=0.0, seed=0,
                           save_every_steps=5, max_steps=12, warmup_steps=0)


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in stopping.SIGNALS}
    stopping.install()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(out, signal_at: int | None = None) -> tuple[list[dict], dict]:
    """Fit a line in 12 steps, of which a row is logged every 5; a signal comes at one of them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    items = torch.randn(24, 3, generator=torch.Generator().manual_seed(1)).tolist()

    def measure(step: int) -> dict:
        if step == signal_at:
            signal.raise_signal(signal.SIGTERM)
        return {"validation": float(step)}

    def loss(rows):
        return (model(torch.tensor(rows)).squeeze(-1) - torch.tensor(rows).sum(-1)).square().sum()

    out.mkdir(exist_ok=True)
    history = train(model, items, lambda rows: {"content": rows, "items": len(rows)}, loss, SETTINGS, out, "line",
                    Evaluation(measure, 1))
    return history, {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("step", [3, 10])
def test_stopped_and_resumed_equals_uninterrupted(tmp_path, handlers, step):
    with pytest.raises(stopping.Stopped) as stopped:
        run(tmp_path / "cut", signal_at=step)
    assert stopped.value.exit_code == 143 and f"at step {step}, with a checkpoint" in stopped.value.describe()
    newest = list_checkpoints(tmp_path / "cut" / CHECKPOINTS)[-1]
    assert newest.name == f"checkpoint-{step}" and find_damage(newest) is None
    resumed, whole = run(tmp_path / "cut"), run(tmp_path / "whole")
    assert resumed == whole
    logs = [(tmp_path / name / "history.jsonl").read_text() for name in ("cut", "whole")]
    assert logs[0] == logs[1] and logs[0].count('"loss"') == 3


def test_a_signal_at_the_last_step_lets_training_end(tmp_path, handlers):
    assert run(tmp_path / "last", signal_at=12) == run(tmp_path / "whole")
