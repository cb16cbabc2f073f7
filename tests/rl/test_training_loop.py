"""The outer loop: when it saves."""

from types import SimpleNamespace

import pytest
import torch

from stages.recipe.recipe import select_settings
from stages.recipe.sections.ppo import Ppo
from stages.rl.training_loop import LoopSettings, TrainingLoop
from stages.runtime.stopping import StopRequest
from stages.training import checkpoint_timer


class Loop(TrainingLoop):
    """A loop of iterations that each take 13 minutes, and compute nothing."""

    def __init__(self, clock, **settings):
        self.clock, self.settings = clock, LoopSettings(**select_settings(LoopSettings, Ppo(**settings)))
        self.stopping, self.best, self.name = SimpleNamespace(reason=None), {"iteration": 0}, "ppo"
        self.logger = SimpleNamespace(progress=lambda *_, **__: SimpleNamespace(
            advance=lambda **_: None, finish=lambda **_: None))
        self.iteration, self.saved, self.evaluated = 0, [], []

    def _step(self):
        self.clock[0] += 13 * 60
        self.iteration += 1
        return {"reward": 0.0, "kl": 0.0, "beta": 0.0}

    def _evaluate(self):
        self.evaluated.append(self.iteration)

    def _save_checkpoint(self):
        self.saved.append(self.iteration)


@pytest.mark.parametrize(("minutes", "saved"), [(None, [5, 10]), (30.0, [3, 5, 8, 10]), (1.0, list(range(1, 13)))])
def test_checkpoints_by_time_come_beside_the_others_and_evaluate_nothing(monkeypatch, minutes, saved):
    clock = [0.0]
    monkeypatch.setattr(checkpoint_timer, "monotonic", lambda: clock[0])
    loop = Loop(clock, iterations=12, save_every_iterations=5, evaluate_every_iterations=4, save_every_minutes=minutes)
    loop._iterate(StopRequest())
    assert loop.saved == saved and loop.evaluated == [4, 8, 12]


class AveragedLoop(Loop):
    """A loop of two weights, which it shows when it evaluates."""

    def __init__(self, weights, **settings):
        super().__init__([0.0], **settings)
        self.weight, self.weights, self.average = torch.nn.Parameter(torch.zeros(2)), weights, {}
        self.trainer = SimpleNamespace(policy=SimpleNamespace(trainable_parameters=lambda: {"w": self.weight}))

    def _step(self):
        with torch.no_grad():
            self.weight.copy_(self.weights[self.iteration])
        row = super()._step()
        self._average_weights()
        return row

    def _evaluate(self):
        with self._averaged():
            self.evaluated.append(self.weight.detach().clone())


def average_in_plain_loops(weights: list[list[float]], decay: float) -> list[float]:
    """Return the mean of the weights, as long as one of them counts more than 1 - decay; then the moving average."""
    average = [0.0] * len(weights[0])
    for count, row in enumerate(weights, start=1):
        share = max(1 - decay, 1 / count)
        average = [(1 - share) * old + share * new for old, new in zip(average, row, strict=True)]
    return average


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_the_averaged_policy_is_evaluated_and_the_last_one_trains_on(decay):
    weights = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    loop = AveragedLoop(weights, iterations=6, evaluate_every_iterations=3, averaging_decay=decay)
    loop._iterate(StopRequest())
    expected = [average_in_plain_loops(weights[:count].tolist(), decay) for count in (3, 6)]
    torch.testing.assert_close(torch.stack(loop.evaluated), torch.tensor(expected))
    assert torch.equal(loop.weight.detach(), weights[-1])


def test_without_an_average_the_last_policy_is_evaluated():
    weights = torch.ones(2, 2)
    loop = AveragedLoop(weights, iterations=2, evaluate_every_iterations=2)
    loop._iterate(StopRequest())
    assert torch.equal(loop.evaluated[0], weights[1]) and not loop.average
