"""What the PPO stage adds to the engine: prompts, missing-EOS penalty, start-up check (CORRECTNESS G5, D6, D8)."""

from types import SimpleNamespace

import pytest

from stages import ppo
from stages.recipe.models import Lora
from stages.recipe.ppo import Ppo, RewardSource
from stages.stackexchange.prompt import prompt_ids
from tests.helpers import tiny_models


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return tiny_models.save_pairs(tmp_path_factory.mktemp("ppo") / "pairs", questions_per_split=40)


def test_prompts_are_unique_questions_split_without_overlap(pairs):
    tok = tiny_models.tokenizer()
    training, validation, dropped = ppo._prompts(Ppo(validation_prompts=6), tok, pairs)
    assert len(training) == 34 and len(validation) == 6 and dropped == 0
    assert len({tuple(prompt) for prompt in training + validation}) == 40  # the table holds up to three pairs of each


def test_a_small_site_keeps_three_quarters_of_its_prompts_for_training(pairs):
    training, validation, _ = ppo._prompts(Ppo(validation_prompts=64), tiny_models.tokenizer(), pairs)
    assert (len(training), len(validation)) == (30, 10)


def test_over_long_prompts_are_dropped_and_counted_never_cut(pairs):
    tok = tiny_models.tokenizer()
    every = [prompt for part in ppo._prompts(Ppo(), tok, pairs)[:2] for prompt in part]
    limit = sorted(map(len, every))[20]
    training, validation, dropped = ppo._prompts(Ppo(max_prompt_tokens=limit), tok, pairs)
    kept = training + validation
    assert max(map(len, kept)) <= limit and dropped == sum(len(prompt) > limit for prompt in every) > 0
    assert all(prompt[-2:] == prompt_ids(tok, "x")[-2:] for prompt in kept)


def test_too_few_prompts_are_refused_in_one_line(pairs):
    with pytest.raises(ValueError, match="ppo needs at least 4"):
        ppo._prompts(Ppo(max_prompt_tokens=3), tiny_models.tokenizer(), pairs)


def test_every_prompt_is_used_once_a_pass_in_a_fresh_order():
    loop = SimpleNamespace(config=Ppo(rollout_prompts=8, minibatch_prompts=8), prompts=list(range(12)), iteration=0)
    drawn = []
    for loop.iteration in range(3):
        drawn += ppo._Loop._prompt_order(loop)
    assert sorted(drawn[:12]) == sorted(drawn[12:]) == list(range(12)) and drawn[:12] != drawn[12:]


def test_dropout_in_ppo_is_refused():
    with pytest.raises(ValueError, match=r"lora\.dropout must be 0"):
        Ppo(lora=ppo.Ppo().lora.__class__(dropout=0.1))


def test_the_step_size_falls_linearly_to_nothing_or_stays():
    """CORRECTNESS P8."""
    rates = []
    for decay in (True, False):
        config = Ppo(iterations=4, learning_rate=0.8, learning_rate_decay=decay)
        loops = [SimpleNamespace(config=config, iteration=iteration) for iteration in range(4)]
        rates.append([ppo._Loop._learning_rate(loop) for loop in loops])
    assert rates == [pytest.approx([0.8, 0.6, 0.4, 0.2]), [0.8] * 4]


def test_stop_ids_come_from_the_tokenizer_or_the_recipe(tmp_path, pairs):
    base = tiny_models.save_base(tmp_path / "base")
    tok = tiny_models.tokenizer()
    small = {"lora": Lora(r=2, dropout=0.0), "precision": "fp32", "rewards": (RewardSource("response_tokens"),)}
    for asked, expected in ((None, (tok.eos_token_id,)), ((5, 7), (5, 7)), ((), ())):
        engine, _ = ppo._engine(Ppo(stop_ids=asked, **small), tok, base, tmp_path / "none")
        assert tuple(engine.sampling.stop_ids) == expected
