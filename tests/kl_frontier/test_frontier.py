"""The frontier: analysis, words and page, of evaluations whose gains follow known curves."""

import json
import re
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from stages import frontier
from stages.command_line import command
from stages.evaluation.statistics import bootstrap_mean
from stages.kl_frontier import wording
from stages.kl_frontier.analysis import _average_curves
from stages.kl_frontier.page import _figure
from stages.pooling.statistics import widen
from stages.recipe.sections.evaluate import Frontier
from tests.helpers import finished_run, frontier_runs

CONFIG = Frontier(bootstrap_samples=200)


class NoFigures:
    """In the place of a FigureFolder: drawing takes most of the time."""

    count = 0

    def __init__(self, *arguments):
        pass

    def draw(self, figures: dict) -> str:
        return ""


def make_page(place: Path, seeds: int = 1, **options) -> tuple[dict, str]:
    """Make the frontier of synthetic evaluations; return its metrics and page."""
    folders, models = frontier_runs.write_trainings(place / "trained")
    evaluated = [str(frontier_runs.write_evaluation(place / f"evaluate-{seed}", seed=seed, models=models, **options))
                 for seed in range(seeds)]
    out = place / "out"
    out.mkdir()
    with patch.object(frontier, "FigureFolder", NoFigures):
        frontier.run(CONFIG, out, evaluate=evaluated, trained=[str(folder) for folder in folders])
    return json.loads((out / "metrics.json").read_text()), (out / "frontier.html").read_text()


@pytest.fixture(scope="module")
def precise(tmp_path_factory) -> tuple[dict, str, Path]:
    """One seed with little noise: everything can be told apart."""
    place = tmp_path_factory.mktemp("precise")
    return *make_page(place, noise=0.02, questions=300), place


def test_the_fits_recover_the_curves(precise):
    metrics = precise[0]
    for family in ("best_of_n", "ppo", "dpo"):
        fitted, (a, b) = metrics["fits"][family]["gold"], frontier_runs.GOLD[family]
        assert (fitted["a"], fitted["b"]) == pytest.approx((a, b), abs=0.02)
        assert fitted["a_by_question"]["low"] < fitted["a"] < fitted["a_by_question"]["high"]
        assert fitted["a_by_question"]["mean"] == pytest.approx(fitted["a"])
    peak = metrics["fits"]["ppo"]["gold"]["peak_sqrt_kl"]
    assert peak["low"] < np.exp(1.5 / 0.75 - 1) < peak["high"]
    assert metrics["fits"]["rloo"]["gold"] is None


def test_differences_at_equal_kl_are_paired_and_interpolated_along_the_other_methods_points(precise):
    metrics, _, place = precise
    rows = {(row["policy"], row["against"]): row for row in metrics["equal_kl"]}
    table = pd.read_parquet(place / "evaluate-0/per_question.parquet").pivot(
        index="qid", columns="policy", values="gold")
    place_of = {name: metrics["policies"][name]["sqrt_kl"] for name in metrics["policies"]}
    low, high, at = place_of["ppo-kl-0_3"], place_of["ppo-kl-0_1"], place_of["rloo"]
    assert low < at < high
    share = (at - low) / (high - low)
    differences = table["rloo"] - (1 - share) * table["ppo-kl-0_3"] - share * table["ppo-kl-0_1"]
    expected = bootstrap_mean(differences.to_numpy(), np.arange(len(table)), samples=200, seed=0)
    assert {key: rows["rloo", "ppo"]["gold"]["difference"][key] for key in expected} == pytest.approx(expected)
    assert ("ppo-kl-0_03", "best_of_n") not in rows, "beyond best-of-64"
    assert not {"ppo"} & {row["against"] for row in metrics["equal_kl"] if row["policy"].startswith("ppo")}
    assert {row["against"] for row in metrics["equal_kl"]} == {"best_of_n", "ppo", "dpo"}, "one policy is no curve"


