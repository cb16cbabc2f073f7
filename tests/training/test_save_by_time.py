"""Checkpoints by time: saved between the others, evaluated never, and the result is the same bit for bit."""

import pytest
import torch

from stages.training import checkpoint_plan
from stages.training.callbacks import Evaluation
from stages.training.checkpoint import find_damage, list_checkpoints
from stages.training.checkpoint_plan import CheckpointTimer
from stages.training.trainer import CHECKPOINTS, TrainerSettings, train

MINUTES = 30.0
SETTINGS = {"batch": 2, "microbatch": 1, "learning_rate": 0.1, "schedule": "cosine", "weight_decay": 0.0, "seed": 0,
            "save_every_steps": 5, "max_steps": 12}


class KillError(RuntimeError):
    """What ends a training in the midst of a step."""


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(checkpoint_plan, "monotonic", lambda: now[0])
    return now


def run(out, clock, step_minutes: float, save_every_minutes: float | None, killed_at: int | None = None):
    """Fit a line in steps of so many minutes; return what was logged, the weights, and the steps that were evaluated.
    """
    torch.manual_seed(0)
    model, evaluated = torch.nn.Linear(3, 1), []
    items = torch.randn(24, 3, generator=torch.Generator().manual_seed(1)).tolist()

    def after_step(step: int) -> None:
        clock[0] += 60 * step_minutes
        if step == killed_at:
            raise KillError

    def measure(step: int) -> dict:
        evaluated.append(step)
        return {"validation": -float(abs(step - 5))}  # step 5 is the best

    def loss(rows):
        return (model(torch.tensor(rows)).squeeze(-1) - torch.tensor(rows).sum(-1)).square().sum()

    out.mkdir(exist_ok=True)
    train(model, items, lambda rows: {"content": rows, "items": len(rows)}, loss,
          TrainerSettings(**SETTINGS, save_every_minutes=save_every_minutes), out, "line",
          Evaluation(measure, 5, lambda row: row["validation"]), after_step=after_step)
    return (out / "history.jsonl").read_text(), {name: x.tolist() for name, x in model.state_dict().items()}, evaluated


def saved_steps(out) -> list[int]:
    return [int(folder.name.split("-")[1]) for folder in list_checkpoints(out / CHECKPOINTS)]


@pytest.mark.parametrize("killed_at", [4, 9])
def test_resumed_from_a_checkpoint_by_time_equals_a_run_without_one(tmp_path, clock, killed_at):
    with pytest.raises(KillError):
        run(tmp_path / "cut", clock, 11.0, MINUTES, killed_at)
    saved = {4: [3], 9: [5, 8]}[killed_at]  # at 33 min; 33 min after the one of step 5
    last = saved[-1]
    assert saved_steps(tmp_path / "cut") == saved
    assert find_damage(list_checkpoints(tmp_path / "cut" / CHECKPOINTS)[-1]) is None
    history, weights, evaluated = run(tmp_path / "cut", clock, 11.0, None)
    assert evaluated == [step for step in (5, 10, 12) if step > last], "a checkpoint by time evaluates nothing"
    whole = run(tmp_path / "whole", clock, 11.0, None)
    assert (history, weights) == whole[:2]


def test_a_run_with_checkpoints_by_time_ends_as_one_without(tmp_path, clock):
    timed, plain = (run(tmp_path / str(minutes), clock, 40.0, minutes) for minutes in (MINUTES, None))
    assert timed == plain and timed[2] == [5, 10, 12]
    assert saved_steps(tmp_path / str(MINUTES)) == [11, 12] and saved_steps(tmp_path / "None") == [10, 12]


def test_only_the_first_process_reads_its_clock(clock, monkeypatch):
    timer = CheckpointTimer(MINUTES)
    clock[0] = 60 * MINUTES
    assert timer.is_due()
    monkeypatch.setattr(checkpoint_plan, "is_main", lambda: False)
    assert not timer.is_due()


def test_the_time_counts_from_the_last_checkpoint(clock):
    timer, never = CheckpointTimer(MINUTES), CheckpointTimer(None)
    clock[0] = 60 * MINUTES - 1
    assert not timer.is_due()
    clock[0] += 1
    assert timer.is_due() and not never.is_due()
    timer.restart()
    assert not timer.is_due()
