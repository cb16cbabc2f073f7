"""What a reward model learns from: every option against plain loops; question-at-once against the pairwise form."""

import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from stages import merge, ppo, reward
from stages.evaluation.pair_accuracy import calibration
from stages.modeling import lora, tokenizer
from stages.modeling.load import load_causal
from stages.recipe.schema import SettingsError, override
from stages.recipe.sections.models import Lora, Merge
from stages.recipe.sections.ppo import Ppo
from stages.recipe.sections.reward import Reward
from stages.recipe.sections.rewards import RewardSource
from stages.reward_modeling.dataset import build_examples
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.loss import PairwiseLoss, pairwise_losses
from stages.reward_modeling.reward_model import initialise_head
from stages.reward_modeling.scorer import Scorer, combine_scores
from stages.reward_modeling.scoring_file import SCORING, Scoring, member_folder, member_folders
from stages.rewards import checked_models
from stages.rl.inputs import Inputs
from tests.helpers import tiny_models
from tests.helpers.settings import take_settings

BETTER, WORSE, GAPS = [0.3, -2.0, 1.5], [0.1, -1.0, 4.0], [1, 3, 2]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("margin", [0.0, 0.4])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("centring", [0.0, 0.05])
def test_every_option_of_the_loss_against_plain_python(margin, smoothing, centring):
    better, worse, gaps = (torch.tensor(values, dtype=torch.float64) for values in (BETTER, WORSE, GAPS))
    actual = pairwise_losses(better, worse, margin * gaps, smoothing, centring)
    for loss, b, w, gap in zip(actual.tolist(), BETTER, WORSE, GAPS, strict=True):
        d = b - w - margin * gap
        right, wrong = -math.log(sigmoid(d)), -math.log(sigmoid(-d))
        assert loss == pytest.approx((1 - smoothing) * right + smoothing * wrong + centring * (b + w) ** 2, rel=1e-9)


@pytest.mark.parametrize("centring", [0.0, 0.05])
def test_the_squared_loss_against_plain_python(centring):
    better, worse, gaps = (torch.tensor(values, dtype=torch.float64) for values in (BETTER, WORSE, GAPS))
    actual = pairwise_losses(better, worse, 1.25 * gaps, 0.0, centring, "squared")
    for loss, b, w, gap in zip(actual.tolist(), BETTER, WORSE, GAPS, strict=True):
        assert loss == pytest.approx((b - w - 1.25 * gap) ** 2 + centring * (b + w) ** 2, rel=1e-9)