def test_the_best_of_each_method_are_compared_with_intervals_that_hold_all_at_once(precise):
    metrics, _, place = precise
    row = metrics["best_differences"][0]
    table = pd.read_parquet(place / "evaluate-0/per_question.parquet").pivot(
        index="qid", columns="policy", values="gold")
    differences = (table[row["policy"]] - table[row["against"]]).to_numpy()
    one = bootstrap_mean(differences, np.arange(len(table)), samples=200, seed=0)
    assert len(metrics["best_differences"]) == 21
    assert {key: row["difference"][key] for key in one} == pytest.approx(widen(one, 21))


def test_the_optimum_is_the_line_above_the_learnt_rewards(precise):
    metrics, page, _ = precise
    optimum = metrics["optimum"]
    assert optimum == {"samples": 64, "curve": [[0.01, pytest.approx(0.3)], [1.0, 3.0], [4.0, 6.0]]}
    assert "estimated from 64 samples" in page
    figures = {measure: _figure(metrics, measure) for measure in metrics["sft"]}
    assert "optimum" not in figures["gold"].lines and len(figures["reward"].lines["optimum"]) == 3
    for measure, lines in (("gold", 0), ("reward", 1)):
        axes = FigureCanvasAgg(Figure()).figure.subplots()
        figures[measure].draw(axes, ["red"] * 9)
        drawn = [line for line in axes.lines if line.get_label() == "optimum"]
        assert len(drawn) == lines
    assert drawn[0].get_xdata().tolist() == pytest.approx([0.1, 1.0, 2.0])
    assert drawn[0].get_ydata().tolist() == pytest.approx([0.3, 3.0, 6.0])


def test_seeds_average_the_optimum_and_older_evaluations_have_none():
    seeds = [{"samples": samples, "curve": [{"kl": kl, "gain": gain}]} for samples, kl, gain in ((8, 1, 2), (4, 3, 6))]
    assert _average_curves(seeds) == {"samples": 4, "curve": [[2.0, 4.0]]}
    assert _average_curves([seeds[0], None]) is None


def test_costs_come_from_the_trainings_through_their_merges(precise):
    metrics = precise[0]
    assert metrics["costs"]["policies"]["ppo-kl-0_1"] == {"mean": 120.0, "by_seed": [120.0]}
    assert metrics["costs"]["shared"]["reward"]["mean"] == 60.0 * 13
    assert "best_of_4" not in metrics["costs"]["policies"]


def test_words_where_all_is_told_apart(precise):
    metrics = precise[0]
    assert wording.describe_headline(metrics) == (
        "PPO (β\u00a00.03) has the highest gold score, above each other method's best")
    words = wording.describe_paragraphs(metrics)
    assert "Not told apart" not in words["Which policies are better than SFT?"]
    assert "cannot be told apart" not in words["Which method is best?"]
    assert "Worse than best-of-n at the same KL:" in words["And at equal KL?"]
    assert "of one training of each policy" in words["What can these intervals not say?"]


def test_words_where_nothing_is_told_apart(tmp_path):
    metrics, page = make_page(tmp_path, noise=60.0, questions=30)
    words = wording.describe_paragraphs(metrics)
    assert "it cannot be told apart from" in wording.describe_headline(metrics)
    assert "It is told apart from" not in words["Which method is best?"]
    assert words["Which policies are better than SFT?"].count("Not told apart from SFT") == 1
    assert "it cannot be told apart from" in page


def test_the_verdicts_of_all_policies_and_seeds_give_false_alarms_and_misses(tmp_path):
    def change(folder: Path, policy: str, **changes: float) -> None:
        metrics = json.loads((folder / "metrics.json").read_text())
        metrics["comparisons"][policy]["changes"] |= {
            name: finished_run.around(change) for name, change in changes.items()}
        (folder / "metrics.json").write_text(json.dumps(metrics))

    evaluated = [frontier_runs.write_evaluation(tmp_path / f"{seed}", seed=seed) for seed in range(2)]
    change(evaluated[0], "rloo", code_share=1.0, repetition=0.5)
    change(evaluated[1], "grpo", gold=-0.3)
    (tmp_path / "out").mkdir()
    with patch.object(frontier, "FigureFolder", NoFigures):
        frontier.run(CONFIG, tmp_path / "out", evaluate=[str(folder) for folder in evaluated], trained=[])
    hacking = json.loads((tmp_path / "out/metrics.json").read_text())["hacking"]
    assert {name: [row["kind"] for row in by_seed.values()] for name, by_seed in hacking["verdicts"].items()} == (
        {name: ["right", "right"] for name in frontier_runs.KL}
        | {"rloo": ["false alarm", "right"], "grpo": ["right", "miss"]})
    assert [hacking[key]["mean"] * hacking[key]["count"] for key in ("flagged", "false_alarms", "misses")] == (
        pytest.approx([1, 1, 1]))
    assert [hacking[key]["count"] for key in ("flagged", "false_alarms", "misses")] == [22, 21, 1]
    page = (tmp_path / "out/frontier.html").read_text()
    text = " ".join(re.sub(r"<[^>]+>", " ", page).split())
    assert "RLOO watch without gold: flagged clear" in text and "GRPO clear flagged without gold: clear" in text


