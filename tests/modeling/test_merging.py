"""One rule for every merge: a fresh load computes what base and adapters did (CORRECTNESS M1, M2, failures 10, 11)."""

import json
import math
import shutil

import pytest
import torch
from peft.tuners.lora import LoraModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages import merge as stage
from stages.artifacts.artifact import MANIFEST
from stages.command_line import command
from stages.modeling import tokenizer
from stages.modeling.adapters import load_score_head
from stages.modeling.load import load_causal
from stages.modeling.lora import add_lora
from stages.modeling.merging import merge as modeling_merge
from stages.modeling.merging.checks import check_report, probe_ids, probe_outputs
from stages.recipe.sections.models import Merge
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.scoring_file import Scoring, describe_scoring, save_scoring
from tests.helpers import tiny_models
from tests.helpers.architectures import adapted, noisy


def save_adapter(base, folder, scorer=False, **lora):
    """An adapter of the base that has learnt something, with what a stage saves beside it."""
    model = adapted(base, scorer)
    if lora:
        settings = {"alpha": 8, "dropout": 0.0, "target_modules": (), "precision": "fp32"} | lora
        model = add_lora(load_causal(base), **settings)
        noisy([p for p in model.parameters() if p.requires_grad], 0.1)
    model.save_pretrained(folder)
    tokenizer.load_tokenizer(base).save_pretrained(folder)
    if scorer:
        content = describe_scoring(Scoring("last", 10.0), "fp32", ([[1]] * 2, [[5, 2]] * 2), torch.tensor([1.0, 2.0]))
        save_scoring(folder, content)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_models.save_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    return save_adapter(base, tmp_path_factory.mktemp("models") / "sft")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return tiny_models.save_pairs(tmp_path_factory.mktemp("models") / "pairs")


@pytest.fixture(scope="module")
def chain(base, adapter, tmp_path_factory):
    """sft on base; what it merges to; a second adapter and a reward adapter, both trained on that."""
    folder = tmp_path_factory.mktemp("chain")
    tiny_models.merge(base, [adapter], folder / "sft-merged")
    save_adapter(folder / "sft-merged", folder / "ppo", r=2)
    save_adapter(folder / "sft-merged", folder / "reward", scorer=True)
    return folder


def test_merged_folder_loads_plainly_and_computes_what_base_and_adapter_did(base, adapter, tmp_path):
    actual = tiny_models.merge(base, [adapter], tmp_path / "merged")
    assert actual["merge_difference"] < 1e-3 and actual["reload_difference"] < 1e-5
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = probe_ids(plain.config.vocab_size)
    untouched = probe_outputs(load_causal(base))
    with torch.no_grad():
        assert (plain(ids).logits - untouched).abs().max() > 0.01  # the adapter did something
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").pad_token_id == 0


def test_the_merged_model_samples_as_its_stage_did(base, adapter, tmp_path):
    """Without these, `generate` would cut at 20 tokens, and sample among the 50 most likely tokens only."""
    policy = shutil.copytree(adapter, tmp_path / "ppo")
    settings = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "max_response_tokens": 96, "stop_ids": None}
    (policy / MANIFEST).write_text(json.dumps({"stage": "ppo", "config": settings}))
    for folder, temperature, tokens in ((adapter, 1.0, 128), (policy, 0.7, 96)):
        tiny_models.merge(base, [folder], tmp_path / "merged")
        file = json.loads((tmp_path / "merged" / "generation_config.json").read_text())
        assert [file[name] for name in ("temperature", "max_new_tokens", "do_sample", "top_k", "eos_token_id")] == [
            temperature, tokens, True, 0, 2]


