"""Policies in numbers, best-of-n and the surface baseline, each against a plain loop, a simulation or a literal."""

import math
from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch

from stages.evaluation import pair_accuracy, policy_metrics
from stages.evaluation.policy_answers import Answers
from stages.evaluation.statistics import bootstrap_statistic
from stages.generation import best_of_n
from stages.reward_modeling.lexical_scorer import fit_bradley_terry

estimated = partial(bootstrap_statistic, samples=200, seed=0)


def answers(generator: np.random.Generator, prompts: int, each: int = 1) -> tuple[Answers, np.ndarray]:
    """Random answers of 1 to 39 tokens, some in a fence, and their rewards."""
    responses = [generator.integers(6, size=generator.integers(1, 40)).tolist() for _ in range(prompts * each)]
    texts = ["```\nx\n```" if response[0] < 3 else "x" for response in responses]
    log_p, log_ref = ([-torch.from_numpy(generator.random(len(r))) for r in responses] for _ in range(2))
    rewards = generator.normal(size=len(responses))
    return Answers(responses, texts, [r[-1] < 5 for r in responses], log_p, log_ref), rewards


def test_best_of_n_is_the_mean_over_all_draws():
    generator = np.random.default_rng(0)
    rewards = generator.normal(size=(3, 6))
    for n in (1, 2, 4, 6):
        weights = best_of_n.best_of_n_weights(rewards, n)
        for row, chances in zip(rewards, weights, strict=True):
            best = [max(draw) for draw in combinations(row, n)]
            assert (row * chances).sum() == pytest.approx(sum(best) / len(best))
            assert chances.sum() == pytest.approx(1)
    assert best_of_n.best_of_n_weights(rewards, 6).max(1).tolist() == [1, 1, 1]


def test_the_formula_is_the_kl_of_best_of_n():
    """Of a uniform reward's best, whose density is n u^(n-1), to the uniform."""
    for n in (2, 16):
        u = (np.arange(1_000_000) + 0.5) / 1_000_000
        density = n * u ** (n - 1)
        assert best_of_n.best_of_kl(n) == pytest.approx(np.mean(density * np.log(density)), abs=1e-4)
    assert best_of_n.best_of_kl(1) == 0


def test_a_policys_numbers_against_plain_sums():
    actual, rewards = answers(np.random.default_rng(1), 40)
    other = np.random.default_rng(2).normal(size=40)
    columns = policy_metrics.answer_columns(actual, rewards, other, {"mine": rewards * 2})
    numbers = policy_metrics.compute_policy_metrics(columns, actual.responses, ["mine"], estimated)
    tokens = [len(response) for response in actual.responses]
    own, under_sft = ([float(x) for row in rows for x in row] for rows in (actual.logprobs, actual.sft_logprobs))
    kl = [p - q for p, q in zip(own, under_sft, strict=True)]
    assert numbers["reward"]["mean"] == pytest.approx(sum(rewards) / 40)
    assert numbers["win_rate"]["mean"] == pytest.approx(sum(a > b for a, b in zip(rewards, other, strict=True)) / 40)
    assert numbers["kl_k1"]["mean"] == pytest.approx(sum(kl) / 40)
    assert numbers["kl_k3"]["mean"] == pytest.approx(sum(math.exp(-x) - 1 + x for x in kl) / 40)
    assert numbers["entropy"] == pytest.approx(-sum(own) / sum(tokens))
    assert numbers["perplexity_under_sft"] == pytest.approx(math.exp(-sum(under_sft) / sum(tokens)))
    assert numbers["response_tokens"] == pytest.approx(sum(tokens) / 40)
    assert numbers["eos_rate"] == pytest.approx(sum(r[-1] < 5 for r in actual.responses) / 40)
    assert numbers["code_share"] == pytest.approx(sum(r[0] < 3 for r in actual.responses) / 40)
    assert numbers["code_fences"] == pytest.approx(2 * numbers["code_share"])
    assert numbers["reward_length_correlation"] == pytest.approx(np.corrcoef(rewards, tokens)[0, 1])
    assert numbers["scores"]["mine"]["mean"] == pytest.approx(2 * numbers["reward"]["mean"])
    assert numbers["gold"] is None