def test_the_squared_loss_learns_how_far_apart_scores_are():
    """Three answers with noisy scores: at the minimum, the rewards differ by 1.25 x the mean differences of scores."""
    rng = np.random.default_rng(0)
    scores = torch.tensor(rng.normal([4.0, 2.0, 0.0], 1.0, (4000, 3)))
    j, k = torch.tensor([(0, 1), (0, 2), (1, 2)]).T
    margins = 1.25 * (scores[:, j] - scores[:, k])
    rewards = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([rewards], line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = pairwise_losses(rewards[j], rewards[k], margins, loss="squared").mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    expected = 1.25 * scores.mean(0)
    assert (rewards - rewards.mean()).tolist() == pytest.approx((expected - expected.mean()).tolist(), abs=1e-6)


@pytest.mark.parametrize("values", [{"margin_per_score": 0.0}, {"margin_per_score": 1.0, "label_smoothing": 0.1}])
def test_the_squared_loss_needs_margins_and_has_no_smoothing(values):
    with pytest.raises(SettingsError, match="loss 'squared' learns the margins, and has no label_smoothing") as error:
        override(Reward(), values | {"loss": "squared"}, "recipe.yaml: reward")
    assert "\n" not in str(error.value)


def table(questions=6):
    """Rows of questions with four answers each, as a pairs table has them."""
    rng, rows = random.Random(0), []
    for qid in range(questions):
        answers = [tiny_models.sentence(rng, rng.randint(1, 9)) + f" {qid}{i}" for i in range(4)]
        for j in range(4):
            for k in range(j + 1, 4):
                question = tiny_models.sentence(rng, 7) if not j + k else "the same"
                rows.append({"site": "s", "qid": qid, "question": question,
                             "response_j": answers[j], "response_k": answers[k], "score_j": 5 - j, "score_k": 5 - k})
    return rows


def learner(folder):
    model = load_classifier(tiny_models.save_base(folder), "fp32", new_head=True)
    initialise_head(model, torch.Generator().manual_seed(0))
    return lora.add_lora(model, r=4, alpha=8, dropout=0.0, target_modules=(), precision="fp32", scorer=True)


def gradients(model, made, loss_fn, scoring):
    model.zero_grad()
    loss = loss_fn.summed_loss(model, made, scoring, "fp32")
    loss.backward()
    return float(loss), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("pooling", ["last", "mean", "sum"])
@pytest.mark.parametrize("weight, language", [(0.0, 0.0), (2.0, 0.0), (0.0, 0.3), (1.0, 0.3)])
def test_question_at_once_has_the_gradient_of_the_pairwise_form(tmp_path, pooling, weight, language):
    """Each answer forwarded once, all its pairs from there, against one pair after another."""
    model, tok = learner(tmp_path / "base"), tiny_models.tokenizer()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    loss_fn, scoring = PairwiseLoss("sigmoid", 0.2, 0.1, 0.01, language), Scoring(pooling, weight)
    made = {}
    for by_question in (True, False):
        items, _ = build_examples(table(), tok, max_length_tokens=200, by_question=by_question, max_pairs=99)
        made[by_question] = items
    assert len(made[True]) < len(made[False]) / 4
    loss, actual = gradients(model, made[True], loss_fn, scoring)
    total, summed = 0.0, {}
    for item in made[False]:
        one, each = gradients(model, [item], loss_fn, scoring)
        total += one
        summed = {name: summed.get(name, 0) + g for name, g in each.items()}
    assert loss == pytest.approx(total, rel=1e-5) and actual.keys() == summed.keys()
    for name, gradient in actual.items():
        scale = float(summed[name].abs().max()) + 1e-12
        assert float((gradient - summed[name]).abs().max()) / scale < 1e-5, name


def test_the_language_model_term_is_the_mean_nats_of_the_better_answer(tmp_path):
    model, tok = learner(tmp_path / "base"), tiny_models.tokenizer()
    items, _ = build_examples(table(1), tok, max_length_tokens=200, by_question=True, max_pairs=99)
    causal, expected = load_causal(tmp_path / "base"), 0.0
    for item in items:
        for j, _ in item.pairs:
            ids = item.prompt + item.answers[j]
            with torch.no_grad():
                log_p = causal(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            expected -= np.mean([float(log_p[t - 1, ids[t]]) for t in range(len(item.prompt), len(ids))])
    with torch.no_grad():
        mixed, alone = (take_settings(PairwiseLoss, Reward(language_model_weight=weight)).summed_loss(
            model, items, Scoring(), "fp32") for weight in (0.5, 0.0))
    assert float(mixed - alone) == pytest.approx(0.5 * expected, rel=1e-4)


def test_calibration_against_plain_python():
    rng = np.random.default_rng(0)
    gaps = rng.normal(0.5, 2, 500)
    actual, expected = calibration(gaps), 0.0
    for low in np.arange(0.5, 1, 0.05):
        inside = [g for g in gaps if low <= sigmoid(abs(g)) < low + 0.05]
        if inside:
            sure = np.mean([sigmoid(abs(g)) for g in inside])
            expected += len(inside) / len(gaps) * abs(sure - np.mean([g > 0 for g in inside]))
    assert actual["expected_error"] == pytest.approx(expected, abs=1e-9)
    assert sum(b["pairs"] for b in actual["bins"]) == 500
    sure = np.array([100.0] * 3 + [-100.0])
    assert calibration(sure)["expected_error"] == pytest.approx(0.25)


# The stage, its members, and how they are served

CONFIG = Reward(lora=Lora(r=4, dropout=0.0), precision="fp32", batching="question", batch_pairs=4, microbatch_pairs=2,
                epochs=1.0, learning_rate=1e-3, validation_share=0.2, save_every_steps=4, members=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    inputs = {"base": tiny_models.save_base(folder / "base"), "pairs": tiny_models.save_pairs(folder / "pairs")}
    (folder / "out").mkdir()
    return folder, reward.run(CONFIG, folder / "out", **inputs), inputs


def test_members_differ_by_their_seed_and_the_first_is_the_one_trained_alone(trained, tmp_path):
    folder, _, inputs = trained
    alone = reward.run(replace(CONFIG, members=1), tmp_path, **inputs)
    weights = [(f / "adapter_model.safetensors").read_bytes() for f in (*member_folders(folder / "out"), tmp_path)]
    assert len(weights) == 3 and weights[0] == weights[2] != weights[1]
    assert alone["pairs"] > 0 and 0 <= alone["validation_accuracy"] <= 1


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_stage_says_at_every_evaluation_where_it_is_right(trained):
    folder, metrics, _ = trained
    for member in member_folders(folder / "out"):
        tables = lines(member / "validation.jsonl")
        assert {"accuracy", "by_score_gap", "by_length", "calibration"} <= tables[0].keys()
        rows = [row for row in lines(member / "history.jsonl") if "validation_accuracy" in row]
        assert [row["step"] for row in rows] == [table["step"] for table in tables] and len(rows) > 1
        assert [row["validation_accuracy"] for row in rows] == [table["accuracy"]["mean"] for table in tables]
    assert {"validation_accuracy", "validation_longer_answer_accuracy", "validation_loss",
            "validation_calibration_error"} <= metrics.keys()


def loaded(member, base) -> Scorer:
    model = load_classifier(base, "fp32", new_head=True)
    return Scorer(PeftModel.from_pretrained(model, member).eval(), "fp32", Scoring())


def test_scores_of_several_models_are_combined(trained):
    folder, _, inputs = trained
    scorers = [loaded(member, inputs["base"]) for member in member_folders(folder / "out")]
    texts = [[1, 5, 6], [1, 9]], [[40, 41, 2], [42, 2]]
    one, other = (scorer(*texts) for scorer in scorers)
    assert not torch.equal(one, other)
    assert torch.allclose(combine_scores([one, other]), (one + other) / 2)
    assert torch.equal(combine_scores([one, other], "min"), torch.minimum(one, other))
    penalised = combine_scores([one, other], "mean_minus_std", 2.0)
    assert torch.allclose(penalised, (one + other) / 2 - 2 * (one - other).abs() / 2, atol=1e-6)
    for combine in ("mean", "min", "mean_minus_std"):
        assert combine_scores([one], combine, 2.0) is one


def test_a_served_model_is_compared_with_its_scores_in_training(trained):
    folder, _, inputs = trained
    out = folder / "out"
    actual = checked_models.compare_with_training(loaded(out, inputs["base"]), out)
    assert actual.correlation == pytest.approx(1, abs=1e-5) and actual.max_difference_stds < 1e-3
    assert "correlation 1.00000" in checked_models.check_consistency(actual, out, 0.95)
    second = loaded(member_folder(out, 1), inputs["base"])
    other = checked_models.compare_with_training(second, out)  # the file is of the first model
    assert other.correlation < 0.999
    with pytest.raises(ValueError, match="does not score as in training"):
        checked_models.check_consistency(other, out, 0.9999)


def test_a_scoring_file_without_spread_says_so(trained, tmp_path):
    folder, _, inputs = trained
    known = json.loads((folder / "out" / SCORING).read_text())
    (tmp_path / SCORING).write_text(json.dumps(known | {"examples": known["examples"][:2]}))
    actual = checked_models.compare_with_training(loaded(folder / "out", inputs["base"]), tmp_path)
    assert actual.correlation is None and "too few" in checked_models.check_consistency(actual, tmp_path, 0.95)


def test_a_killed_ensemble_goes_on_with_the_member_it_had_not_finished(trained, tmp_path):
    folder, _, inputs = trained
    (tmp_path / "out").mkdir()
    reward.run(replace(CONFIG, members=1), tmp_path / "out", **inputs)
    before = (tmp_path / "out" / "adapter_model.safetensors").stat().st_mtime_ns
    reward.run(CONFIG, tmp_path / "out", **inputs)
    assert (tmp_path / "out" / "adapter_model.safetensors").stat().st_mtime_ns == before
    for one, other in zip(member_folders(tmp_path / "out"), member_folders(folder / "out"), strict=True):
        assert (one / "adapter_model.safetensors").read_bytes() == (other / "adapter_model.safetensors").read_bytes()


PPO = Ppo(lora=Lora(r=2, dropout=0.0), precision="fp32", iterations=1, rollout_prompts=4, minibatch_prompts=4,
          microbatch_prompts=2, epochs=1, max_response_tokens=4, validation_prompts=2, require_reward="none")


def build(config: Ppo, tok, inputs: dict[str, Path], reward: Path):
    sources = Inputs(inputs["base"], reward, inputs["pairs"])
    return ppo.build_trainer(config, ppo.make_method(config), tok, sources)


@pytest.mark.parametrize("served_as", ["merged", "adapter"])
def test_ppo_combines_the_members(trained, served_as, tmp_path, capsys):
    """Merged models, or adapters of the policy's base: the same rewards, and each compared at the start."""
    folder, _, inputs = trained
    given = folder / "out"
    if served_as == "merged":
        given = tmp_path / "merged"
        given.mkdir()
        merge.run(Merge(dtype="fp32"), given, base=inputs["base"], adapter=[str(folder / "out")], pairs=inputs["pairs"])
        assert len(member_folders(given)) == 2 and (given / "member-1" / "merge.json").exists()
    tok = tokenizer.load_tokenizer(inputs["base"])
    texts = [[1, 5, 6], [1, 9]], [[40, 41, 2], [42, 2]]
    actual = {}
    for combine, penalty in (("mean", 0.0), ("min", 0.0), ("mean_minus_std", 2.0)):
        config = replace(PPO, reward_combine=combine, spread_penalty=penalty)
        trainer, sources = build(config, tok, inputs, given)
        assert [source.name for source in sources] == ["model 0", "model 1"]
        rollout = SimpleNamespace(prompts=texts[0], responses=texts[1], ended=[True, True])
        shaped = trainer.reward_shaper(rollout, update_statistics=False)
        assert shaped.metrics().keys() == {"reward_model", "reward_scale"}
        actual[combine] = shaped.rewards
    scoring = [json.loads((member / SCORING).read_text()) for member in member_folders(folder / "out")]
    scores = [loaded(member, inputs["base"])(*texts) - known["mean"]
              for member, known in zip(member_folders(folder / "out"), scoring, strict=True)]
    mean, spread = (scores[0] + scores[1]) / 2, (scores[0] - scores[1]).abs() / 2
    expected = {"mean": mean, "min": torch.minimum(*scores), "mean_minus_std": mean - 2 * spread}
    assert all(torch.allclose(actual[combine], expected[combine], atol=1e-4) for combine in expected)
    assert capsys.readouterr().err.count("check  reward model  correlation 1.0000") == 6
    (tmp_path / "ppo").mkdir()
    done = ppo.run(PPO, tmp_path / "ppo", policy=inputs["base"], reward=given, pairs=inputs["pairs"])
    assert done["iterations"] == 1


def test_ppo_refuses_a_reward_model_that_scores_otherwise_than_in_training(trained, tmp_path):
    folder, _, inputs = trained
    shutil.copytree(folder / "out", tmp_path / "damaged")
    weights = tmp_path / "damaged" / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({name: -t if "score" in name else t for name, t in tensors.items()}, weights)
    tok = tokenizer.load_tokenizer(inputs["base"])
    with pytest.raises(ValueError, match=r"does not score as in training: correlation -1.*fp32, loaded in fp32"):
        build(PPO, tok, inputs, tmp_path / "damaged")


@pytest.mark.parametrize("served_as", ["merged", "adapter"])
def test_reward_models_of_other_folders_are_combined_with_the_first(trained, served_as, tmp_path):
    folder, _, inputs = trained
    shutil.copytree(folder / "out" / "member-1", tmp_path / "other")
    if served_as == "merged":
        tiny_models.merge(inputs["base"], [tmp_path / "other"], tmp_path / "merged")
    given = folder / "out", tmp_path / ("merged" if served_as == "merged" else "other")
    texts = SimpleNamespace(prompts=[[1, 5, 6], [1, 9]], responses=[[40, 41, 2], [42, 2]], ended=[True, True])
    rewards = {}
    for name, rewards_entry in (("each", str(given[1])), ("both", None)):
        entries = (RewardSource(), RewardSource(rewards_entry)) if rewards_entry else (RewardSource(),)
        config = replace(PPO, rewards=entries, reward_combine="min")
        tok = tokenizer.load_tokenizer(inputs["base"])
        trainer, sources = build(config, tok, inputs, given[0])
        assert len(sources) == (3 if rewards_entry else 2) and {source.part for source in sources} == {"model"}
        rewards[name] = trainer.reward_shaper(texts, update_statistics=False).rewards
    assert torch.allclose(rewards["each"], rewards["both"], atol=1e-4), "min: the same model once more changes nothing"
    entries = (RewardSource(), RewardSource(str(given[1]), weight=2.0))
    with pytest.raises(ValueError, match="give them the same weight"):
        build(replace(PPO, rewards=entries), tok, inputs, given[0])


def test_a_spread_penalty_needs_its_way_of_combining():
    with pytest.raises(ValueError, match="spread_penalty is the coefficient of reward_combine 'mean_minus_std'"):
        replace(PPO, spread_penalty=0.5)
