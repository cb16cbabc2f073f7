"""Loading: precisions, special tokens, pads, what learns (CORRECTNESS S2, S5, failures 2, 11, 14, 20)."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from stages.generation.sampler import sample
from stages.modeling import lora
from stages.modeling.load import autocast, load_causal
from stages.modeling.packed import forward
from stages.modeling.pretrained import copy_pretrained
from stages.modeling.tokenizer import check_special_tokens, load_tokenizer
from stages.rl.policy import Policy
from stages.runtime.files import hash_file
from tests.helpers import tiny_models
from tests.helpers.padded_states import compute_position_ids
from tests.helpers.trajectories import build_trajectory


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_models.save_base(tmp_path_factory.mktemp("models") / "base", width=128)  # nf4 packs blocks of 64


@pytest.mark.parametrize("precision", ["fp32", "mixed", "bf16", "int8", "nf4"])
def test_every_precision_learns_in_the_adapter_and_leaves_the_base_alone(base, precision):
    model = load_causal(base, precision)
    model = lora.add_lora(model, r=4, alpha=8, dropout=0.0, target_modules=(), precision=precision)
    ids = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(input_ids=ids)  # as sampling does; it must not stop the learning that follows
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        with autocast(precision):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert frozen and all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)


@pytest.mark.parametrize("precision", ["fp32", "int8", "nf4"])
def test_a_fresh_policy_starts_at_its_reference_in_every_precision(base, precision):
    model = lora.add_lora(
        load_causal(base, precision), r=4, alpha=8, dropout=0.0, target_modules=(), precision=precision
    )
    policy = Policy(model, 1.0, precision)
    rollout = sample(
        policy.model,
        [[1, 40, 50], [1, 60]],
        max_new_tokens=6,
        temperature=1.0,
        stop_ids=(2,),
        generator=torch.Generator().manual_seed(0),
    )
    assert abs(build_trajectory(policy, rollout, torch.zeros(2), 0.1).sequence_kl()) < 1e-4


def test_a_tokenizer_without_a_pad_gets_one_of_its_own(base, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path)
    actual = load_tokenizer(tmp_path)
    assert actual.pad_token_id not in (actual.eos_token_id, actual.bos_token_id, None)


def test_a_tokenizer_that_ends_texts_otherwise_than_the_model_is_refused(base):
    model = load_causal(base)
    tokenizer = load_tokenizer(base)
    check_special_tokens(tokenizer, model.config)
    model.config.eos_token_id = 7
    with pytest.raises(ValueError, match="ends texts with id 2"):
        check_special_tokens(tokenizer, model.config)


def test_filler_is_an_id_every_embedding_has_and_is_masked():
    ids, mask = forward.pad_batch([[5, 6, 7], [8]], side="left")
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert compute_position_ids(mask).tolist() == [[0, 1, 2], [0, 0, 0]]


def test_a_local_model_is_used_as_it_is(base, tmp_path):
    copy_pretrained(str(base), None, tmp_path)
    names = {"model.safetensors", "config.json", "tokenizer.json"}
    assert all(hash_file(tmp_path / name) == hash_file(base / name) for name in names)


def test_pickled_weights_and_unknown_models_are_refused_in_one_line(base, tmp_path):
    folder = tmp_path / "pickled"
    shutil.copytree(base, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no \.safetensors weights"):
        copy_pretrained(str(folder), None, tmp_path)
    with pytest.raises(ValueError, match="neither 'scratch' nor a local folder"):
        copy_pretrained("no-such-owner/no-such-model", None, tmp_path)


def _truncate(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def _drop_a_weight(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _reshape_a_weight(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:5].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _make_infinite(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("inf")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _link_weights(folder):
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere.safetensors")


@pytest.mark.parametrize("damage, says", [
    (_truncate, "is not whole"), (_drop_a_weight, "lacks the weights model.layers.1.mlp.up_proj.weight"),
    (_reshape_a_weight, "cannot be loaded"), (_make_infinite, "not finite"),
    (lambda folder: (folder / "config.json").write_text('{"model_type": "no-such"}'), "cannot be loaded"),
    (lambda folder: (folder / "config.json").write_text("{"), "holds no model that Transformers can load"),
    (_link_weights, "is a link to"),
])
def test_a_base_that_cannot_be_loaded_is_refused_in_one_line(base, tmp_path, damage, says):
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    damage(folder)
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=says) as refused:
        copy_pretrained(str(folder), None, tmp_path / "out")
    assert str(folder) in str(refused.value) and "\n" not in str(refused.value)


def test_links_within_the_hubs_cache_are_followed(base, tmp_path):
    snapshot = tmp_path / "models--a--b/snapshots/0123"
    snapshot.mkdir(parents=True)
    shutil.copytree(base, tmp_path / "models--a--b/blobs")
    for file in (tmp_path / "models--a--b/blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (tmp_path / "out").mkdir()
    copy_pretrained(str(snapshot), None, tmp_path / "out")
    assert not (tmp_path / "out/model.safetensors").is_symlink()
