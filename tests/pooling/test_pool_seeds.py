"""Evaluations of several seeds to the page: its numbers against NumPy, its words, and what it refuses."""

import html
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from stages import pool_seeds
from stages.recipe.sections.evaluate import Evaluate
from tests.helpers import finished_run

GAINS = {0: [1.0, 2.0, None], 1: [0.0, 1.0, 2.0], 2: [3.0, 3.0, 3.0]}


def save_evaluation(folder, seed: int, moved: tuple[str, ...] = (), gold: float = 0.3) -> str:
    """Save an evaluation whose PPO gains GAINS[seed] in gold at its best, and whose monitors have moved."""
    metrics = finished_run.metrics(learnt=0.5, gold=gold)
    for name in moved:
        metrics["comparisons"]["ppo"]["changes"][name] = finished_run.around(1.0)
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text(json.dumps(metrics))
    (folder / "manifest.json").write_text(json.dumps({"stage": "evaluate", "config": {"seed": seed}}))
    parquet.write_table(pa.Table.from_pylist([
        {"gold_ppo_best": None if gain is None else 1 + gain, "gold_sft_best": None if gain is None else 1.0,
         "reward_ppo_best": 0.5, "reward_sft_best": 0.1 * number}
        for number, gain in enumerate(GAINS[seed])]), folder / "samples.parquet")
    return str(folder / "manifest.json")


@pytest.fixture
def evaluations(tmp_path):
    return [save_evaluation(tmp_path / f"seed-{seed}/evaluate", seed, moved) for seed, moved in (
        (0, ()), (1, ("code_share", "repetition")), (2, ("code_share",)))]


@pytest.fixture
def out(tmp_path):
    (tmp_path / "seeds").mkdir()
    return tmp_path / "seeds"


def test_gains_verdicts_and_page(evaluations, out):
    headline = pool_seeds.run(Evaluate(bootstrap_samples=200), out, evaluate=evaluations)
    metrics = json.loads((out / "metrics.json").read_text())
    row = metrics["policies"]["ppo"]["gains"]["gold"]
    means = [1.5, 1.0, 3.0]
    assert [row["per_seed"][f"seed {seed}"]["mean"] for seed in GAINS] == means
    assert row["within_seeds"]["mean"] == row["over_seeds"]["mean"] == headline["ppo_gold_difference"]
    assert headline["ppo_gold_difference"] == pytest.approx(np.mean(means)) and headline["seeds"] == 3
    widths = [row[key]["high"] - row[key]["low"] for key in ("within_seeds", "over_seeds")]
    assert widths[0] < widths[1]
    hacking = metrics["policies"]["ppo"]["hacking"]
    assert [each["kind"] for each in hacking["per_seed"].values()] == ["right", "false alarm", "right"]
    assert (hacking["false_alarms"]["mean"], hacking["misses"]) == (pytest.approx(1 / 3), None)
    text = html.unescape(re.sub(r"<[^>]+>", "|", (out / "report.html").read_text()))
    for words in ("3 seeds of one recipe", "0 of 3 seeds flagged; without gold 1 of 3: 1 false alarms, 0 misses",
                  "gold at best temperature, PPO - SFT, over seeds", "|seed 0|", "gold, against greedy SFT"):
        assert words in text, words


def test_a_number_that_a_seed_lacks_is_not_pooled(tmp_path, out, evaluations):
    file = tmp_path / "seed-0/evaluate/metrics.json"
    metrics = json.loads(file.read_text())
    metrics["reward_model"]["accuracy"] = None
    file.write_text(json.dumps(metrics))
    pool_seeds.run(Evaluate(bootstrap_samples=20), out, evaluate=evaluations)
    row = json.loads((out / "metrics.json").read_text())["reward_model"]["accuracy"]
    assert row["over_seeds"] is None and row["per_seed"]["seed 1"]["mean"] == 0.72


def test_a_seed_that_is_given_twice_is_refused(evaluations, out):
    with pytest.raises(ValueError, match="two evaluations of one seed: seed 0, seed 1, seed 0"):
        pool_seeds.run(Evaluate(), out, evaluate=[*evaluations[:2], evaluations[0]])


def test_a_control_is_pooled_as_what_ppo_is_compared_with(tmp_path, out, evaluations):
    for seed, file in enumerate(sorted(tmp_path.glob("*/evaluate/metrics.json"))):
        metrics = json.loads(file.read_text())
        metrics["comparisons"]["ppo-length"] = metrics["comparisons"]["ppo"]
        metrics["at_best"]["ppo"]["ppo-length_best"] = finished_run.differences(gold=0.1 * seed)["sft_best"]
        metrics["length_control"] = {"ppo": {"within_bins": {"ppo": {"within": finished_run.around(0.2 * seed)}}}}
        file.write_text(json.dumps(metrics))
    pool_seeds.run(Evaluate(bootstrap_samples=200), out, evaluate=evaluations)
    policies = json.loads((out / "metrics.json").read_text())["policies"]
    assert list(policies) == ["ppo"]
    control = policies["ppo"]["against"]["gold, against PPO on length alone"]["over_seeds"]
    assert control["mean"] == pytest.approx(0.1) and control["low"] < 0
    assert policies["ppo"]["numbers"]["reward gain at equal length"]["over_seeds"]["mean"] == pytest.approx(0.2)
    assert "PPO on length alone" in (out / "report.html").read_text()