def test_best_of_every_sample_is_the_best_answer_itself():
    samples, rewards = answers(np.random.default_rng(3), 20, each=4)
    sft = np.zeros(80)
    best = [4 * prompt + int(place) for prompt, place in enumerate(rewards.reshape(20, 4).argmax(1))]
    alone = Answers(*([rows[i] for i in best] for rows in (samples.responses, samples.texts, samples.ended)), None,
                    [samples.sft_logprobs[i] for i in best])
    columns = policy_metrics.answer_columns(samples, rewards, sft, {})
    actual = policy_metrics.best_of_columns(columns, 4, 4)
    expected = policy_metrics.answer_columns(alone, rewards[best], sft[:20], {})
    assert actual.keys() == expected.keys()
    for name, column in expected.items():
        np.testing.assert_allclose(actual[name], column, err_msg=name)
    assert policy_metrics.best_of_responses(columns, samples.responses, 4, 4) == alone.responses
    first = policy_metrics.best_of_columns(columns, 4, 1)
    np.testing.assert_allclose(first["tokens"], columns["tokens"].reshape(20, 4).mean(1))


def test_changes_are_differences_with_the_interval_of_a_paired_bootstrap():
    (before, low), (after, high) = (answers(np.random.default_rng(seed), 60) for seed in (4, 5))
    columns = [policy_metrics.answer_columns(*pair, low, {}) for pair in ((before, low), (after, high))]
    actual = policy_metrics.metric_changes(*columns, estimated)
    numbers = [policy_metrics.compute_policy_metrics(one, side.responses, [], estimated)
               for one, side in zip(columns, (before, after), strict=True)]
    for name in policy_metrics.POINT_METRICS:
        assert actual[name]["mean"] == pytest.approx(numbers[1][name] - numbers[0][name])
        assert actual[name]["low"] < actual[name]["mean"] < actual[name]["high"]
    assert actual["gold"] is None
    same = policy_metrics.metric_changes(columns[0], columns[0], estimated)
    assert [same["entropy"][end] for end in ("mean", "low", "high")] == [0, 0, 0]
    distinct = policy_metrics.distinct_change(before.responses, after.responses)
    assert distinct["mean"] == pytest.approx(numbers[1]["distinct_2"] - numbers[0]["distinct_2"])


def test_what_is_always_the_same_has_no_correlation():
    actual, _ = answers(np.random.default_rng(6), 10)
    columns = policy_metrics.answer_columns(actual, np.zeros(10), np.zeros(10), {})
    numbers = policy_metrics.compute_policy_metrics(columns, actual.responses, [], estimated)
    assert numbers["reward_length_correlation"] is None


@pytest.mark.parametrize("solver", ["lbfgs", "newton-cholesky"])
def test_the_surface_baseline_is_the_regression_that_gradient_descent_finds(solver):
    generator = np.random.default_rng(7)
    differences = generator.normal(size=(300, 3)) + np.array([0.8, -0.3, 0.0])
    weights = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    x, optimizer = torch.from_numpy(differences), torch.optim.LBFGS([weights], max_iter=500, tolerance_grad=1e-12)

    def loss():
        optimizer.zero_grad()
        penalty = pair_accuracy.SURFACE_PENALTY * (weights**2).sum() / 2
        actual = torch.nn.functional.softplus(-x @ weights).sum() + penalty
        actual.backward()
        return actual

    optimizer.step(loss)
    fitted = fit_bradley_terry(differences, pair_accuracy.SURFACE_PENALTY, solver)
    np.testing.assert_allclose(fitted, weights.detach().numpy(), atol=1e-6)


def test_the_surface_baseline_learns_what_the_surface_tells_and_no_more():
    rows = [{"response_j": "see https://a.b " + "x" * (i % 7), "response_k": "y" * (i % 9 + 20)} for i in range(100)]
    baseline = pair_accuracy.fit_surface_baseline(rows)
    linked, plain = baseline(["z https://c.d", "zzzzzzzzzzzzz"])
    assert linked > plain
    assert baseline(["right", "wrong"]).tolist()[0] == baseline(["wrong"])[0]  # words it does not read
    assert pair_accuracy.fit_surface_baseline([])(["a", "b"]).tolist() == [0, 0]


def test_features_on_literals():
    text = "# Head\n\n- one `a`\n- two\n\n**So?** see http://x.y!\n\n```\nls\n```"
    actual = dict(zip(pair_accuracy.FEATURES, pair_accuracy.extract_features([text])[0], strict=True))
    counts = {"code fences": 2, "inline code": 1, "links": 1, "list items": 2, "paragraphs": 3, "headings": 1}
    assert {name: round(math.expm1(actual[f"log {name}"])) for name in counts} == counts
    assert (actual["has code"], actual["has emphasis"]) == (1, 1)
    assert actual["log characters"] == pytest.approx(math.log(1 + len(text)))
