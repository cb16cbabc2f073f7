"""How much text a run has, and how long its texts are, from a pairs artifact."""

from dataclasses import replace

import pyarrow as pa
import pytest

from stages import merge
from stages.modeling.packed import forward
from stages.planning.data_size import DataSize, measure_dump, measure_pairs
from stages.planning.hardware import Card, Hardware
from stages.planning.other_costs import FORWARD_TOKENS, SAMPLED_AT_ONCE, plan_stage
from stages.planning.stage_plan import Run
from stages.recipe.sections.data import Pairs
from stages.recipe.sections.evaluate import Evaluate
from stages.recipe.sections.models import Merge
from stages.recipe.sections.rejection_sampling import ExpertIteration
from stages.recipe.sections.reward import Reward
from stages.reward_modeling import sampled_pairs
from stages.stackexchange.pairs.table import SCHEMA, SPLITS, PairsWriter
from tests.planning.small_model import HARDWARE, REWARD, SECTIONS, small_shape

ROWS = [("a" * 400, 1, 40, 2, 120), ("a" * 400, 1, 40, 3, 80), ("b" * 200, 4, 800, 5, 160)]  # of two questions


@pytest.fixture
def pairs(tmp_path):
    for split in SPLITS:
        (tmp_path / split).mkdir()
        writer = PairsWriter(tmp_path / split / "part-0.parquet")
        rows = [dict.fromkeys(SCHEMA.names) | {
            "site": "s", "qid": len(question), "question": question, "answer_j": better, "answer_k": worse,
            "response_j": "j" * better_length, "response_k": "k" * worse_length}
            for question, better, better_length, worse, worse_length in ROWS]
        writer.add(pa.Table.from_pylist(rows, schema=SCHEMA))
        writer.close()
    return tmp_path


def test_texts_have_the_lengths_of_the_pairs(pairs):
    size = measure_pairs(pairs, None)
    assert (size.reward_pairs, size.evaluation_pairs, size.rl_questions) == (3, 3, 2)
    assert size.question_lengths == (100, 50)
    assert size.answer_lengths == (10, 30, 20, 200, 40)  # the better answer of two pairs is one
    assert size.finetune_tokens == (400 + 40 + 400 + 40 + 200 + 800) / 4
    assert measure_pairs(pairs, 100).finetune_tokens == (400 + 40 + 400 + 40) / 4  # the long answer is left out


def test_a_batch_by_question_has_every_text_once(pairs):
    size = measure_pairs(pairs, None)
    assert size.pair_tokens(512, "question") == (600 + 1200) / 4 / 3
    assert size.pair_tokens(512, "pair") == 2 * (75 + 60) and size.pair_tokens(50, "pair") == 100
    assert size.sample_tokens(32, 512) == (32, 60)
    assert size.sample_tokens(60, 20) == (50, (10 + 4 * 20) / 5)  # a prompt left out, and four responses cut off
    assert DataSize().pair_tokens(512, "pair") == 512 and DataSize().sample_tokens(100, 50) == (50, 25)


def test_a_processor_has_a_rate_for_each_precision():
    processor, card = (Hardware(Card("", 8, 2.0, 20, fp32), 1, 0.5) for fp32 in (1.0, None))
    assert [processor.compute_seconds(1e12, precision) for precision in ("fp32", None, "bf16", "mixed")] == [2, 2, 1, 1]
    assert card.compute_seconds(1e12, "fp32") == 1


def test_the_posts_of_a_small_dump_are_counted(tmp_path):
    """Two questions have answers of different scores; a third one has a single answer."""
    rows = [(1, 1, None, 5, 400), (2, 2, 1, 0, 40), (3, 2, 1, 7, 80), (4, 2, 1, 1, 120), (5, 1, None, 0, 200),
            (6, 2, 5, 3, 160), (7, 2, 5, 0, 800), (8, 1, None, 0, 99), (9, 2, 8, 1, 99)]
    lines = [f'  <row Id="{own}" PostTypeId="{kind}" ParentId="{parent}" Score="{score}" '
             f'Body="&lt;p&gt;{"x" * size}&lt;/p&gt;" />' for own, kind, parent, score, size in rows]
    posts = tmp_path / "Posts.xml"
    posts.write_text("\n".join(["<posts>", *lines, "</posts>"]))
    shares = Pairs(finetune_share=1, reward_share=1, rl_share=1, evaluation_share=1)
    size = measure_dump([str(posts)], shares, None)
    assert (size.reward_pairs, size.rl_questions, size.evaluation_pairs) == (1, round(2 / 4), 1)  # a quarter of 4 and 2
    assert size.question_lengths == (100, 50) and size.answer_lengths == (10, 20, 30, 40, 200)
    assert size.shared_pair_tokens == (150 + 300) / 4
    assert size.finetune_tokens == (3 * 400 + 80 + 120 + 80 + 200 + 160) / 4 / 4  # the better answers of four pairs
    assert measure_dump([str(posts)], shares, 35).finetune_tokens == round((3 * 400 + 80 + 120 + 80) / 4 / 4)


