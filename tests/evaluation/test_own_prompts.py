"""Policies of one's own prompts and reward against their base: every number in plain loops, the page, and refusals."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from stages import evaluate, report
from stages.evaluation import verdict
from stages.evaluation.tasks.trained_reward import read_training
from stages.recipe.sections.evaluate import Evaluate, Report
from stages.recipe.sections.ppo import Ppo
from stages.recipe.sections.rewards import RewardSource
from stages.reporting.policy_section import render_gold_scores
from tests.helpers import own_policies
from tests.helpers.finished_run import EVIL

PROMPTS = [f"use the flag port file {number}" for number in range(30)] + [EVIL, f"stop {EVIL}"]
CONFIG = Evaluate(batch_prompts=8, max_prompt_tokens=200, max_response_tokens=8, best_of=(2, 3),
                  temperatures=(1.0, 0.5, 0.0), temperature_prompts=2, bootstrap_samples=40, batch_texts=5, seed=3,
                  scorers=(f"{__name__}:count_vowels",))
REWARDS = (RewardSource(f"{__name__}:count_words", 0.5), RewardSource("response_characters", -0.1))
SETTINGS = Ppo(rewards=REWARDS, reward_baseline=9.0, reward_clip=0.1, seed=5)
calls = []


def count_words(questions: list[str], answers: list[str]) -> list[float]:
    calls.append(len(answers))
    return [len(answer.split()) + len(question) / 100 for question, answer in zip(questions, answers, strict=True)]


def count_vowels(questions: list[str], answers: list[str]) -> list[float]:
    return [float(sum(letter in "aeiou" for letter in answer)) for answer in answers]


def know_truth(questions: list[str], answers: list[str]) -> dict[str, list[float | None]]:
    return {"gold": [None if "7" in question else float(len(answer)) for question, answer in zip(
        questions, answers, strict=True)]}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict:
    place = tmp_path_factory.mktemp("own")
    file = place / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return own_policies.save_trained(place, file, SETTINGS)


@pytest.fixture(scope="module")
def evaluated(inputs) -> tuple[Path, dict, list[dict]]:
    out = own_policies.write_manifest(inputs["base"].parent / "evaluate", "evaluate", CONFIG, inputs)
    calls.clear()
    evaluate.run(CONFIG, out, **inputs)
    return out, json.loads((out / "metrics.json").read_text()), pq.read_table(out / "samples.parquet").to_pylist()


def bootstrap(values: list[float]) -> list[float]:
    """The ends of the interval, in loops over the same draws."""
    draws = np.random.default_rng(CONFIG.seed).integers(len(values), size=(CONFIG.bootstrap_samples, len(values)))
    return np.percentile([sum(values[i] for i in draw) / len(draw) for draw in draws.tolist()], [2.5, 97.5]).tolist()


def check_estimate(estimate: dict, values: list[float]) -> None:
    assert estimate["mean"] == pytest.approx(sum(values) / len(values), abs=1e-6)
    assert [estimate["low"], estimate["high"]] == pytest.approx(bootstrap(values), abs=1e-6)


def test_every_number_is_the_plain_one(evaluated):
    _, metrics, samples = evaluated
    writers = ("base", "ppo", "base_greedy", "base_best", "ppo_best")
    assert metrics["file_prompts"] == 32 and metrics["held_out_prompts"] == 8
    assert len(samples) == metrics["prompts"] == 6
    for row in samples:
        assert row["question"] == PROMPTS[row["qid"] - 1] and row["site"] == "prompts.jsonl"
        for writer in writers:
            words, characters = len(row[writer].split()) + len(row["question"]) / 100, len(row[writer])
            assert row[f"reward_{writer}"] == pytest.approx(0.5 * words - 0.1 * characters, abs=1e-5)
            assert row[f"response_characters_{writer}"] == characters
            assert row[f"{__name__}:count_vowels_{writer}"] == sum(letter in "aeiou" for letter in row[writer])
    rewards = {writer: [row[f"reward_{writer}"] for row in samples] for writer in writers}
    for writer in writers:
        check_estimate(metrics["policies"][writer]["reward"], rewards[writer])
    pairs = list(zip(rewards["base"], rewards["ppo"], strict=True))
    comparison, at_best = metrics["comparisons"]["ppo"], metrics["at_best"]["ppo"]
    check_estimate(comparison["reward_difference"], [after - before for before, after in pairs])
    check_estimate(comparison["win_rate"], [(after > before) + (after == before) / 2 for before, after in pairs])
    for name in ("base_greedy", "base_best"):
        check_estimate(at_best[name]["reward"], [
            after - before for before, after in zip(rewards[name], rewards["ppo_best"], strict=True)])
        for score in ("response_characters", f"{__name__}:count_vowels"):
            check_estimate(at_best[name]["scores"][score], [
                row[f"{score}_ppo_best"] - row[f"{score}_{name}"] for row in samples])
    assert {"best_of_2", "best_of_3", "best_of_3_best"} <= at_best.keys()
    assert metrics["policies"]["best_of_3"]["reward"]["mean"] >= metrics["policies"]["best_of_2"]["reward"]["mean"]
    assert metrics["policies"]["base"]["kl_k1"]["mean"] == 0 != comparison["kl_k1"]["mean"]


def test_the_attainable_objective_is_that_of_the_training(evaluated):
    """Baseline 9 and clip 0.1 make every reward -0.1, without EOS -1.1; beta is the setting's, for none was logged."""
    _, metrics, _ = evaluated
    measured, policies = metrics["attainable"]["policies"]["ppo"], metrics["policies"]
    assert metrics["attainable"]["samples"] == 3 and measured["optimum"]["beta"] == SETTINGS.kl_coefficient
    assert measured["objective"]["mean"] == pytest.approx(
        -0.1 - (1 - policies["ppo"]["eos_rate"]) - SETTINGS.kl_coefficient * policies["ppo"]["kl_k1"]["mean"])
    text = dict(metrics["table"])["share of the attainable objective at temperature 1, PPO"]
    assert ("not defined" in text) == (measured["share"] is None)