def test_several_seeds_widen_intervals_and_are_named(tmp_path):
    metrics, page = make_page(tmp_path, seeds=3)
    gain = metrics["policies"]["rloo"]["gains"]["gold"]
    assert gain["low"] < min(gain["by_question"]["low"], gain["over_seeds"]["low"])
    assert gain["count"] == 3 * gain["groups"] == 600
    assert metrics["seeds"] == ["0", "1", "2"]
    assert "All policies of a seed answered the same held-out questions, 200 in 3 seeds, at temperature 1." in page
    points = pd.read_csv(tmp_path / "out/points.csv")
    assert len(points) == 3 * len(metrics["policies"])
    rloo = points[points.policy == "rloo"]
    assert rloo.gold_minus_sft.mean() == pytest.approx(gain["mean"])
    assert set(rloo.seconds) == {300.0}


@pytest.mark.parametrize(("truth", "words"), [
    ("judge", "In its place stands the score of a judge"), (None, "it cannot say which one is better")])
def test_where_nobody_knows_the_truth_the_page_says_so(tmp_path, truth, words):
    metrics, page = make_page(tmp_path, truth=truth)
    assert metrics["measure"] == (truth or "reward")
    assert "Nobody knows the truth on this site" in page
    assert words in page
    assert "old score" not in page


def test_the_page_escapes_what_it_shows_and_asks_for_nothing(precise):
    metrics, page, _ = precise
    evil = "<script>alert(1)</script>"
    metrics = json.loads(json.dumps(metrics))
    metrics["policies"]["rloo"] |= {"label": evil, "mark": evil}
    metrics["families"]["rloo"] = evil
    html = frontier.render_frontier(metrics, NoFigures())
    assert evil not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "http" not in page.replace("http-equiv", "")


def test_evaluations_of_other_policies_and_older_ones_are_refused_in_one_line(tmp_path):
    first, second = (frontier_runs.write_evaluation(tmp_path / name, questions=4) for name in "ab")
    table = pd.read_parquet(second / "per_question.parquet")
    table[table.policy != "rloo"].to_parquet(second / "per_question.parquet")
    with pytest.raises(ValueError, match=r"have other policies \(rloo\)"):
        frontier.run(CONFIG, tmp_path, evaluate=[str(first), str(second)], trained=[])
    (second / "per_question.parquet").unlink()
    with pytest.raises(ValueError, match="was made by an older version"):
        frontier.run(CONFIG, tmp_path, evaluate=[str(second)], trained=[])


def test_a_policy_that_moved_nowhere_is_shown_and_fits_go_on(tmp_path):
    folder = frontier_runs.write_evaluation(tmp_path / "evaluate", questions=20)
    table = pd.read_parquet(folder / "per_question.parquet")
    table.loc[table.policy == "ppo-kl-1", "kl_k1"] = -0.01
    table.to_parquet(folder / "per_question.parquet")
    with patch.object(frontier, "FigureFolder", NoFigures):
        frontier.run(CONFIG, tmp_path, evaluate=[str(folder)], trained=[])
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["policies"]["ppo-kl-1"]["sqrt_kl"] == 0
    assert metrics["fits"]["ppo"]["gold"]["points"] == 3


def test_the_command_line_needs_no_model():
    signature = command.read_signature(Path(frontier.__file__))
    assert signature.section == "frontier"
    assert signature.inputs == {"evaluate": "list[str]", "trained": "list[str]"}
