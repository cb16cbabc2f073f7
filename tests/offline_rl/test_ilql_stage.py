"""The ilql stage on a tiny model: artifact, learning, merge with heads, what the merged policy computes, mistakes."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stages import evaluate, ilql, merge
from stages.generation.sampler import sample
from stages.modeling.load import load_causal
from stages.modeling.merging.checks import probe_ids
from stages.modeling.packed.token_logprobs import response_logprobs
from stages.modeling.q_heads import SETTINGS, WEIGHTS, ShiftedOutput, load_q_heads
from stages.recipe.sections.ilql import Ilql
from stages.recipe.sections.models import Lora, Merge
from tests.helpers import tiny_models
from tests.helpers.tiny_stages import TINY, save_inputs

CONFIG = Ilql(lora=Lora(r=4, alpha=8, dropout=0.0), precision="fp32", batch_answers=8, microbatch_answers=4,
              max_steps=None, epochs=4.0, learning_rate=3e-3, target_rate=0.1, target_every_steps=1, gamma=1.0,
              max_length_tokens=64, save_every_steps=9, evaluate_every_steps=20, validation_questions=4,
              sampling_beta=2.0, log_to=("jsonl",))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ilql")
    return {"policy": tiny_models.save_base(folder / "policy"), "pairs": tiny_models.save_pairs(folder / "pairs")}


def run(inputs, out, **changes):
    out.mkdir()
    return out, ilql.run(replace(CONFIG, **changes), out, **inputs)


@pytest.fixture(scope="module")
def trained(inputs, tmp_path_factory):
    return run(inputs, tmp_path_factory.mktemp("trained") / "ilql")


@pytest.fixture(scope="module")
def merged(inputs, trained, tmp_path_factory):
    out = tmp_path_factory.mktemp("merged") / "ilql-merged"
    out.mkdir()
    return out, merge.run(Merge(dtype="bf16"), out, base=inputs["policy"], adapter=[str(trained[0])],
                          pairs=inputs["pairs"])


def history(out) -> list[dict]:
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


def test_it_learns_and_leaves_nothing_but_the_artifact(trained):
    out, metrics = trained
    rows = [row for row in history(out) if "validation_loss" in row]
    assert rows[-1]["validation_loss"] < 0.9 * rows[0]["validation_loss"]
    assert rows[-1]["validation_score_correlation"] > 0.3 and rows[-1]["validation_awac"] < rows[0]["validation_awac"]
    assert metrics["validation_td"] == rows[-1]["validation_td"] and metrics["dropped_over_length"] == 0
    assert {path.name for path in out.iterdir()} >= {"adapter_model.safetensors", WEIGHTS, SETTINGS, "samples.jsonl"}
    assert not [path.name for path in out.iterdir() if path.is_dir()]


def test_each_answer_is_read_once_and_scores_are_normalised(inputs):
    tokenizer = ilql.prepare_tokenizer(inputs["policy"])
    training, validation, scale, _ = ilql.load_answers(CONFIG, tokenizer, inputs["pairs"], set())
    texts = {(row["qid"], row[side]): row[f"score_{side[-1]}"] for row in ilql.read_first_rows(
        inputs["pairs"], "reward", ilql.first_question_keys(inputs["pairs"], "reward", 1.0, 1000))
        for side in ("response_j", "response_k")}
    assert len(training) == len(texts) and not validation
    rewards, scores = (torch.tensor(values, dtype=torch.float64) for values in (
        [row.reward for row in training], [float(score) for score in texts.values()]))
    assert scale == (pytest.approx(float(scores.mean())), pytest.approx(float(scores.std())))
    assert sorted(rewards.tolist()) == pytest.approx(sorted(((scores - scores.mean()) / scores.std()).tolist()))


def test_merge_carries_the_heads_and_the_loaded_policy_is_shifted(inputs, trained, merged):
    out, report = merged
    heads = load_q_heads(out)
    assert heads.beta == 2.0 and (out / WEIGHTS).read_bytes() == (trained[0] / WEIGHTS).read_bytes()
    model, plain = load_causal(out), AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = probe_ids(model.config.vocab_size)
    with torch.no_grad():
        states = plain.model(ids).last_hidden_state
        q = [torch.relu(states @ heads.tensors[f"{i}.hidden.weight"].T + heads.tensors[f"{i}.hidden.bias"])
             @ heads.tensors[f"{i}.out.weight"].T + heads.tensors[f"{i}.out.bias"] for i in range(2)]
        expected = plain(ids).logits + 2.0 * torch.minimum(*q)
        actual = model(ids, attention_mask=torch.ones_like(ids)).logits
    assert torch.allclose(actual, expected, atol=1e-4) and not torch.allclose(actual, plain(ids).logits, atol=0.1)
    assert report["perplexity_after"] > 0 and report["reload_difference"] < 1e-4
    assert type(plain.get_output_embeddings()) is torch.nn.Linear, "only the instance is changed"
    assert load_file(out / "model.safetensors").keys() <= plain.state_dict().keys()


def test_sampler_and_logprobs_see_the_shift(merged):
    out, _ = merged
    model = load_causal(out)
    prompts = [[1, 40, 50], [1, 60, 70, 80]]
    rollout = sample(model, prompts, temperature=1.0, stop_ids=[2], max_new_tokens=6, precision="fp32",
                     generator=torch.Generator().manual_seed(0), value_fn=lambda hidden: hidden[:, 0])
    scored = response_logprobs(model, prompts, rollout.responses, 1.0)
    for row, expected, response in zip(scored, rollout.logprobs, rollout.responses, strict=True):
        assert torch.allclose(row, expected[: len(response)], atol=1e-4)
    model.get_output_embeddings().beta = 0.0
    assert not torch.allclose(torch.cat(response_logprobs(model, prompts, rollout.responses, 1.0)), torch.cat(scored),
                              atol=1e-2)


def test_beta_0_is_the_model_itself(inputs, trained, merged, tmp_path):
    out, _ = merged
    model, plain = load_causal(out), AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    layer = model.get_output_embeddings()
    assert isinstance(layer, ShiftedOutput)
    layer.beta = 0.0
    ids = probe_ids(model.config.vocab_size)
    with torch.no_grad():
        assert torch.allclose(model(ids, attention_mask=torch.ones_like(ids)).logits, plain(ids).logits, atol=1e-5)


def test_a_whole_model_is_merged_with_its_heads(inputs, tmp_path):
    out, _ = run(inputs, tmp_path / "ilql", tune="full", max_steps=2)
    assert not (out / "adapter_config.json").exists() and load_q_heads(out).count == 2
    (tmp_path / "merged").mkdir()
    merge.run(Merge(dtype="fp32"), tmp_path / "merged", base=inputs["policy"], adapter=[str(out)],
              pairs=inputs["pairs"])
    assert isinstance(load_causal(tmp_path / "merged").get_output_embeddings(), ShiftedOutput)


def test_evaluate_takes_the_merged_policy_by_name(tmp_path):
    """And its card and figures."""
    paths = save_inputs(tmp_path)
    for stage, module, name in (("ilql", ilql, "ilql"), ("merge", merge, "ilql-merged")):
        (tmp_path / name).mkdir()
        arguments = paths["ilql"] if stage == "ilql" else paths["sft"] | {"adapter": [str(tmp_path / "ilql")]}
        module.run(TINY[stage], tmp_path / name, **arguments)
    (tmp_path / "evaluate").mkdir()
    metrics = evaluate.run(TINY["evaluate"], tmp_path / "evaluate",
                           **paths["evaluate"] | {"policy": {"ilql": tmp_path / "ilql-merged"}})
    assert metrics
    written = json.loads((tmp_path / "evaluate" / "metrics.json").read_text())
    assert "ilql" in written["policies"] and "ilql" in written["comparisons"]
    card = (tmp_path / "ilql-merged" / "README.md").read_text()
    assert "load_causal" in card and "without them" in card


@pytest.mark.parametrize("how", [{"precision": "mixed"}, {"precision": "bf16"}, {"precision": "int8"},
                                 {"awac_beta": 1.0}, {"cql_scale": 0.0}])
def test_every_way_of_training_learns(inputs, how, tmp_path):
    out, _ = run(inputs, tmp_path / "out", max_steps=6, **how)
    losses = [row["validation_td"] for row in history(out) if "validation_td" in row]
    assert losses[-1] < losses[0]


def test_mistakes_are_one_line(inputs, merged, tmp_path):
    with pytest.raises(ValueError, match=r"raise ilql\.max_length_tokens"):
        run(inputs, tmp_path / "short", max_length_tokens=2)
    with pytest.raises(ValueError, match="made by ilql, which nothing can be trained from"):
        run(inputs | {"policy": merged[0]}, tmp_path / "again")
    with pytest.raises(ValueError, match="have one score"):
        ilql.measure_scale([ilql.ScoredAnswer([1], [2], 3.0)] * 4)


@pytest.mark.parametrize("damage, message", [
    (lambda folder: (folder / WEIGHTS).unlink(), "cannot be read"),
    (lambda folder: (folder / WEIGHTS).write_bytes(b"x" * 100), "cannot be read"),
    (lambda folder: (folder / SETTINGS).unlink(), "cannot be read"),
    (lambda folder: (folder / SETTINGS).write_text('{"beta": 1.0, "heads": 3}'), "does not have the sizes"),
    (lambda folder: save_file({name: t.fill_(float("nan")) for name, t in load_file(folder / WEIGHTS).items()},
                              folder / WEIGHTS), "not finite"),
])
def test_damaged_heads_are_refused_in_one_line(merged, damage, message, tmp_path):
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in merged[0].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    damage(folder)
    with pytest.raises(ValueError, match=message) as error:
        load_causal(folder)
    assert "\n" not in str(error.value)


def test_heads_of_another_model_are_refused(merged, tmp_path):
    folder = tiny_models.save_base(tmp_path / "other", width=16)
    for name in (WEIGHTS, SETTINGS):
        (folder / name).write_bytes((merged[0] / name).read_bytes())
    with pytest.raises(ValueError, match="trained with another model"):
        load_causal(folder)
