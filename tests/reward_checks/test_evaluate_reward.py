"""The stage evaluate_reward on tiny models: what it writes, that it agrees with evaluate, and what it refuses."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from stages import evaluate_reward
from stages.modeling.tokenizer import load_tokenizer
from stages.reward_checks.reward_under_test import RewardUnderTest
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import Scoring, describe_scoring, save_scoring, set_scoring
from stages.stackexchange.prompt import answer_ids, prompt_ids
from tests.helpers import tiny_evaluation

CONFIG = replace(tiny_evaluation.CONFIG, gold="tests.reward_checks.test_evaluate_reward:score_length", best_of=(2,))


def score_length(questions, responses):
    """Gold for the tests: None for the first question of the pairs."""
    return {"gold": [None if "1" in question else float(len(response)) for question, response in
                     zip(questions, responses, strict=True)]}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    root = tmp_path_factory.mktemp("inputs")
    return tiny_evaluation.save_inputs(root, tiny_evaluation.make_tokenizer())


def make_artifact(folder) -> None:
    """Make a reward artifact of the classifier in `folder`, by scoring.json and its settings in the config."""
    model = load_classifier(folder)
    content = describe_scoring(Scoring(), "fp32", ([[3]], [[4]]), torch.tensor([0.25]))
    set_scoring(model, content)
    model.save_pretrained(folder)
    save_scoring(folder, content)


def run(inputs, out, config=CONFIG, **changes) -> dict:
    out.mkdir()
    named = {"reward": [str(inputs["reward"])], "pairs": inputs["pairs"]} | changes
    numbers = evaluate_reward.run(config, out, **named)
    metrics = json.loads((out / "metrics.json").read_text())
    assert numbers["pairs"] == metrics["reward_model"]["pairs"]
    return metrics


def test_measures_an_artifact_and_its_policy(inputs, tmp_path, capsys):
    make_artifact(inputs["reward"])
    metrics = run(inputs, tmp_path / "out", sft=inputs["sft"], base=inputs["base"], policy=inputs["policy"]["ppo"])
    assert {"SFT log-probability", "base log-probability", "longer answer wins", "bag of words (logistic)"} <= set(
        metrics["reward_model"]["baselines"])
    assert metrics["policy"]["kl_k1"]["mean"] > 0.1  # other random weights
    assert metrics["policy"]["gold_difference"]["count"] < 6  # gold does not know all of the six questions
    assert [point["n"] for point in metrics["gold_curve"]] == [1, 2]
    assert metrics["gold_curve"][1]["best_gold"]["mean"] >= metrics["gold_curve"][1]["gold"]["mean"]
    assert set(metrics["layout"]) == {"markdown stripped", "whitespace normalised", "fences removed"}
    assert metrics["layout"]["fences removed"]["changed_share"] > 0
    assert 0.5 < metrics["noise_ceiling"]["all"]["mean"] < 1
    printed = [line for line in capsys.readouterr().err.splitlines() if "evaluate_reward: " in line]
    assert len([line for line in printed if any(words in line for words in metrics["verdict"].values())]) == len(
        metrics["verdict"]) <= 5

    table = pq.read_table(tmp_path / "out/per_pair.parquet").to_pylist()
    tokenizer, scorer = load_tokenizer(inputs["reward"]), Scorer(load_classifier(inputs["reward"]), "fp32")
    row = next(row for row in table if row["qid"] == 3)
    expected = scorer([prompt_ids(tokenizer, "What is 3?")], [answer_ids(tokenizer, "four")])
    assert row["reward_j"] == pytest.approx(float(expected[0]), abs=1e-5)
    wins = np.mean([row["reward_j"] > row["reward_k"] for row in table])
    assert metrics["reward_model"]["accuracy"]["mean"] == pytest.approx(wins)

    page = (tmp_path / "out/reward.html").read_text()
    assert metrics["verdict"]["Does it rank pairs?"].split(":")[0] in page and "http://" not in page


def test_a_policy_that_is_the_sft_model_does_not_move(inputs, tmp_path):
    metrics = run(inputs, tmp_path / "out", replace(CONFIG, gold=None), sft=inputs["sft"], policy=inputs["sft"])
    assert metrics["policy"]["kl_k3"]["mean"] == pytest.approx(0, abs=1e-6)
    assert "No: its KL to SFT is 0.000" in metrics["verdict"]["Does the policy move?"]


def test_measures_a_classifier_of_anyone_with_its_template(inputs, tmp_path):
    """Without scoring.json a folder is a plain classifier; the page shows its name, and no markup from it."""
    named = tmp_path / "a<script>alert(1)<b>"
    shutil.copytree(inputs["reward"], named)
    (named / "scoring.json").unlink(missing_ok=True)
    template = "Question: {question}\n\nAnswer: {response}</s>"
    metrics = run(inputs, tmp_path / "out", reward=[str(named)], template=template, config=replace(CONFIG, gold=None))
    assert metrics["gold_curve"] is None and metrics["policy"] is None
    assert metrics["fault"] in (None, "unknown")  # without --sft nothing is known of the base
    page = (tmp_path / "out/reward.html").read_text()
    assert "<script>alert" not in page and "a&lt;script&gt;alert(1)" in page
    scores = [RewardUnderTest(str(named), each, "off").score_texts(["q"], ["a long answer"], "")[0]
              for each in (template, "{response}")]
    assert scores[0] != scores[1]


@pytest.mark.parametrize(("changes", "words"), [
    ({"reward": ["a", "b"]}, "one reward model, not 2"),
    ({"policy": "policy"}, "--policy needs --sft"),
    ({"reward": ["no/such-model-anywhere"], "template": "{question}"}, "must contain {response}"),
])
def test_refuses_in_one_line(inputs, tmp_path, changes, words):
    with pytest.raises(ValueError, match=words) as error:
        run(inputs, tmp_path / "out", **changes)
    assert "\n" not in str(error.value)


def test_an_adapter_is_refused_with_the_folder_to_give(inputs, tmp_path):
    adapter = tmp_path / "reward"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (tmp_path / "reward-merged").mkdir()
    with pytest.raises(ValueError, match=r"is an adapter.*give .*reward-merged"):
        run(inputs, tmp_path / "out", reward=[str(adapter)])
