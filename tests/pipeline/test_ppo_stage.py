"""What the PPO stage adds to the trainer: prompts, the learning-rate schedule, stop ids (CORRECTNESS G5, D6, D8)."""

import shutil
from types import SimpleNamespace

import pytest

from stages import ppo
from stages.recipe.recipe import select_settings
from stages.recipe.sections.models import Lora
from stages.recipe.sections.ppo import Ppo
from stages.recipe.sections.rewards import RewardSource
from stages.rl.inputs import Inputs
from stages.rl.training_loop import LoopSettings, draw_prompt_indices, kl_factor, learning_rate_factor
from stages.stackexchange.prompt import prompt_ids
from tests.helpers import tiny_models


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return tiny_models.save_pairs(tmp_path_factory.mktemp("ppo") / "pairs", questions_per_split=40)


def load_prompts(config: Ppo, tok, pairs) -> tuple:
    return ppo.load_training_prompts(config, tok, Inputs(pairs, pairs=pairs), "ppo")


def test_prompts_are_unique_questions_split_without_overlap(pairs):
    tok = tiny_models.tokenizer()
    training, validation, too_long = load_prompts(Ppo(validation_prompts=6), tok, pairs)
    assert len(training) == 34 and len(validation) == 6 and too_long == 0
    assert len({tuple(prompt) for prompt in training + validation}) == 40  # the table has up to three pairs of each


def test_a_small_site_trains_on_three_quarters_of_its_prompts(pairs):
    training, validation, _ = load_prompts(Ppo(validation_prompts=64), tiny_models.tokenizer(), pairs)
    assert (len(training), len(validation)) == (30, 10)


def test_over_long_prompts_are_dropped_and_counted_never_cut(pairs):
    tok = tiny_models.tokenizer()
    every = [prompt for part in load_prompts(Ppo(), tok, pairs)[:2] for prompt in part]
    limit = sorted(map(len, every))[20]
    training, validation, too_long = load_prompts(Ppo(max_prompt_tokens=limit), tok, pairs)
    prompts = training + validation
    assert max(map(len, prompts)) <= limit and too_long == sum(len(prompt) > limit for prompt in every) > 0
    assert all(prompt[-2:] == prompt_ids(tok, "x")[-2:] for prompt in prompts)


def test_too_few_prompts_are_refused_in_one_line(pairs):
    with pytest.raises(ValueError, match="ppo needs at least 4"):
        load_prompts(Ppo(max_prompt_tokens=3), tiny_models.tokenizer(), pairs)


def test_every_prompt_is_used_once_per_pass_in_a_new_order():
    drawn = [index for iteration in range(3) for index in draw_prompt_indices(12, 8, iteration, seed=0)]
    assert sorted(drawn[:12]) == sorted(drawn[12:]) == list(range(12)) and drawn[:12] != drawn[12:]


def test_dropout_in_ppo_is_refused():
    with pytest.raises(ValueError, match=r"lora\.dropout must be 0"):
        Ppo(lora=Ppo().lora.__class__(dropout=0.1))


def test_the_learning_rate_decays_linearly_to_0_or_is_constant():
    """CORRECTNESS P8."""
    rates = []
    for decay in (True, False):
        config = Ppo(iterations=4, learning_rate_decay=decay)
        settings = LoopSettings(**select_settings(LoopSettings, config))
        rates.append([0.8 * learning_rate_factor(settings, iteration) for iteration in range(4)])
    assert rates == [pytest.approx([0.8, 0.6, 0.4, 0.2]), [0.8] * 4]


def test_the_kl_coefficient_falls_geometrically_over_the_first_half():
    factors = []
    for factor in (4.0, 1.0):
        settings = LoopSettings(**select_settings(LoopSettings, Ppo(iterations=8, kl_anneal_factor=factor)))
        factors.append([kl_factor(settings, iteration) for iteration in range(8)])
    assert factors == [pytest.approx([4, 2 * 2**0.5, 2, 2**0.5] + [1] * 4), [1] * 8]


def test_without_room_for_checkpoints_nothing_is_trained(tmp_path, pairs, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    config = Ppo(lora=Lora(r=2, dropout=0.0), precision="fp32", rewards=(RewardSource("response_tokens"),),
                 log_to=("jsonl",))
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"^checkpoints and weights: needs .* of disk space .*1,000 bytes are free"):
        ppo.run(config, tmp_path / "out", policy=tiny_models.save_base(tmp_path / "base"), reward=tmp_path / "none",
                pairs=pairs)
    assert not list((tmp_path / "out").glob("*.json*"))


def test_stop_ids_come_from_the_tokenizer_or_the_recipe(tmp_path, pairs):
    base = tiny_models.save_base(tmp_path / "base")
    tok = tiny_models.tokenizer()
    small = {"lora": Lora(r=2, dropout=0.0), "precision": "fp32", "rewards": (RewardSource("response_tokens"),)}
    for stop_ids, expected in ((None, (tok.eos_token_id,)), ((5, 7), (5, 7)), ((), ())):
        config, sources = Ppo(stop_ids=stop_ids, **small), Inputs(base, tmp_path / "none", pairs)
        trainer, _ = ppo.build_trainer(config, ppo.make_method(config), tok, sources)
        assert tuple(trainer.sampling.stop_ids) == expected
