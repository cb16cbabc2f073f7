"""The outer loop: when it saves."""

from types import SimpleNamespace

import pytest

from stages.recipe.recipe import select_settings
from stages.recipe.sections.ppo import Ppo
from stages.rl.training_loop import LoopSettings, TrainingLoop
from stages.runtime.stopping import StopRequest
from stages.training import checkpoint_plan


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
    monkeypatch.setattr(checkpoint_plan, "monotonic", lambda: clock[0])
    loop = Loop(clock, iterations=12, save_every_iterations=5, evaluate_every_iterations=4, save_every_minutes=minutes)
    loop._iterate(StopRequest())
    assert loop.saved == saved and loop.evaluated == [4, 8, 12]
