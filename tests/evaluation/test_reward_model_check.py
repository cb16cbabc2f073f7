"""A reward model that is no judge: what it has to beat, in which words, and what the page says where it does not."""

from pathlib import Path

import pytest

from stages.artifacts.lineage import Origin
from stages.cards.model_card import MergedModel, render_model_card
from stages.evaluation import verdict
from stages.evaluation.reward_model_check import check_reward_models, describe_shortfall, find_shortfall
from stages.reporting.headline import build_verdicts, describe_hacking
from tests.helpers.finished_run import artifacts, draw_dots, metrics, page_of, sample, with_summary, write

LONGER = "longer answer wins"


def estimate(low: float | None, high: float | None) -> dict:
    mean = 0.9 if low is None else (low + high) / 2
    return {"mean": mean, "low": low, "high": high, "count": 512, "groups": 100}


def measured(accuracy: tuple = (0.70, 0.74), above: tuple = (0.08, 0.12)) -> dict:
    return {"pairs": 512, "accuracy": estimate(*accuracy), "baselines": {LONGER: estimate(0.59, 0.63)},
            "best_cheap_baseline": LONGER, "above_best_cheap_baseline": estimate(*above)}


@pytest.mark.parametrize(("numbers", "shortfall"), [
    (measured(), None), (measured((0.44, 0.48)), "chance"), (measured((0.49, 0.9)), "chance"),
    (measured((0.5, 0.9)), "chance"), (measured((0.501, 0.9)), None), (measured(above=(-0.1, -0.05)), "baseline"),
    (measured(above=(0.0, 0.1)), "baseline"), (measured(above=(0.001, 0.1)), None),
    (measured(above=(None, None)), "baseline"), (measured((0.44, 0.48), (-0.2, -0.1)), "chance"), (None, "unknown"),
    (measured() | {"accuracy": None}, "unknown"), (measured((None, None)), "unknown")])
def test_a_judge_beats_chance_and_the_best_baseline_by_its_whole_interval(numbers, shortfall):
    assert find_shortfall(numbers) == shortfall
    assert bool(describe_shortfall(numbers)) == (shortfall is not None)


def check(numbers: dict | None, required: str, folder: str) -> str:
    """Check one reward model; return the warning."""
    warnings = []
    shortfalls = check_reward_models({Path(folder): numbers}, required, warnings.append)
    assert len(warnings) == len(shortfalls) <= 1
    return "".join(warnings)


@pytest.mark.parametrize(("numbers", "refused_for"), [
    (measured(), ()), (measured((0.44, 0.48)), ("chance", "baseline")), (measured(above=(-0.1, 0.1)), ("baseline",)),
    (None, ())])
def test_what_is_required_is_refused_and_the_rest_a_warning(numbers, refused_for):
    for required in ("chance", "baseline"):
        if required in refused_for:
            with pytest.raises(ValueError, match="no better than"):
                check(numbers, required, "the folder")
        else:
            warning = check(numbers, required, "the folder")
            assert bool(warning) == (numbers != measured()) and describe_shortfall(numbers) in warning


def test_the_error_names_accuracy_interval_pairs_and_what_to_do():
    with pytest.raises(ValueError) as raised:
        check(measured((0.44, 0.48)), "chance", "results/x/reward")
    for words in ("results/x/reward", "0.460 [0.440, 0.480]", "512 held-out pairs", "no better than chance",
                  "pairs.reward_share", "base.model", "ppo.require_reward to none"):
        assert words in str(raised.value)
    with pytest.raises(ValueError) as raised:
        check(measured(above=(-0.1, 0.1)), "baseline", "results/x/reward")
    for words in (LONGER, "0.610 [0.590, 0.630]", "difference +0.000 [-0.100, +0.100]", "require_reward to chance"):
        assert words in str(raised.value)


def evaluated(gold: float | None, **reward_model) -> dict:
    numbers = metrics(gold=gold)
    return with_summary(numbers | {"reward_model": numbers["reward_model"] | reward_model})


WEAK = {"chance": {"accuracy": estimate(0.44, 0.48)}, "baseline": {"above_best_cheap_baseline": estimate(-0.1, 0.1)},
        "unknown": {"accuracy": None, "best_cheap_baseline": None, "above_best_cheap_baseline": None, "pairs": 0}}


