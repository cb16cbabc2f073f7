"""A head that is fitted to frozen states: its features, its optimum, and the artifact that it makes."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from stages import ppo
from stages.modeling.adapters import is_adapter, is_reward_model
from stages.modeling.load import load_causal
from stages.recipe.sections.ppo import Ppo
from stages.recipe.sections.reward import Reward
from stages.reward_modeling.dataset import Example
from stages.reward_modeling.head_fit import PENALTY_SHARE, compute_features, fit_head, fit_weights
from stages.reward_modeling.load import load_classifier, load_reward_models
from stages.reward_modeling.reward_model import initialise_head
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import load_scoring
from stages.runtime.series import read_history
from tests.helpers import tiny_models
from tests.helpers.trained_reward import save_trained_reward

CONFIG = Reward(tune="head", layers=1, pooling="mean", precision="fp32", head_penalty=10.0, validation_share=0.3)
ITEMS = [
    Example(("site", 1), [1, 40, 41], [[60, 61, 62, 2], [63, 2], [64, 65, 2]], [(0, 1), (2, 1)], [1, 2]),
    Example(("site", 2), [1, 42], [[66, 67, 2], [68, 69, 70, 71, 72, 2]], [(1, 0)], [1]),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return save_trained_reward(tmp_path_factory.mktemp("head"), CONFIG)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_models.save_base(tmp_path_factory.mktemp("models") / "base")


@pytest.mark.parametrize("layers", [1, None])
def test_features_are_those_of_plain_transformers_one_text_at_a_time(base, layers):
    model = load_classifier(base, new_head=True, layers=layers)
    features = compute_features(model, ITEMS, "fp32", layers is None, "test")
    plain = AutoModelForCausalLM.from_pretrained(base)
    whole_depth = plain.config.num_hidden_layers
    plain.model.layers = plain.model.layers[:layers]
    texts = [(item.prompt, answer) for item in ITEMS for answer in item.answers]
    assert layers is None or layers < whole_depth
    for row, (prompt, answer) in enumerate(texts):
        with torch.no_grad():
            states = plain.model(torch.tensor([prompt + answer]), use_cache=False).last_hidden_state[0]
            logprobs = plain.lm_head(states).double().log_softmax(-1)
        mean = [sum(float(states[len(prompt) + t, d]) for t in range(len(answer))) / len(answer)
                for d in range(states.shape[1])]
        assert features[row, :states.shape[1]] == pytest.approx(mean, abs=1e-5)
        assert features[row, states.shape[1]] == pytest.approx(math.log(len(answer)))
        if layers is None:
            expected = sum(float(logprobs[len(prompt) + t - 1, token]) for t, token in enumerate(answer)) / len(answer)
            assert features[row, -1] == pytest.approx(expected, abs=1e-4)
    assert features.shape[1] == states.shape[1] + (2 if layers is None else 1)


def test_fitted_weights_are_at_the_minimum_of_the_penalised_loss():
    generator = np.random.default_rng(0)
    differences = generator.normal(size=(300, 4)) * [1.0, 20.0, 0.1, 3.0] + [0.2, 1.0, 0.0, 1.0]
    weights, penalty = fit_weights(differences, 7.0, free=1), 7.0
    scale = [math.sqrt(sum(row[k] ** 2 for row in differences) / 300) for k in range(4)]

    def loss(w):
        fit = sum(math.log1p(math.exp(-sum(w[k] * row[k] for k in range(4)))) for row in differences)
        shares = [1.0, 1.0, 1.0, PENALTY_SHARE]
        return fit + penalty / 2 * sum(share * (w[k] * scale[k]) ** 2 for k, share in enumerate(shares))

    for k in range(4):
        for step in (0.01, -0.01):
            moved = weights.copy()
            moved[k] += step / scale[k]
            assert loss(moved) > loss(weights)


def test_the_fitted_model_scores_by_head_length_and_log_probability(base):
    model = load_classifier(base, new_head=True)
    initialise_head(model, torch.Generator().manual_seed(0), "mean")
    scoring = fit_head(model, ITEMS, precision="fp32", penalty=0.1, with_logprobs=True, label="test")
    assert scoring.length_weight and scoring.log_probability_weight and scoring.pooling == "mean"
    features = compute_features(model, ITEMS, "fp32", True, "test")
    expected = features @ [*model.score.weight[0].tolist(), scoring.length_weight, scoring.log_probability_weight]
    texts = [(item.prompt, answer) for item in ITEMS for answer in item.answers]
    assert Scorer(model, "fp32", scoring)(*map(list, zip(*texts, strict=True))).numpy() == pytest.approx(
        expected, abs=1e-4)


def test_the_artifact_is_a_whole_model_of_the_first_layers(made):
    assert not is_adapter(made / "reward") and is_reward_model(made / "reward")
    plain = AutoModelForSequenceClassification.from_pretrained(made / "merged")
    deep = load_causal(made / "base")
    assert plain.config.num_hidden_layers == 1 < deep.config.num_hidden_layers
    weight = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(plain.state_dict()[weight], deep.state_dict()[weight])  # nothing but the head has learnt


def test_the_merged_model_scores_as_in_training(made):
    content = load_scoring(made / "reward")
    assert content["length_weight"] and not content["log_probability_weight"]
    (scorer,) = load_reward_models(made / "merged", "fp32")
    prompts, answers = zip(*((e["prompt"], e["answer"]) for e in content["examples"]), strict=True)
    expected = [example["score"] - content["mean"] for example in content["examples"]]
    assert scorer(list(prompts), list(answers)).tolist() == pytest.approx(expected, abs=1e-4)


def test_ppo_is_paid_by_it(made, tmp_path):
    config = Ppo(require_reward="none", precision="fp32", iterations=1, rollout_prompts=4, minibatch_prompts=4,
                 microbatch_prompts=2, epochs=1, max_response_tokens=4, validation_prompts=2)
    ppo.run(config, tmp_path, policy=made / "base", reward=made / "merged", pairs=made / "pairs")
    assert all(math.isfinite(row["reward"]) for row in read_history(tmp_path) if "reward" in row)
    assert any("reward" in row for row in read_history(tmp_path))


@pytest.mark.parametrize(("changes", "words"), [
    ({"members": 2}, "set members to 1"), ({"precision": "nf4"}, "quantised"),
    ({"pooling": "last"}, "pooling to 'mean'"),
    ({"tune": "lora"}, "layers makes a smaller model")])
def test_settings_that_do_not_fit_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        replace(CONFIG, **changes)


def test_more_layers_than_the_base_has_are_refused(base):
    with pytest.raises(ValueError, match="the first 99 layers are wanted of a llama model that has"):
        load_classifier(base, new_head=True, layers=99)
