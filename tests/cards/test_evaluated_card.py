"""Metadata of cards in the Hub's form: language, data sets, licence, and the evaluation's numbers as model-index."""

import json
import math

import pytest
import yaml
from huggingface_hub import ModelCard

from stages import report
from stages.artifacts.artifact import digest
from stages.artifacts.lineage import Origin, find_hub_datasets, find_pretrained
from stages.cards import adapter_card
from stages.cards.evaluated_card import render_evaluated_card
from stages.cards.model_card import MergedModel, render_model_card
from stages.cards.sections import CARD, origin_metadata
from stages.model_files.provenance import Provenance, write_provenance
from tests.helpers.finished_run import EVIL, metrics

PROVENANCE = Provenance("owner/chat-model", "apache-2.0", "m.gguf", "0" * 64, True, "Q4_1", 4)
ADAPTER = {"task_type": "CAUSAL_LM", "r": 4, "base_model_name_or_path": "b", "target_modules": ["q"]}
PAIRS = {"sites": {"beer.stackexchange.com": {"questions": 3, "pairs": 7}}, "licenses": {"CC BY-SA 4.0": 9}}


def card_of(stage: str) -> str:
    return render_model_card(MergedModel(stage, {"seed": 1}, {}, {}, Origin("scratch", PAIRS)))


def evaluated(writer: str, numbers: dict | None = None, sites=("beer.stackexchange.com",)) -> ModelCard:
    text = render_evaluated_card(card_of(writer), f"{writer}-merged", writer, numbers or metrics(), list(sites))
    card = ModelCard(text)  # the Hub's client validates what it reads
    assert ModelCard(str(card)).data.to_dict() == card.data.to_dict()
    return card


@pytest.mark.parametrize(("writer", "task", "kinds"), [
    ("ppo", "text-generation", ["gold", "gold", "win_rate", "kl", "eos_rate"]),
    ("sft", "text-generation", ["gold", "eos_rate"]), ("reward", "text-classification", ["accuracy", "accuracy"])])
def test_the_model_index_has_the_evaluations_numbers(writer, task, kinds):
    card = evaluated(writer)
    assert [(result.metric_type, result.task_type) for result in card.data.eval_results] == [
        (kind, task) for kind in kinds]
    assert all(math.isfinite(result.metric_value) for result in card.data.eval_results)
    assert {result.dataset_name for result in card.data.eval_results} == {
        "held-out questions of beer.stackexchange.com"}
    front = yaml.safe_load(str(card).split("---\n")[1])
    assert front["model-index"][0]["name"] == f"{writer}-merged"
    assert front["license"] == "cc-by-sa-4.0" and front["language"] == ["en"], "what the card had is still there"
    assert "## Evaluation" in card.text and "## How to use it" in card.text


def test_numbers_have_their_intervals_and_the_verdict_is_said():
    card = evaluated("ppo", metrics(gold=-0.2))
    results = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert results["win rate against SFT by the learnt reward, at temperature 1 (95 % interval 0.680 to 0.720)"] == 0.7
    assert results["gold, PPO at temperature 0.3"] == 1.25
    assert "Reward hacking by PPO." in card.text and "0.700 [0.680, 0.720]" in card.text


def test_without_gold_the_learnt_reward_is_named_as_what_it_is():
    names = [result.metric_name for result in evaluated("ppo", metrics(gold=None)).data.eval_results]
    assert names[1].startswith("reward, PPO minus SFT") and not any("gold" in name for name in names)


def test_a_reward_model_without_pairs_keeps_its_card():
    numbers = metrics()
    numbers["reward_model"] |= {"accuracy": None, "above_best_cheap_baseline": None}
    assert evaluated("reward", numbers).data.eval_results is None


def test_names_of_sites_stay_text():
    card = evaluated("ppo", sites=[EVIL, "a|b\n---\nx: y", *map(str, range(9))])
    assert "<script" not in card.text and "6 more" in card.text
    assert card.data.library_name == "transformers" and "x" not in card.data.to_dict()