def test_tied_embeddings_stay_tied(base, adapter, tmp_path):
    tiny_models.merge(base, [adapter], tmp_path / "merged")
    model = load_causal(tmp_path / "merged")
    assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_a_merge_that_computes_something_else_is_refused(base, adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(LoraModel, "merge_and_unload", lambda self, **more: self.unload())
    with pytest.raises(ValueError, match="nothing is published"):
        tiny_models.merge(base, [adapter], tmp_path / "merged")


def test_weights_damaged_on_their_way_to_disk_are_refused(base, adapter, tmp_path, monkeypatch):
    real = load_causal

    def damaged(folder, **more):
        model = real(folder, **more)
        if str(folder).endswith("merged"):
            with torch.no_grad():
                model.get_input_embeddings().weight.mul_(1.1)
        return model

    monkeypatch.setattr(modeling_merge, "load_causal", damaged)
    with pytest.raises(ValueError, match="reloaded from disk"):
        tiny_models.merge(base, [adapter], tmp_path / "merged")


def test_bf16_is_saved_as_bf16_within_its_rounding(base, adapter, tmp_path):
    actual = tiny_models.merge(base, [adapter], tmp_path / "merged", dtype="bf16")
    assert 0 < actual["rounding_difference"] < 0.05 * actual["largest_output"] and actual["reload_difference"] < 1e-5
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").dtype == torch.bfloat16


def test_large_weights_are_saved_in_shards_that_load_as_one(base, adapter, tmp_path):
    tiny_models.merge(base, [adapter], tmp_path / "whole")
    actual = tiny_models.merge(base, [adapter], tmp_path / "shards", max_shard_bytes=20_000)
    files = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 2 and (tmp_path / "shards/model.safetensors.index.json").is_file()
    heaviest = max(tensor.nbytes for file in files for tensor in load_file(file).values())
    assert all(file.stat().st_size < max(20_000, heaviest) + 2_000 for file in files)
    assert actual["reload_difference"] < 1e-5
    shards, whole = (load_causal(tmp_path / name) for name in ("shards", "whole"))
    assert torch.equal(probe_outputs(shards), probe_outputs(whole))


def test_the_report_says_how_much_each_matrix_changed(base, adapter, tmp_path):
    actual = tiny_models.merge(base, [adapter], tmp_path / "merged")
    assert json.loads((tmp_path / "merged/merge.json").read_text()) == actual
    saved = load_file(adapter / "adapter_model.safetensors")
    weights = load_causal(base).state_dict()
    expected = {}
    for name in {name.split(".lora_")[0] for name in saved}:
        change = 8 / 4 * saved[f"{name}.lora_B.weight"] @ saved[f"{name}.lora_A.weight"]  # alpha / r
        plain = name.removeprefix("base_model.model.")
        expected[plain] = (float(change.norm()), float(change.norm() / weights[f"{plain}.weight"].norm()))
    assert {row["adapter"] for row in actual["layers"]} == {str(adapter)} and len(expected) == 4
    assert {row["name"]: (row["change_norm"], row["relative_change"]) for row in actual["layers"]} == {
        name: pytest.approx(values, rel=1e-5) for name, values in expected.items()}
    assert actual["largest_relative_change"] == pytest.approx(max(ratio for _, ratio in expected.values()), rel=1e-5)


def test_perplexity_is_of_the_better_answers_with_the_adapter_on_and_of_the_files(base, adapter, tmp_path):
    actual = tiny_models.merge(base, [adapter], tmp_path / "merged", dtype="bf16")
    with_adapter = modeling_merge.load_adapter(load_causal(base), adapter)
    for when, model in (("before", with_adapter), ("after", AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))):
        log_p = []
        for text in tiny_models.EXAMPLES:
            answer = text.answers[text.pairs[0][0]]
            with torch.no_grad():
                logits = model.float()(torch.tensor([text.prompt + answer])).logits[0, len(text.prompt) - 1 : -1]
            log_p += torch.log_softmax(logits.double(), -1)[range(len(answer)), answer].tolist()
        assert actual[f"perplexity_{when}"] == pytest.approx(math.exp(-sum(log_p) / len(log_p)), rel=1e-5)
    assert actual["perplexity_before"] != actual["perplexity_after"] and actual["pairs"] == len(tiny_models.EXAMPLES)


FINE = {"merge_difference": 1e-4, "reload_difference": 0.0, "largest_output": 2.0, "perplexity_before": 10.0,
        "perplexity_after": 10.05}
SCORER = {name: value for name, value in FINE.items() if "perplexity" not in name} | {
    "pair_accuracy_before": 0.75, "pair_accuracy_after": 0.71875}
LIMITS = {"max_logit_difference": 1e-3, "max_perplexity_change": 0.01, "max_accuracy_change": 0.05}


