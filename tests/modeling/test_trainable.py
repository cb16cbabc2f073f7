"""Training starts from what the folder holds: adapters are refused, and outputs are compared with a plain load."""

import pytest
import torch

from stages import ppo, reward, sft
from stages.modeling import lora
from stages.modeling.load import load_causal
from stages.modeling.pretrained import copy_pretrained, save_adapter
from stages.modeling.trainable import check_trained_model, plain_outputs
from stages.recipe.sections.ppo import Ppo
from stages.recipe.sections.reward import Reward
from stages.recipe.sections.sft import Sft
from stages.reward_modeling.load import load_classifier
from tests.helpers import tiny_models

LORA = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": ()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A base, an adapter that was trained on it, and their merge."""
    folder = tmp_path_factory.mktemp("run")
    base = tiny_models.save_base(folder / "base", width=128)
    torch.manual_seed(0)
    model = lora.add_lora(load_causal(base), precision="fp32", **LORA)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    save_adapter(model, tiny_models.tokenizer(), folder / "sft")
    tiny_models.merge(base, [folder / "sft"], folder / "sft-merged")
    return folder


@pytest.mark.parametrize("load", [load_causal, lambda folder: load_classifier(folder, new_head=True),
                                  lambda folder: copy_pretrained(str(folder), None, folder)])
def test_an_adapter_is_no_model(run, load):
    with pytest.raises(ValueError, match=r"sft is an adapter, and a whole model is needed here: give .*/sft-merged$"):
        load(run / "sft")


def test_an_adapter_that_was_not_merged_is_to_be_merged(run):
    (run / "other").mkdir(exist_ok=True)
    (run / "other/adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"merge it first: python -m stages.merge --adapter .*/other$"):
        load_causal(run / "other")


@pytest.mark.parametrize("stage, config, inputs", [
    (sft, Sft(), ("base", "pairs")), (reward, Reward(), ("base", "pairs")),
    (ppo, Ppo(), ("policy", "reward", "pairs"))])
def test_a_stage_refuses_an_adapter_before_it_reads_anything_else(run, stage, config, inputs):
    first, *others = inputs
    with pytest.raises(ValueError, match="sft is an adapter"):
        stage.run(config, run / "out", **{first: run / "sft"}, **dict.fromkeys(others, run / "nowhere"))


@pytest.mark.parametrize("precision", ["fp32", "mixed", "bf16", "int8", "nf4"])
def test_a_fresh_adapter_leaves_the_outputs_of_a_plain_load(run, precision):
    plain = plain_outputs(run / "sft-merged", precision)
    model = lora.add_lora(load_causal(run / "sft-merged", precision), precision=precision, **LORA)
    assert "sft-merged  differs by " in check_trained_model(model, plain)
    classifier = load_classifier(run / "sft-merged", precision, new_head=True)
    assert check_trained_model(classifier, plain).endswith("ok")


@pytest.mark.parametrize("scorer", [False, True])
def test_training_from_the_base_instead_is_refused(run, scorer):
    """As it was where the adapter's folder was given: Transformers loads it, and a new adapter takes its place."""
    plain = plain_outputs(run / "sft-merged", "fp32")
    model = load_classifier(run / "base", new_head=True) if scorer else load_causal(run / "base")
    model = lora.add_lora(model, precision="fp32", scorer=scorer, **LORA)
    with pytest.raises(ValueError, match=r"what would be trained is not .*/sft-merged: its outputs differ by 0\.\d+"):
        check_trained_model(model, plain)


def test_one_changed_row_of_the_output_layer_is_noticed(run):
    plain = plain_outputs(run / "base", "fp32")
    model = load_causal(run / "base")
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.clone())  # it is tied to the embeddings
    with torch.no_grad():
        head.weight[7] *= 2
    with pytest.raises(ValueError, match="differ by"):
        check_trained_model(model, plain)