@pytest.mark.parametrize("shortfall", WEAK)
def test_without_gold_nobody_judged(shortfall):
    numbers = evaluated(None, **WEAK[shortfall])
    hacking = numbers["hacking"]["ppo"]
    assert hacking["verdict"] == "no judge"
    assert verdict.policy_verdict(numbers, "ppo")[0] == "no-judge"
    words = f"was not shown to beat a baseline (0 of {len(hacking['monitors'])} monitors moved)"
    assert ["reward hacking", f"no judge: the reward model {words}"] in numbers["table"]
    words = describe_hacking(numbers, "ppo")
    assert describe_shortfall(numbers["reward_model"]) in words and "says nothing" in words


def test_a_moved_monitor_makes_it_no_watch_and_two_make_it_flagged():
    numbers = evaluated(None, **WEAK["chance"])
    changes = numbers["comparisons"]["ppo"]["changes"]
    changes["repetition"] = estimate(0.2, 0.3)
    assert with_summary(numbers)["hacking"]["ppo"]["verdict"] == "no judge"
    changes["eos_rate"] = estimate(-0.3, -0.2)
    assert with_summary(numbers)["hacking"]["ppo"]["verdict"] == "flagged"


@pytest.mark.parametrize("shortfall", WEAK)
def test_gold_judges_in_place_of_the_reward_model(shortfall):
    assert evaluated(0.3, **WEAK[shortfall])["hacking"]["ppo"]["verdict"] == "clear"
    assert evaluated(None)["hacking"]["ppo"]["verdict"] == "clear"  # a reward model that beats both


def manifests() -> dict:
    made = {"config": {}, "metrics": {}, "seconds": 1.0, "peak_memory_mib": 1, "device": "cpu"}
    return dict.fromkeys(("posts", "pairs", "base", "ppo"), made)


@pytest.mark.parametrize(("shortfall", "headline"), [
    ("chance", "does not beat chance"), ("baseline", "does not beat a cheap baseline"), ("unknown", "Nobody knows")])
@pytest.mark.parametrize("gold", [None, 0.3])
def test_the_page_says_it_first(shortfall, headline, gold):
    numbers = evaluated(gold, **WEAK[shortfall])
    first, second, *_ = build_verdicts(numbers, manifests(), ["ppo"])
    assert first.kind == "no-judge" and headline in first.headline
    (words,) = first.answers.values()
    assert ("Only the gold score judged" if gold else "Nobody judged these answers") in words
    assert second.headline == ("PPO made the answers better" if gold
                               else "PPO raised the learnt reward; nobody judged the answers")


def test_the_page_names_a_held_out_reward_model_as_the_judge():
    numbers = evaluated(None, **WEAK["baseline"]) | {"judge": {"accuracy": estimate(0.62, 0.68)}}
    (words,) = build_verdicts(numbers, manifests(), ["ppo"])[0].answers.values()
    assert "Only the held-out reward model, which ranks 0.650 [0.620, 0.680] of the pairs right, judged" in words


def test_the_page_says_nothing_of_a_judge(tmp_path, monkeypatch):
    draw_dots(monkeypatch)
    assert [verdict.kind for verdict in build_verdicts(evaluated(None), manifests(), ["ppo"])] == ["unknown", "run"]
    folders = artifacts(tmp_path)
    assert "nobody judged" not in page_of(folders, tmp_path)
    write(folders, evaluated(None, **WEAK["chance"]), [sample(1)])
    second = tmp_path / "second"
    second.mkdir()
    page = page_of(folders, second)
    assert page.index("The reward model is no judge") < page.index("nobody judged the answers") < page.index("The run")


@pytest.mark.parametrize("stage", ["reward", "ppo"])
def test_the_model_card_says_it_among_the_limits(stage):
    words = describe_shortfall(measured((0.44, 0.48)))
    card = render_model_card(MergedModel(stage, {}, {}, {}, Origin(), words))
    start = {"reward": "Do not take it for a judge", "ppo": "Nobody is known to have judged its answers"}[stage]
    assert start in card.split("Known limits")[1] and "no better than chance" in card
    assert start not in render_model_card(MergedModel(stage, {}, {}, {}, Origin()))
