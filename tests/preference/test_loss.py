"""The losses of DPO and IPO against plain loops in float64, and the log-probabilities against unpacked passes."""

import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from stages.modeling.packed.token_logprobs import response_logprobs
from stages.preference import reference
from stages.preference.logprobs import all_answer_logprobs, answer_logprobs, collate_rows
from stages.preference.loss import PreferenceLoss, preference_losses
from stages.preference.reference import check_start
from stages.reward_modeling.dataset import Example
from tests.helpers import tiny_models

EXAMPLES = [Example(("tiny", i), [3 + i, 40, 50], [[60 + i, 70, 2], [80, 90 + i, 5, 2], [9, 2]][: 2 + i % 2],
                    [(0, 1), (2, 0)][: 1 + i % 2], [1] * (1 + i % 2)) for i in range(7)]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("beta", [0.05, 0.5, 3.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_losses_equal_plain_loops(beta, smoothing):
    draw = torch.Generator().manual_seed(0)
    better, worse = torch.randn(2, 9, generator=draw, dtype=torch.float64)
    tokens = torch.randint(1, 7, (2, 9), generator=draw)
    dpo = preference_losses(better, worse, *tokens, loss="sigmoid", beta=beta, label_smoothing=smoothing)
    ipo = preference_losses(better, worse, *tokens, loss="ipo", beta=beta)
    for i, (j, k) in enumerate(zip(better.tolist(), worse.tolist(), strict=True)):
        right = sigmoid(beta * (j - k))
        assert dpo[i].item() == pytest.approx(
            -(1 - smoothing) * math.log(right) - smoothing * math.log(1 - right), rel=1e-12)
        means = j / tokens[0, i].item() - k / tokens[1, i].item()
        assert ipo[i].item() == pytest.approx((means - 1 / (2 * beta)) ** 2, rel=1e-12)


def test_a_gradient_step_raises_the_better_answer_over_the_worse():
    for loss in ("sigmoid", "ipo"):
        ratios = torch.zeros(2, 1, requires_grad=True)
        preference_losses(*ratios, *torch.ones(2, 1), loss=loss, beta=0.1).sum().backward()
        assert ratios.grad[0] < 0 < ratios.grad[1]


def test_answers_that_share_their_question_have_the_log_probabilities_of_separate_texts():
    model = tiny_models.llama(tiny_models.tokenizer())
    texts = [(example.prompt, answer) for example in EXAMPLES for answer in example.answers]
    expected = [float(row.sum()) for row in response_logprobs(model, *map(list, zip(*texts, strict=True)), 1.0)]
    assert all_answer_logprobs(model, EXAMPLES, "fp32").tolist() == pytest.approx(expected, abs=1e-5)
    model.train()
    with pytest.raises(AssertionError, match="dropout"):
        all_answer_logprobs(model, EXAMPLES, "fp32")


def test_the_loss_of_rows_is_that_of_their_pairs():
    """Rows with several answers and pairs: pair by pair, with the model's own log-probabilities."""
    model = tiny_models.llama(tiny_models.tokenizer())
    rows = [reference.ReferencedExample(one, tuple(-9.0 - number for number, _ in enumerate(one.answers)))
            for one in EXAMPLES]
    assert collate_rows(rows)["items"] == sum(len(one.pairs) for one in EXAMPLES) == 10
    for settings in (PreferenceLoss("sigmoid", 0.3, 0.1), PreferenceLoss("ipo", 0.3, 0.0)):
        expected = 0.0
        for row in rows:
            ratios = answer_logprobs(model, [row.example]).detach().double() - torch.tensor(row.ref_logprobs)
            tokens = torch.tensor([len(answer) for answer in row.example.answers])
            for j, k in row.example.pairs:
                expected += preference_losses(ratios[j], ratios[k], tokens[j], tokens[k], **vars(settings)).item()
        assert settings.summed_loss(model, rows, "fp32").item() == pytest.approx(expected, rel=1e-5)


def test_an_interrupted_reference_goes_on_and_is_never_computed_twice(tmp_path, monkeypatch):
    model, calls = tiny_models.llama(tiny_models.tokenizer()), []
    whole = reference.compute_reference(model, EXAMPLES, "fp32", tmp_path / "whole.parquet", "whole")
    monkeypatch.setattr(reference, "STORE_EVERY_EXAMPLES", 3)

    def compute(model, part, *more):
        calls.append(len(part))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return all_answer_logprobs(model, part, *more)

    monkeypatch.setattr(reference, "all_answer_logprobs", compute)
    file: Path = tmp_path / "cut.parquet"
    with pytest.raises(KeyboardInterrupt):
        reference.compute_reference(model, EXAMPLES, "fp32", file, "cut")
    assert pq.read_table(file).num_rows == sum(len(one.answers) for one in EXAMPLES[:3])
    again = reference.compute_reference(model, EXAMPLES, "fp32", file, "cut")
    assert calls == [3, 3, 3, 1] and reference.compute_reference(model, EXAMPLES, "fp32", file, "cut") == again
    assert len(calls) == 4
    assert [row.example for row in again] == EXAMPLES
    for one, other in zip(again, whole, strict=True):
        assert one.ref_logprobs == pytest.approx(other.ref_logprobs, abs=1e-5)
    table = pq.read_table(file).to_pylist()
    assert [row["tokens"] for row in table] == [len(answer) for one in EXAMPLES for answer in one.answers]
    assert [row["qid"] for row in table] == [one.question[1] for one in EXAMPLES for _ in one.answers]


def test_the_start_is_refused_if_the_policy_is_not_its_reference(tmp_path):
    model, loss = tiny_models.llama(tiny_models.tokenizer()), PreferenceLoss("ipo", 0.1, 0.0)
    rows = reference.compute_reference(model, EXAMPLES, "fp32", tmp_path / "reference.parquet", "reference")
    report = check_start(model, rows, loss, "fp32")
    assert report["loss"] == pytest.approx(25.0) and report["largest_difference_nats_per_token"] < 1e-5
    assert check_start(model, rows, PreferenceLoss("sigmoid", 0.1, 0.0), "fp32")["loss"] == pytest.approx(math.log(2))
    with pytest.raises(ValueError, match="the policy differs from its reference before the first step, by"):
        check_start(tiny_models.llama(tiny_models.tokenizer(), seed=1), rows, loss, "fp32")