def test_the_report_writes_the_cards_of_what_was_evaluated(tmp_path):
    merged = {name: tmp_path / name for name in ("sft-merged", "reward-merged")}
    for name, folder in merged.items():
        folder.mkdir()
        (folder / CARD).write_text(card_of(name.removesuffix("-merged")))
        (folder / "manifest.json").write_text(json.dumps({"stage": "merge", "of": name}))
    digests = {name: digest(folder) for name, folder in merged.items()} | {"reward-merged": "another one"}
    inputs = {name: {"path": name, "sha256": digest(merged[f"{name}-merged"])} for name in ("sft", "reward")}
    manifests = {"evaluate": {"inputs": inputs}, "posts": {"metrics": PAIRS}}
    report._write_cards(tmp_path / "out", list(merged.values()), digests, manifests, metrics())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["sft-merged"], "of what was evaluated alone"
    card = ModelCard.load(tmp_path / "out" / "sft-merged" / CARD)
    assert card.data.eval_results
    assert (merged["sft-merged"] / CARD).read_text() == card_of("sft"), "a finished artifact is not touched"


@pytest.mark.parametrize(("origin", "expected"), [
    (Origin("scratch", PAIRS), {"language": ["en"], "license": "cc-by-sa-4.0"}),
    (Origin("org/model", PAIRS, ["owner/set"]), {"language": ["en"], "datasets": ["owner/set"]}),
    (Origin("scratch", {"sites": {"ru.stackoverflow.com": {}, "cooking": {}}}), {"language": ["en", "ru"]}),
    (Origin(), {})])
def test_metadata_say_what_is_known(origin, expected):
    assert origin_metadata(origin) == expected


def write_adapter_cards(folder, origin, monkeypatch):
    monkeypatch.setattr(adapter_card, "find_origin", lambda base, pairs: origin)
    adapter_card.write_adapter_cards(folder, folder / "base", folder / "pairs")


def test_the_cards_of_an_adapter_get_the_origin(tmp_path, monkeypatch):
    for folder in (tmp_path, tmp_path / "value"):
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
    (tmp_path / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "checkpoint-1" / "adapter_config.json").write_text("{}")  # sealed, without a card
    write_adapter_cards(tmp_path, Origin("scratch", PAIRS, ["owner/set"]), monkeypatch)
    for folder in (tmp_path, tmp_path / "value"):
        card = ModelCard.load(folder / CARD)
        assert (card.data.license, card.data.language, card.data.datasets, card.data.library_name) == (
            "cc-by-sa-4.0", ["en"], ["owner/set"], "peft")
        assert card.text.strip().startswith("# A LoRA adapter of rank 4") and "## Base" not in card.text


def test_an_adapters_card_says_where_a_converted_base_is_from(tmp_path, monkeypatch):
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER))
    write_adapter_cards(tmp_path, Origin("folder", provenance=PROVENANCE), monkeypatch)
    text = (tmp_path / CARD).read_text()
    for part in ("## Base", "owner/chat-model", "licence apache-2.0", "tuned for chat before", "rounded to 4 bits"):
        assert part in text.replace("&#45;", "-").replace("&#46;", "."), part


def test_the_origin_is_found_through_the_ancestors_from_any_folder(tmp_path, monkeypatch):
    """Paths in manifests are relative to the folder that the stage was started in."""
    def make(name, stage, config, **inputs):
        (tmp_path / "results/x" / name).mkdir(parents=True)
        (tmp_path / "results/x" / name / "manifest.json").write_text(json.dumps({
            "stage": stage, "config": config, "inputs": inputs}))

    def inside(name):
        return {"path": f"results/x/{name}", "sha256": "0"}

    make("base", "base", {"model": "org/model"}, pairs=inside("pairs"))
    make("sft-merged", "merge", {}, base=inside("base"))
    make("posts", "posts", {}, dump=[{"path": "owner/set", "sha256": None}])
    make("pairs", "pairs", {}, posts=inside("posts"))
    monkeypatch.chdir("/")
    run = tmp_path / "results/x"
    assert find_pretrained(run / "sft-merged") == ("org/model", None)
    assert find_hub_datasets(run / "pairs") == ["owner/set"]
    write_provenance(run / "base", PROVENANCE)
    assert find_pretrained(run / "sft-merged") == ("org/model", PROVENANCE)
    assert find_pretrained(tmp_path) == (None, None) and find_hub_datasets(tmp_path) == []
