"""The outer loop: when it saves, and which temperature it ends with."""

import json
from math import inf, nan
from types import SimpleNamespace

import pytest

from stages.recipe.recipe import select_settings
from stages.recipe.sections.ppo import Ppo
from stages.rl.early_stopping import EarlyStopping, StopRules
from stages.rl.training_loop import FINAL_TEMPERATURES, LoopSettings, TrainingLoop
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


class Cooling(TrainingLoop):
    """The end of a loop whose policy has a given (score, KL) at each temperature."""

    def __init__(self, out, results, best_iteration):
        self.results, self.out, self.name = results, out, "ppo"
        self.settings = SimpleNamespace(final_temperatures=tuple(results))
        self.trainer = SimpleNamespace(policy=SimpleNamespace(final_temperature=1.0))
        self.stopping = EarlyStopping(StopRules(max_kl_nats=5.0, patience_evaluations=None))
        self.best = {"selection_score": 0.5, "kl": 2.0, "iteration": best_iteration}

    def _sample_validation(self):
        return self.trainer.policy.final_temperature

    def _measure(self, rollout):
        score, kl = self.results[rollout]
        return {"selection_score": score, "kl": kl}, None


@pytest.mark.parametrize(("results", "best_iteration", "chosen"), [
    ({0.9: (0.6, 2.1), 0.8: (0.7, 2.2), 0.7: (0.65, 2.3)}, 9, 0.8),
    ({0.9: (0.4, 2.1), 0.8: (0.3, 2.2)}, 9, 1.0),
    ({0.9: (0.6, 2.1), 0.8: (0.7, 5.1)}, 9, 0.9),  # above max_kl_nats
    ({0.9: (nan, 2.1), 0.8: (0.9, nan), 0.7: (0.6, inf)}, 9, 1.0),
    ({0.9: (0.6, 2.1)}, 0, 1.0),  # the start model
    ({}, 9, 1.0),
])
def test_the_final_temperature_has_the_best_score_within_the_kl(tmp_path, results, best_iteration, chosen):
    loop = Cooling(tmp_path, results, best_iteration)
    loop._choose_temperature()
    assert loop.trainer.policy.final_temperature == chosen
    score, kl = results[chosen] if chosen != 1 else (0.5, 2.0)
    assert (loop.best["selection_score"], loop.best["kl"], loop.best["iteration"]) == (score, kl, best_iteration)
    if best_iteration and results:
        rows = json.loads((tmp_path / FINAL_TEMPERATURES).read_text())
        assert [row["final_temperature"] for row in rows] == list(results)
    else:
        assert not (tmp_path / FINAL_TEMPERATURES).exists()