def test_a_report_within_its_limits_passes():
    check_report(FINE, **LIMITS)
    check_report(SCORER, **LIMITS)
    check_report(SCORER | {"pair_accuracy_before": 12 / 20, "pair_accuracy_after": 13 / 20}, **LIMITS)


@pytest.mark.parametrize(("report", "says"), [
    (FINE | {"merge_difference": 2e-3}, "differs from base and adapter by 0.002 .*max_logit_difference 0.001"),
    (FINE | {"merge_difference": math.nan}, "differs from base and adapter by nan"),
    (FINE | {"reload_difference": 3e-4}, "reloaded from disk differs .* by 0.0003 .*allowed: 0.0002"),
    (FINE | {"perplexity_after": 10.2}, r"from 10 to 10.2, relative change \+0.02 .*max_perplexity_change 0.01"),
    (FINE | {"perplexity_after": 9.8}, "relative change -0.02"),
    (FINE | {"perplexity_after": math.nan}, "perplexity goes from 10 to nan"),
    (SCORER | {"pair_accuracy_after": 0.625}, "pair accuracy goes from 0.750 to 0.625 .*max_accuracy_change 0.05"),
    (SCORER | {"pair_accuracy_after": 0.875}, "pair accuracy goes from 0.750 to 0.875"),
])
def test_above_any_limit_nothing_is_published(report, says):
    with pytest.raises(ValueError, match=f"{says}.*nothing is published"):
        check_report(report, **LIMITS)


# Several adapters


def test_two_adapters_give_what_merging_step_by_step_gives(base, adapter, chain, tmp_path):
    tiny_models.merge(chain / "sft-merged", [chain / "ppo"], tmp_path / "step")
    actual = tiny_models.merge(base, [adapter, chain / "ppo"], tmp_path / "merged")
    assert actual["merge_difference"] < 1e-4
    assert [row["adapter"] for row in actual["layers"]] == [str(adapter)] * 4 + [str(chain / "ppo")] * 4
    together, step = (load_causal(tmp_path / name) for name in ("merged", "step"))
    assert torch.allclose(probe_outputs(together), probe_outputs(step), atol=1e-5)
    assert (probe_outputs(step) - probe_outputs(load_causal(chain / "sft-merged"))).abs().max() > 0.01


def test_a_reward_adapter_on_sft_on_base_gives_what_merging_step_by_step_gives(base, adapter, chain, tmp_path):
    step = tiny_models.merge(chain / "sft-merged", [chain / "reward"], tmp_path / "step")
    actual = tiny_models.merge(base, [adapter, chain / "reward"], tmp_path / "merged")
    assert actual["pair_accuracy_before"] == step["pair_accuracy_before"] == actual["pair_accuracy_after"]
    together, alone = (load_classifier(tmp_path / name) for name in ("merged", "step"))
    assert torch.allclose(probe_outputs(together), probe_outputs(alone), atol=1e-5)
    tiny_models.merge(base, [chain / "reward"], tmp_path / "unfounded")
    assert (probe_outputs(alone) - probe_outputs(load_classifier(tmp_path / "unfounded"))).abs().max() > 1e-3
    assert torch.equal(together.score.weight, load_score_head(chain / "reward"))
    assert together.config.reward_mean == 1.5 and (tmp_path / "merged/scoring.json").is_file()


def test_a_head_that_changes_on_its_way_to_disk_is_refused(base, chain, tmp_path, monkeypatch):
    real = modeling_merge.write_shards

    def changed(model, tensors, *more):
        tensors.adapters[-1].whole["score.weight"][0, 0] += 1e-6
        real(model, tensors, *more)

    monkeypatch.setattr(modeling_merge, "write_shards", changed)
    with pytest.raises(ValueError, match=r"score head of .* nothing is published"):
        tiny_models.merge(chain / "sft-merged", [chain / "reward"], tmp_path / "merged")


