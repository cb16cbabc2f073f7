"""The healthy bands: the same in docs/metrics.md and in the data, and the page lists what lies outside."""

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

from stages.reporting.healthy_bands import (
    BANDS,
    Band,
    measure_evaluation,
    measure_training,
    render_outside,
)
from tests.helpers.finished_run import around, artifacts, draw_dots, metrics, page_of, sample, with_summary, write

DOCS = Path(__file__).parents[2] / "docs/metrics.md"
BAND = re.compile(r"\b(?:above|below) \d+(?:\.\d+)?(?:, below \d+(?:\.\d+)?)?")


def documented() -> dict[str, str]:
    """Each name of docs/metrics.md with its cells `healthy`: a row for each meaning."""
    rows = [line.strip("| \n").split(" | ") for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    cells = defaultdict(str)
    for row in rows:
        for name in re.findall(r"`(\w+)`", row[0]):
            cells[name] += "; ".join(row[3:])
    return cells


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
def test_each_band_is_in_the_docs(band):
    assert band.format() in BAND.findall(documented()[band.name])


def test_each_number_of_the_column_healthy_is_a_band():
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 30
    for row in rows:
        names = re.findall(r"`(\w+)`", row.split(" | ")[0])
        for words in BAND.findall(row.split(" | ")[3] if row.count(" | ") > 2 else ""):
            assert words in {BANDS[name].format() for name in names if name in BANDS}, row


def test_a_band_leaves_out_its_ends_and_nan():
    band = Band("x", 0, 0.2, "")
    assert [band.contains(value) for value in (-1, 0, 0.001, 0.1, 0.2, 0.3, float("nan"))] == [
        False, False, True, True, False, False, False]
    assert Band("x", None, 1, "").contains(-9) and not Band("x", None, 1, "").contains(float("nan"))
    assert (band.format(), Band("x", 0.3, None, "").format()) == ("above 0, below 0.2", "above 0.3")


def test_a_history_is_summarised_over_its_end_or_the_whole_run():
    rows = [{"iteration": i, "x": float(i)} for i in range(20)] + [{"validation_y": 1.0}]
    assert Band("x", 0, 1, "").summarise(rows) == (18 + 19) / 2
    assert Band("x", 0, 1, "", "mean").summarise(rows) == sum(range(20)) / 20
    assert Band("x", 0, 1, "", "sum").summarise(rows) == sum(range(20))
    assert Band("validation_y", 0, 1, "").summarise(rows) == 1 and Band("z", 0, 1, "").summarise(rows) is None
    assert Band("x", 0, 1, "").summarise(rows[:3]) == 2


HEALTHY = {"eos_rate": 0.99, "clip_fraction": 0.1, "kl_per_token": 0.02, "explained_variance": 0.5, "reward_std": 1.0,
           "distinct_responses": 0.95, "update_stopped_early": 0.0, "skipped": 0, "loss": 9.0}


@pytest.mark.parametrize(("name", "value"), [
    ("eos_rate", 0.9), ("clip_fraction", 0.0), ("clip_fraction", 0.2), ("kl_per_token", 0.1), ("reward_std", 0.0),
    ("explained_variance", 0.29), ("explained_variance", -3.0), ("distinct_responses", 0.5),
    ("update_stopped_early", 0.6), ("skipped", 1)])
def test_training_outside_is_listed_with_band_and_advice(name, value):
    inside = measure_training("PPO", {}, [{"iteration": 1} | HEALTHY])
    assert len(inside) == len(HEALTHY) - 1 and not [number for number in inside if number.is_outside]
    assert f"all {len(inside)} numbers" in render_outside(inside)
    measured = measure_training("PPO", {}, [{"iteration": 1} | HEALTHY | {name: value}])
    assert [number.band.name for number in measured if number.is_outside] == [name]
    html = render_outside(measured)
    assert html.count("<code>") == 1
    for words in (name, "PPO", f"{value:.3g}", BANDS[name].format(), BANDS[name].words.split("'")[0]):
        assert words in html


def test_one_skipped_minibatch_in_a_long_run_counts():
    rows = [{"iteration": i, "skipped": int(i == 3)} for i in range(100)]
    (number,) = measure_training("PPO", {}, rows)
    assert number.value == 1 and number.is_outside


def test_the_manifest_has_the_numbers_of_the_best_state():
    history = [{"step": 1, "validation_accuracy_low": 0.7}, {"step": 2, "validation_accuracy_low": 0.4}]
    (number,) = measure_training("Reward model", {"validation_accuracy_low": 0.7, "word": "x"}, history)
    assert number.value == 0.7 and not number.is_outside
    (last,) = measure_training("Reward model", {}, history)
    assert last.is_outside


def numbers(eos: float = 0.98, distinct: float = 0.95, calibration: float = 0.05, accuracy: float = 0.72,
            above: float = 0.1) -> dict:
    made = metrics(above=above)
    for policy in made["policies"].values():
        policy |= {"eos_rate": eos, "distinct_responses": distinct}
    made["reward_model"] |= {"accuracy": around(accuracy), "calibration": {"expected_error": calibration, "bins": []}}
    return with_summary(made)


@pytest.mark.parametrize(("change", "name", "count"), [
    ({}, None, 0), ({"eos": 0.5}, "eos_rate", 2), ({"distinct": 0.5}, "distinct_responses", 2),
    ({"calibration": 0.2}, "validation_calibration_error", 1), ({"accuracy": 0.46}, "validation_accuracy_low", 1),
    ({"above": 0.01}, "validation_above_baseline_low", 1)])
def test_the_evaluation_outside_is_listed(change, name, count):
    made = numbers(**change)
    measured = measure_evaluation(made)
    assert [number.band.name for number in measured if number.is_outside] == [name] * count


def test_without_held_out_pairs_only_policies_are_measured():
    made = numbers()
    made["reward_model"] |= {"accuracy": None, "best_cheap_baseline": None, "above_best_cheap_baseline": None,
                             "both_have_code": None, "better_is_later": None, "pairs": 0,
                             "calibration": {"expected_error": 0.0, "bins": []}}
    assert {number.where for number in measure_evaluation(made)} == {"SFT, evaluation", "PPO, evaluation"}


def test_the_page_lists_what_is_outside(tmp_path, monkeypatch):
    draw_dots(monkeypatch)
    folders = artifacts(tmp_path)
    write(folders, numbers(), [sample(1)])
    assert re.search(r"None: all \d+ numbers", page_of(folders, tmp_path))
    history = folders["policy"]["ppo"] / "history.jsonl"
    history.write_text(history.read_text() + json.dumps({"iteration": 2, "explained_variance": 0.03}) + "\n")
    page = page_of(folders, tmp_path)
    assert "<code>explained_variance</code>, PPO" in page and "above 0.3" in page and "The critic explains" in page