def test_temperatures_are_chosen_by_the_reward_on_other_held_out_prompts(evaluated):
    _, metrics, _ = evaluated
    assert metrics["temperature_selection"]["prompts"] == 2
    for name, curve in metrics["temperature_selection"]["curves"].items():
        best = max(curve, key=lambda row: (row["reward"], row["temperature"]))
        assert metrics["policies"][f"{name}_best"]["temperature"] == best["temperature"]


def test_a_function_gets_few_answers_at_once_and_each_of_them_once(evaluated):
    assert evaluated and max(calls) <= CONFIG.batch_texts
    assert sum(calls) < 6 * (5 + 2 * 3) + 2 * 2 * 3  # greedy answers come several times


def test_the_words_say_what_is_compared_and_what_the_reward_cannot_say(evaluated):
    _, metrics, _ = evaluated
    _, words = verdict.policy_verdict(metrics, "ppo")
    assert "other held-out prompts" in words and "the reward that it was trained on (" in words
    assert "it cannot say whether the answers are better than the reward function knows" in words
    assert "of base" in words and "a score that training never saw," in words and "SFT" not in words
    assert metrics["table"][0][0] == "the reward" and not [row for row in metrics["table"] if "SFT" in row[0]]
    assert any("never seen in training" in label for label, _ in metrics["table"])


def test_the_page_and_the_card(evaluated, inputs, tmp_path):
    evaluation, *_ = evaluated
    out = tmp_path / "report"
    out.mkdir()
    report.run(Report(side_by_side=3), out, base=inputs["base"],
               policy={"ppo": inputs["base"].parent / "ppo"}, merged=[str(inputs["policy"]["ppo"])],
               evaluate=evaluation)
    page = (out / "report.html").read_text(encoding="utf-8")
    body = re.sub(r"base64,[^\"]+", "", page.partition("</style>")[2])
    assert "SFT" not in body.partition("<h2>Recipe")[0] and "<h2>Recipe" in body
    assert "<script>alert" not in page and body.count("<script") == 1
    for text in ("PPO on your own prompts and reward", "The policy was trained on it", "held out from training",
                 "response_characters (weight -0.1)", "Training never saw", "prompts.jsonl, prompt ",
                 "base at best", "perplexity under base", "KL to base, nats a response"):
        assert text in page, text
    assert "Best human" not in page and "CC BY-SA" not in page
    card = (out / "cards/ppo-merged/README.md").read_text()
    assert "held-out prompts of prompts.jsonl" in card and "PPO minus base, each at its best temperature" in card
    with pytest.raises(ValueError, match="prompts of your own: leave out --posts"):
        report.run(Report(), out, base=inputs["base"], posts=inputs["base"], merged=[], evaluate=evaluation)


def test_gold_decides_where_it_is_known(inputs, tmp_path):
    config = replace(CONFIG, gold=f"{__name__}:know_truth", best_of=(), scorers=(), temperatures=(1.0,))
    evaluate.run(config, tmp_path, **inputs)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    samples = pq.read_table(tmp_path / "samples.parquet").to_pylist()
    known = [row for row in samples if "7" not in row["question"]]
    gain = metrics["comparisons"]["ppo"]["gold"]["gold"]
    assert gain["base"] == pytest.approx(sum(len(row["base"]) for row in known) / len(known))
    assert gain["difference"]["mean"] == pytest.approx(
        sum(len(row["ppo"]) - len(row["base"]) for row in known) / len(known))
    assert "human" not in gain and "the gold score, which knows the truth" in verdict.policy_verdict(metrics, "ppo")[1]
    assert {"reward at best temperature, base (T 1) -> PPO (T 1)", "gold at best temperature, base -> PPO"} <= {
        label for label, _ in metrics["table"]}
    assert ">base<" in render_gold_scores(metrics["comparisons"], "base") and not metrics["unseen_scores"]


def edit(folder: Path, change) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_refusals_are_one_line(inputs, tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("\n".join(f"stop {number}" for number in range(20)))
    own = own_policies.save_trained(tmp_path, file, SETTINGS, ("a", "b"))
    with pytest.raises(ValueError, match=r"names 'response_characters', which the policy was trained on"):
        evaluate.run(replace(CONFIG, scorers=("response_characters",)), tmp_path, **own)
    own["policies"], own["prompts"] = own.pop("policy"), own.pop("file")
    trained, merged = tmp_path / "b", own["policies"]["b"]
    assert read_training(**own).seed == 5

    def refuse(message: str, **changed) -> None:
        with pytest.raises(ValueError, match=message) as error:
            read_training(**own | changed)
        assert "\n" not in str(error.value)

    refuse("was not trained from --base", base=inputs["base"].parent / "ppo")
    refuse("was made by ppo: give the folder that merge made", policies={"b": trained})
    refuse("was not trained from --file", prompts=inputs["file"])
    for message, change in (
            ("trained on other rewards, seeds or prompts", lambda made: made["config"].update(seed=6)),
            ("older version on all prompts", lambda made: made["config"].pop("evaluation_prompts")),
            ("not trained on prompts of your own", lambda made: made["inputs"].pop("prompts"))):
        edit(trained, change)
        edit(merged, lambda made: made["inputs"].update(adapter=own_policies.identify([trained])))
        refuse(message)
    edit(trained, lambda made: made.update(seconds=1.0))
    refuse("has changed since: merge it again")