def test_adapters_that_cannot_follow_each_other_are_refused(base, adapter, chain, tmp_path):
    with pytest.raises(ValueError, match=r"reward has a score head, and .*sft comes after it"):
        tiny_models.merge(base, [chain / "reward", adapter], tmp_path / "merged")
    with pytest.raises(ValueError, match=r"reward has a score head, and .*reward comes after it"):
        tiny_models.merge(base, [chain / "reward", chain / "reward"], tmp_path / "merged")
    with pytest.raises(ValueError, match="sft-merged is a whole model"):
        tiny_models.merge(base, [chain / "sft-merged", chain / "reward"], tmp_path / "merged")
    with pytest.raises(ValueError, match=r"there is no adapter .*nowhere"):
        tiny_models.merge(base, [adapter, tmp_path / "nowhere"], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_an_adapter_of_another_base_is_refused_in_one_line(adapter, chain, tmp_path):
    wide = tiny_models.save_base(tmp_path / "wide", width=64)
    with pytest.raises(ValueError, match=r"lora_A.weight is \[4, 32\] in the adapter, \[4, 64\] in the model") as error:
        tiny_models.merge(wide, [adapter], tmp_path / "merged")
    assert "\n" not in str(error.value) and str(adapter) in str(error.value)
    config = json.loads((chain / "reward/adapter_config.json").read_text())
    shutil.copytree(chain / "reward", tmp_path / "reward")
    (tmp_path / "reward/adapter_config.json").write_text(json.dumps(config | {"target_modules": ["c_attn"]}))
    with pytest.raises(ValueError, match="reward does not fit this llama model: "):
        tiny_models.merge(chain / "sft-merged", [tmp_path / "reward"], tmp_path / "merged")
    (tmp_path / "reward/adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj"]}))
    with pytest.raises(ValueError, match=r"v_proj.lora_A.weight is \[4, 32\] in the adapter, missing in the model"):
        tiny_models.merge(chain / "sft-merged", [tmp_path / "reward"], tmp_path / "merged")


# The stage


def test_the_manifest_has_the_reports_numbers(base, adapter, chain, pairs, tmp_path):
    sources = {"base": base, "adapter": [str(adapter)], "pairs": pairs}
    command.make(stage.run, Merge(), tmp_path / "sft-merged", sources)
    manifest = json.loads((tmp_path / "sft-merged/manifest.json").read_text())
    report = json.loads((tmp_path / "sft-merged/merge.json").read_text())
    assert manifest["metrics"] == {name: value for name, value in report.items() if name != "layers"}
    assert report["layers"] and manifest["metrics"]["pairs"] == 40 and "merge.json" in manifest["files"]
    assert abs(report["perplexity_after"] / report["perplexity_before"] - 1) < 0.01
    sources["adapter"].append(str(chain / "reward"))
    command.make(stage.run, Merge(), tmp_path / "reward-merged", sources)
    metrics = json.loads((tmp_path / "reward-merged/manifest.json").read_text())["metrics"]
    assert 0 < metrics["pair_accuracy_after"] < 1 and metrics["pairs"] == 64 and "perplexity_after" not in metrics


def test_a_refused_merge_leaves_its_report_and_no_artifact(base, adapter, pairs, tmp_path):
    sources = {"base": base, "adapter": [str(adapter)], "pairs": pairs}
    with pytest.raises(ValueError, match=r"merge\.max_perplexity_change"):
        command.make(stage.run, Merge(max_perplexity_change=1e-9), tmp_path / "merged", sources)
    assert not (tmp_path / "merged").exists() and (tmp_path / "merged.partial/merge.json").is_file()


def test_pairs_without_a_text_that_fits_are_refused(base, adapter, chain, pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "MAX_TOKENS", 5)
    for under, folder, split in ((base, adapter, "finetune"), (chain / "sft-merged", chain / "reward", "reward")):
        with pytest.raises(ValueError, match=f"no pair of at most 5 tokens in its {split} split"):
            stage.run(Merge(), tmp_path / "merged", base=under, adapter=[str(folder)], pairs=pairs)


def test_an_adapter_is_merged_into_the_base_that_it_was_trained_on_alone(base, adapter, pairs, tmp_path):
    """One of the same shape would take it, and nothing would be right."""
    other = tiny_models.save_base(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match=r"was trained on .*base, and not on .*other"):
        stage.run(Merge(), tmp_path / "merged", base=other, adapter=[str(adapter)], pairs=pairs)


def test_some_pairs_are_enough_to_judge_by(base, adapter, pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "MAX_PAIRS", 7)
    actual = stage.run(Merge(), tmp_path / "merged", base=base, adapter=[str(adapter)], pairs=pairs)
    assert actual["pairs"] == 7
