"""The stage `judge`: a reward model as of stages.reward, of another seed and other questions; none on a small site."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from stages import evaluate, judge, merge, reward
from stages.artifacts.artifact import read_manifest
from stages.command_line import command
from stages.evaluation.tasks import held_out
from stages.modeling.tokenizer import load_tokenizer
from stages.recipe.sections.models import Lora, Merge
from stages.recipe.sections.reward import Reward
from stages.reward_modeling import dataset
from stages.reward_modeling.scoring_file import read_no_model
from stages.stackexchange.pairs.table import SPLITS, question_key, read_pairs
from tests.helpers import tiny_evaluation, tiny_models

CONFIG = Reward(lora=Lora(r=2), precision="fp32", batch_pairs=4, microbatch_pairs=4, learning_rate=1e-3, members=2,
                validation_share=0.2, seed=3)
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("judge")
    return {"base": tiny_models.save_base(folder / "base"), "pairs": tiny_models.save_pairs(folder / "pairs", 20)}


def run(stage, config: Reward, out: Path, inputs: dict[str, Path]) -> dict[str, float]:
    out.mkdir()
    return stage.run(config, out, **inputs)


def keep_splits(pairs: Path, out: Path, **sources: str) -> Path:
    """Copy splits of the pairs: the new split's name = the old one's."""
    for name, source in sources.items():
        shutil.copytree(pairs / source, out / name)
    return out


def test_equals_a_reward_model_of_one_member_and_another_seed_on_the_rl_split(inputs, tmp_path):
    run(judge, CONFIG, tmp_path / "judge", inputs)
    pairs = keep_splits(inputs["pairs"], tmp_path / "pairs", reward="rl")
    run(reward, replace(CONFIG, members=1, seed=CONFIG.seed + judge.SEED_OFFSET), tmp_path / "same",
        inputs | {"pairs": pairs})
    run(reward, replace(CONFIG, members=1), tmp_path / "other-seed", inputs | {"pairs": pairs})
    judged, same, other = ((tmp_path / name / WEIGHTS).read_bytes() for name in ("judge", "same", "other-seed"))
    assert judged == same != other
    assert not (tmp_path / "judge" / "member-1").exists()


def test_reads_no_split_but_rl(inputs, tmp_path):
    only = keep_splits(inputs["pairs"], tmp_path / "only", rl="rl")
    assert run(judge, CONFIG, tmp_path / "judge", inputs | {"pairs": only})["pairs"] > 0
    others = keep_splits(inputs["pairs"], tmp_path / "others", **{name: name for name in SPLITS if name != "rl"})
    with pytest.raises(ValueError, match="has no rl/part"):
        run(judge, CONFIG, tmp_path / "failed", inputs | {"pairs": others})


def test_its_questions_are_neither_the_reward_models_nor_the_evaluations(inputs):
    tokenizer = load_tokenizer(inputs["base"])
    trained = {}
    for name, split in (("reward", reward.SPLIT), ("judge", judge.SPLIT)):
        data = reward.load_data(CONFIG, tokenizer, inputs["base"], inputs["pairs"], split)
        trained[name] = {example.question for example in data.training} | set(map(question_key, data.validation.rows))
    evaluated = set(map(question_key, read_pairs(inputs["pairs"], held_out.SPLIT)))
    baselines = set(map(question_key, read_pairs(inputs["pairs"], held_out.BASELINE_SPLIT)))
    assert len(trained["judge"]) == len(trained["reward"]) == 20
    assert not trained["judge"] & (trained["reward"] | evaluated | baselines)


def test_a_site_with_too_few_pairs_gets_an_artifact_that_says_so(inputs, tmp_path, capfd):
    """The judge, its merge and the evaluation finish; the same data in the reward split are an error."""
    short = replace(CONFIG, max_length_tokens=1)
    command.make(judge.run, short, tmp_path / "judge", inputs)
    merging = {"base": inputs["base"], "adapter": [str(tmp_path / "judge")], "pairs": inputs["pairs"]}
    command.make(merge.run, Merge(dtype="fp32"), tmp_path / "judge-merged", merging)
    for name in ("judge", "judge-merged"):
        assert list(read_manifest(tmp_path / name)["files"]) == ["no_model.json"]
        assert "hardly a usable pair in its rl split" in read_no_model(tmp_path / name)
    with pytest.raises(dataset.TooFewPairsError, match="hardly a usable pair in its reward split"):
        run(reward, short, tmp_path / "reward", inputs)
    (tmp_path / "evaluation").mkdir()
    evaluated = tiny_evaluation.save_inputs(tmp_path / "evaluation", tiny_evaluation.make_tokenizer())
    command.make(evaluate.run, tiny_evaluation.CONFIG, tmp_path / "evaluate",
                 evaluated | {"judge": tmp_path / "judge-merged"})
    assert "evaluate: there is no judge: " in capfd.readouterr().err
    assert json.loads((tmp_path / "evaluate/metrics.json").read_text())["table"]