@pytest.mark.parametrize("name", ["Posts.xml", "demo.7z"])
def test_a_dump_that_cannot_be_read_is_measured_by_its_size(tmp_path, name):
    (tmp_path / name).write_bytes(b"x" * 1000)
    size = measure_dump([str(tmp_path / name)], Pairs(), None)
    assert size.reward_pairs is None


@pytest.mark.parametrize(("settings", "scorings"), [
    (SECTIONS["ppo"], lambda samples: samples * 80),  # half of 128 and of 32 tokens, by the reward model
    (Evaluate(max_prompt_tokens=128, max_response_tokens=32, max_pairs=1), None)])
def test_a_reward_model_of_the_first_layers_computes_less(settings, scorings):
    shape = small_shape(4)
    cut = Reward(precision="fp32", tune="head", pooling="mean", layers=1)
    runs = [Run(shape, HARDWARE, DataSize(), reward) for reward in (Reward(precision="fp32"), cut)]
    whole, part = (plan_stage("ppo" if scorings else "evaluate", run, settings).flops for run in runs)
    saved = 2 * (shape.count_parameters() - shape.cut(1).count_parameters())
    if scorings:
        assert whole - part == saved * scorings(settings.iterations * settings.rollout_prompts)
    else:
        assert 0.2 * whole < whole - part < 0.6 * whole


@pytest.mark.parametrize("stage", ["reward", "judge"])
def test_samples_take_their_time_before_a_reward_model_is_trained(stage):
    """Two samples a question, and for a quarter as many held-out ones, each of half of its limits."""
    reward = Reward(precision="fp32", max_length_tokens=64)
    sampled = replace(reward, sampled_questions=8, max_sampled_tokens=32)
    without, plan = (plan_stage(stage, Run(small_shape(4), HARDWARE, DataSize(), section), section)
                     for section in (reward, sampled))
    answers = len(sampled_pairs.TEMPERATURES) * (8 + 2)
    assert f"at most {answers} samples" in plan.assumption
    assert plan.tokens - without.tokens == answers * (32 + 16)
    assert plan.flops - without.flops == 2 * small_shape(4).count_parameters() * answers * (32 + 16)
    assert plan.seconds > without.seconds and SAMPLED_AT_ONCE == sampled_pairs.BATCH_PROMPTS


def test_expert_iteration_fine_tunes_on_every_draw():
    """100 prompts of 4 blocks: 3 draws to each take three times the blocks of one, and the same samples."""
    best = ExpertIteration(precision="fp32", rounds=1, n=4, max_prompt_tokens=256, max_response_tokens=256,
                           sequence_length_tokens=64)
    tilted = replace(best, keep="tilted", keep_draws=3)
    run = Run(small_shape(4), HARDWARE, DataSize(rl_questions=100), REWARD)
    one, three = (plan_stage("expert_iteration", run, each) for each in (best, tilted))
    assert three.tokens - one.tokens == 2 * 100 * 4 * 64 and three.seconds > one.seconds


def test_a_forward_pass_is_planned_as_large_as_it_is():
    assert FORWARD_TOKENS == forward.FORWARD_TOKENS


@pytest.mark.parametrize(("stage", "layers", "scorer"), [("ppo-merged", 4, False), ("reward-merged", 1, True)])
def test_a_merge_evaluates_the_adapter_and_the_merged_model(stage, layers, scorer):
    """Texts or pairs of unknown length: each text, a question and an answer, has half of its limits."""
    shape, reward = small_shape(4), Reward(precision="fp32", tune="head", pooling="mean", layers=1)
    plan = plan_stage(stage, Run(shape, HARDWARE, DataSize(), reward), Merge(check_precision="fp32"))
    assert plan.parameters == small_shape(layers).count_parameters(scorer)
    assert plan.flops == 2 * merge.MAX_PAIRS * merge.MAX_TOKENS * 2 * plan.parameters
    assert plan.seconds == HARDWARE._replace(devices=1).compute_seconds(plan.flops, "fp32") > 0
