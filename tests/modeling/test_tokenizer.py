"""Added tokens: embeddings grow for them and for nothing else, and a merge carries their rows (CORRECTNESS M1, failure
11).
"""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.modeling.load import load_causal
from stages.modeling.merging.checks import probe_outputs
from stages.modeling.tokenizer import PAD, load_tokenizer, resize_token_embeddings
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.scoring_file import Scoring, describe_scoring, save_scoring
from tests.helpers import architectures, tiny_models

OLD = architectures.VOCABULARY
ADDED = ["<code>", "</code>"]
VOCABULARIES = ("embed_tokens", "wte", "embed_in", "lm_head")
every_family = pytest.mark.parametrize("family", architectures.FAMILIES)


def tokenizer_of(base):
    """The base's, with two tokens more, and after them a pad of its own."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(ADDED)
    tokenizer.add_special_tokens({"pad_token": PAD})
    return tokenizer


def layers_of(model):
    return [layer for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer is not None]


def is_tied(model) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def save_grown(base, folder, **how):
    """A base with rows for the added tokens, and an adapter that trained these rows as well."""
    tokenizer, model = tokenizer_of(base), load_causal(base)
    new = resize_token_embeddings(model, tokenizer)
    names = [name for name, module in model.named_modules() if module in layers_of(model)]
    model = get_peft_model(model, LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8,
        trainable_token_indices={name.split(".")[-1]: new for name in names}))
    architectures.noisy([p for p in model.parameters() if p.requires_grad], 0.3)
    model.save_pretrained(folder, **how)
    tokenizer.save_pretrained(folder)
    return model.eval()


@every_family
@pytest.mark.parametrize("scorer", [False, True])
def test_new_rows_are_the_mean_of_the_old_ones_which_stay(family, scorer, tmp_path):
    base = architectures.save(architectures.FAMILIES[family], tmp_path)
    model = load_classifier(base, new_head=True) if scorer else load_causal(base)
    before = [layer.weight.detach().clone() for layer in layers_of(model)]
    tied, tokenizer = not scorer and is_tied(model), tokenizer_of(base)
    new = resize_token_embeddings(model, tokenizer)
    assert new == list(range(OLD, tokenizer.convert_tokens_to_ids(ADDED[-1]) + 1))  # Qwen's class adds one of its own
    assert resize_token_embeddings(model, tokenizer) == [] and new[-1] + 1 == tokenizer.pad_token_id
    assert model.config.vocab_size == OLD + len(new) and (scorer or is_tied(model) == tied)
    for layer, old in zip(layers_of(model), before, strict=True):
        assert torch.equal(layer.weight[:OLD], old)
        assert torch.allclose(layer.weight[OLD:], old.mean(0).expand(len(new), -1), atol=1e-6)


def test_the_pad_alone_grows_nothing_and_one_in_between_gets_a_row(tmp_path):
    base = architectures.save(architectures.FAMILIES["llama"], tmp_path)
    tokenizer, model = load_tokenizer(base), load_causal(base)
    assert tokenizer.pad_token_id == OLD and resize_token_embeddings(model, tokenizer) == []
    tokenizer.add_tokens(ADDED)
    assert resize_token_embeddings(model, tokenizer) == [OLD, OLD + 1, OLD + 2]


def test_rows_beyond_the_tokenizers_stay(tmp_path):
    base = architectures.save(architectures.FAMILIES["llama"], tmp_path)
    model = load_causal(base)
    model.resize_token_embeddings(128)
    assert resize_token_embeddings(model, tokenizer_of(base)) == []
    assert model.get_input_embeddings().num_embeddings == 128


@pytest.mark.parametrize("family", ["llama", "llama tied", "gpt2", "pythia"])
@pytest.mark.parametrize("how", [{"save_embedding_layers": False}, {}], ids=["rows", "whole"])
def test_a_merge_carries_the_trained_rows_of_added_tokens(family, how, tmp_path):
    base = architectures.save(architectures.FAMILIES[family], tmp_path / "base")
    adapter_on = probe_outputs(save_grown(base, tmp_path / "sft", **how))
    assert adapter_on.shape[-1] == OLD + 2
    actual = tiny_models.merge(base, [tmp_path / "sft"], tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(probe_outputs(merged), adapter_on, atol=1e-4)
    assert is_tied(merged) == is_tied(load_causal(base)) == (family in ("llama tied", "gpt2"))
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").convert_tokens_to_ids(ADDED) == [OLD, OLD + 1]
    rows = merged.get_input_embeddings().weight.detach()
    assert (rows[OLD:] - rows[:OLD].mean(0)).abs().min() > 0  # they have learnt
    changes = [row["change_norm"] for row in actual["layers"] if row["name"].split(".")[-1] in VOCABULARIES]
    learnt = [float((m[OLD:] - m[:OLD].mean(0)).norm()) for m in (rows, merged.get_output_embeddings().weight.detach())]
    assert changes == pytest.approx(learnt[: 1 if is_tied(merged) else 2], rel=1e-4)


def test_a_reward_adapter_follows_one_that_grew_the_vocabulary(tmp_path):
    base = architectures.save(architectures.FAMILIES["llama"], tmp_path / "base")
    save_grown(base, tmp_path / "sft", save_embedding_layers=False)
    tiny_models.merge(base, [tmp_path / "sft"], tmp_path / "sft-merged")
    architectures.adapted(tmp_path / "sft-merged", scorer=True).save_pretrained(tmp_path / "reward")
    tokenizer_of(base).save_pretrained(tmp_path / "reward")
    content = describe_scoring(Scoring(), "fp32", ([[1]] * 2, [[5, 2]] * 2), torch.tensor([1.0, 2.0]))
    save_scoring(tmp_path / "reward", content)
    tiny_models.merge(tmp_path / "sft-merged", [tmp_path / "reward"], tmp_path / "step")
    tiny_models.merge(base, [tmp_path / "sft", tmp_path / "reward"], tmp_path / "merged")
    together, step = (load_classifier(tmp_path / name) for name in ("merged", "step"))
    assert torch.allclose(probe_outputs(together), probe_outputs(step), atol=1e-5)
    assert together.get_input_embeddings().num_embeddings == OLD + 2


def test_an_adapter_whose_tokenizer_lost_its_tokens_is_refused(tmp_path):
    base = architectures.save(architectures.FAMILIES["llama tied"], tmp_path / "base")
    save_grown(base, tmp_path / "sft", save_embedding_layers=False)
    load_tokenizer(base).save_pretrained(tmp_path / "sft")
    with pytest.raises(ValueError, match="sft does not fit this llama model"):
        tiny_models.merge(base, [tmp_path / "sft"], tmp_path / "merged")
