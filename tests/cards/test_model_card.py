"""The card of a merged model: it says what the artifacts say, its code runs, and names from data stay text."""

import html
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from stages import merge, reward, sft
from stages.artifacts.artifact import MANIFEST
from stages.artifacts.lineage import Origin
from stages.cards.model_card import LIMITS, POLICY_LIMITS, SCORE_LIMITS, MergedModel, render_model_card
from stages.model_files.provenance import Provenance
from stages.recipe.sections.models import Lora, Merge
from stages.recipe.sections.reward import Reward
from stages.recipe.sections.sft import Sft
from tests.helpers import tiny_models

PAIRS = {"sites": {"a <script>alert(1)</script>": {"questions": 3, "pairs": 7}}, "licenses": {"CC BY-SA 4.0": 9}}
MADE = MergedModel("ppo", {"lora": {"r": 4}, "seed": 1}, {"validation_kl": 0.25, "stopped_early": False, "note": "x"},
            {"merge_difference": 1e-6}, Origin("scratch", PAIRS))


def front_matter(card: str) -> dict:
    _, values, _ = card.split("---\n", 2)
    return yaml.safe_load(values)


def test_it_says_what_is_known():
    card = render_model_card(MADE)
    assert front_matter(card) == {"library_name": "transformers", "pipeline_tag": "text-generation",
                                  "license": "cc-by-sa-4.0", "language": ["en"],
                                  "tags": ["stack-exchange", "human-feedback", "rlhf", "ppo"]}
    for part in ("| lora&#46;r | 4 |", "validation&#95;kl", "0.25", "1e-06", "| 3 | 7 |", "trained from scratch"):
        assert part in card or part.replace("&#46;", ".").replace("&#95;", "_") in card, part
    assert "stopped" not in card.split("## Measured")[1].split("## Licence")[0]  # a yes or no is no measure
    assert "<script" not in card and all(limit in card for limit in [*LIMITS, *POLICY_LIMITS])
    assert not any(limit in card for limit in SCORE_LIMITS)


def test_a_judge_is_a_scorer():
    card = render_model_card(replace(MADE, stage="judge"))
    assert front_matter(card)["pipeline_tag"] == "text-classification"
    assert "scores answers: judge" in card and "other questions" in card
    assert all(limit in card for limit in SCORE_LIMITS) and not any(limit in card for limit in POLICY_LIMITS)


def test_another_bases_licence_is_not_made_up():
    values = front_matter(render_model_card(replace(MADE, stage="reward", origin=Origin("huggyllama/llama-7b", PAIRS))))
    assert values["base_model"] == "huggyllama/llama-7b" and "license" not in values
    cards = [render_model_card(replace(MADE, origin=Origin(base, PAIRS))) for base in ("a/b", "scratch")]
    assert ["own licence holds" in card for card in cards] == [True, False]
    assert values["pipeline_tag"] == "text-classification"
    bare = render_model_card(replace(MADE, origin=Origin(), config={}, metrics={}, merge={}))
    assert "base_model" not in front_matter(bare) and "## Recipe" not in bare and "## Licence" not in bare


def test_a_converted_base_is_named_with_its_licence_and_its_rounding():
    provenance = Provenance("owner/chat-model", "apache-2.0", "m.gguf", "0" * 64, True, "Q4_1", 4)
    card = render_model_card(replace(MADE, origin=Origin("some/folder", PAIRS, [], provenance)))
    assert front_matter(card)["base_model"] == "owner/chat-model" and "license" not in front_matter(card)
    base = html.unescape(card.split("## Base")[1].split("## Data")[0])
    for part in ("owner/chat-model", "licence apache-2.0", "tuned for chat before", "rounded to 4 bits (Q4_1, m.gguf)"):
        assert part in base, base


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """sft on a base, reward on what that merges to, with manifests as the stages' commands write them."""
    folder = tmp_path_factory.mktemp("cards")
    tiny_models.save_base(folder / "base")
    inputs = {"pairs": tiny_models.save_pairs(folder / "pairs")}
    (inputs["pairs"] / "metrics.json").write_text(json.dumps(PAIRS))
    manifest(folder / "base", "base", {"model": "scratch"}, None)
    for stage, run, config, base in (
        ("sft", sft.run, Sft(lora=Lora(r=4, dropout=0.0), precision="fp32", sequence_length_tokens=64, max_steps=2,
                             batch_sequences=2, microbatch_sequences=2), folder / "base"),
        ("reward", reward.run, Reward(lora=Lora(r=4, dropout=0.0), precision="fp32"), folder / "sft-merged"),
    ):
        (folder / stage).mkdir()
        metrics = run(config, folder / stage, base=base, **inputs)
        manifest(folder / stage, stage, {"precision": "fp32"}, base, metrics)
        merge.run(Merge(dtype="fp32"), folder / f"{stage}-merged", base=base, adapter=[str(folder / stage)], **inputs)
        manifest(folder / f"{stage}-merged", "merge", {}, base)
    return folder


def manifest(folder: Path, stage: str, config: dict, base: Path | None, metrics: dict | None = None) -> None:
    from stages.artifacts.artifact import digest

    inputs = {} if base is None else {"base": {"path": str(base), "sha256": digest(base)}}
    (folder / MANIFEST).write_text(json.dumps({"stage": stage, "config": config, "inputs": inputs,
                                               "metrics": metrics or {}}))


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_its_code_runs_as_written(library_forks, made, tmp_path, stage):
    card = (made / f"{stage}-merged" / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0].replace("THIS_FOLDER", str(made / f"{stage}-merged"))
    (tmp_path / "code_of_card.py").write_text(code)
    fork = library_forks.start(["code_of_card"], environment=os.environ | {"PYTHONPATH": str(tmp_path)})
    said, errors = fork.communicate()
    assert fork.returncode == 0, errors[-2000:]
    assert stage == "sft" or said.startswith("tensor([")


def test_the_base_is_found_through_the_ancestors(made):
    for stage in ("sft", "reward"):
        card = (made / f"{stage}-merged" / "README.md").read_text()
        assert "trained from scratch" in card and front_matter(card)["license"] == "cc-by-sa-4.0"
        assert "precision" in card.split("## Recipe")[1]
    assert "validation" in card.split("## Measured")[1]
