"""The SFT stage: what learns and what never moves, what is watched, when it stops (CORRECTNESS S1, S3, S5, S6)."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages import sft
from stages.finetuning.packing import PackedRow, collate_blocks, summed_lm_loss
from stages.modeling import lora
from stages.modeling.load import load_causal
from stages.modeling.packed.forward import use_packed_attention
from stages.modeling.tokenizer import load_tokenizer
from stages.recipe.sections.models import Lora
from stages.recipe.sections.sft import Sft
from stages.stackexchange.pairs import table as pairs_table
from stages.stackexchange.pairs.table import first_question_keys, read_first_rows, read_pairs
from stages.stackexchange.prompt import answer_ids
from stages.training.callbacks import Evaluation
from stages.training.loggers import TrainingLogger
from stages.training.trainer import TrainerSettings, train
from tests.helpers import tiny_models

CONFIG = Sft(lora=Lora(r=4, dropout=0.0), precision="fp32", packing="bfd", sequence_length_tokens=64, batch_sequences=4,
             microbatch_sequences=2, max_steps=None, epochs=2.0, learning_rate=3e-3, warmup_steps=0, save_every_steps=9,
             evaluate_every_steps=4, validation_questions=4)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    base = tiny_models.save_base(folder / "base", width=128)
    return {"base": base, "pairs": tiny_models.save_pairs(folder / "pairs")}


@pytest.fixture(scope="module")
def trained(inputs, tmp_path_factory):
    return run(inputs, tmp_path_factory.mktemp("sft") / "out")


def run(inputs, out, **changes):
    out.mkdir()
    return out, sft.run(replace(CONFIG, **changes), out, **inputs)


def history(out) -> list[dict]:
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


def watched(out) -> list[float]:
    return [row["validation_perplexity"] for row in history(out) if "validation_perplexity" in row]


def test_it_learns_and_leaves_nothing_but_the_artifact(trained):
    out, metrics = trained
    assert watched(out)[-1] < 0.7 * watched(out)[0] and metrics["validation_perplexity"] == watched(out)[-1]
    assert not [path.name for path in out.iterdir() if path.suffix == ".arrow" or path.is_dir()]
    assert metrics["tokens"] > metrics["documents"] > metrics["blocks"] > 0


def test_the_schedule_ends_at_its_end_and_no_step_is_short(trained, inputs):
    out, metrics = trained
    rows = [row for row in history(out) if "learning_rate" in row]
    steps = 2 * -(-metrics["blocks"] // CONFIG.batch_sequences)
    assert rows[-1]["step"] == steps and rows[-1]["learning_rate"] < 0.02 * CONFIG.learning_rate
    assert rows[-1]["epoch"] == 2.0


def test_validation_questions_are_held_out_and_their_samples_are_kept(trained, inputs):
    out, metrics = trained
    held_out_keys = first_question_keys(inputs["pairs"], "finetune", 0.1, CONFIG.validation_questions)
    assert metrics["validation_questions"] == len(held_out_keys) == 4
    rows = list(read_pairs(inputs["pairs"], "finetune"))
    assert metrics["documents"] == sum((row["site"], row["qid"]) not in held_out_keys for row in rows) < len(rows)
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    asked = {row["question"] for row in rows if (row["site"], row["qid"]) in held_out_keys}
    assert {sample["question"] for sample in samples} == asked
    steps = [row["step"] for row in history(out) if "validation_perplexity" in row]
    assert sorted({sample["step"] for sample in samples}) == steps and len(samples) == 4 * len(steps)


def test_the_questions_held_out_come_first_and_no_more_is_read(inputs, monkeypatch):
    held_out_keys = first_question_keys(inputs["pairs"], "finetune", 0.1, CONFIG.validation_questions)
    rows = list(read_pairs(inputs["pairs"], "finetune"))
    read = []
    monkeypatch.setattr(pairs_table, "read_pairs", lambda *_: (read.append(row) or row for row in rows))
    actual = list(read_first_rows(inputs["pairs"], "finetune", held_out_keys))
    assert actual == [row for row in rows if (row["site"], row["qid"]) in held_out_keys]
    assert len(read) == len(actual) + 1


def test_only_answers_within_max_answer_tokens_are_trained_on(inputs, tmp_path):
    tokenizer = load_tokenizer(inputs["base"])
    held_out = first_question_keys(inputs["pairs"], "finetune", 0.1, CONFIG.validation_questions)
    lengths = sorted(len(answer_ids(tokenizer, row["response_j"])) for row in read_pairs(inputs["pairs"], "finetune")
                     if (row["site"], row["qid"]) not in held_out)
    limit = lengths[-1] - 1
    _, metrics = run(inputs, tmp_path / "short", max_answer_tokens=limit, max_steps=None)
    assert metrics["documents"] == sum(length <= limit for length in lengths) < len(lengths)
    with pytest.raises(ValueError, match=r"at most 1 tokens \(sft.max_answer_tokens\): nothing to train on"):
        run(inputs, tmp_path / "none", max_answer_tokens=1)


def test_only_the_adapter_learns_the_base_does_not_move(inputs, tmp_path):
    """Every frozen tensor, bit for bit, after training in memory; quantised ones as well."""
    for precision in ("fp32", "bf16", "int8", "nf4"):
        torch.manual_seed(0)
        model = lora.add_lora(load_causal(inputs["base"], precision), precision=precision, **vars(CONFIG.lora))
        before = {name: t.detach().clone() for name, t in model.state_dict().items()}
        learn(model, inputs, tmp_path / precision, precision)
        changed = {name for name, t in model.state_dict().items() if not torch.equal(t, before[name])}
        assert changed and all("lora_" in name for name in changed), precision


def learn(model, inputs, out, precision):
    """Two steps of the stage's own loss."""
    from stages.finetuning.packing import PackedRow, collate_blocks, summed_lm_loss

    ids = torch.arange(3, 60).numpy()
    blocks = [[PackedRow(ids, ids > 3)]] * 4
    settings = TrainerSettings.from_section(CONFIG, batch=2, microbatch=1, schedule="constant", max_steps=2)
    train(model, blocks, collate_blocks, lambda rows: summed_lm_loss(model, rows, precision), settings, out, "t")


def test_a_full_fine_tune_moves_every_weight_and_is_a_whole_model(inputs, tmp_path):
    out, _ = run(inputs, tmp_path / "full", tune="full", learning_rate=1e-3)
    base, tuned = (AutoModelForCausalLM.from_pretrained(folder) for folder in (inputs["base"], out))
    moved = dict(tuned.named_parameters())
    assert all(not torch.equal(p, moved[name]) for name, p in base.named_parameters())
    assert tuned.config.tie_word_embeddings and AutoTokenizer.from_pretrained(out).eos_token_id == 2
    assert not (out / "adapter_config.json").exists() and watched(out)[-1] < watched(out)[0]


@pytest.mark.parametrize("how", [{"packing": "wrapped"}, {"loss_on": "answer"}, {"precision": "mixed"},
                                 {"precision": "bf16"}, {"precision": "int8"}, {"precision": "nf4"}])
def test_every_way_of_training_learns(inputs, how, tmp_path):
    out, _ = run(inputs, tmp_path / "out", **how)
    assert watched(out)[-1] < 0.9 * watched(out)[0]


def test_gradient_checkpointing_and_microbatches_change_nothing(trained, inputs, tmp_path):
    weights = load_file(trained[0] / "adapter_model.safetensors")
    for name, how in (("one", {"microbatch_sequences": 4}), ("two", {"gradient_checkpointing": True})):
        out, _ = run(inputs, tmp_path / name, **how)
        assert watched(out)[-1] < 0.9 * watched(out)[0]
        other = load_file(out / "adapter_model.safetensors")
        for key, tensor in weights.items():
            assert torch.allclose(other[key], tensor, atol=2e-4), (name, key)


def test_it_stops_when_perplexity_no_longer_falls_and_keeps_the_best(inputs, tmp_path):
    out, metrics = run(inputs, tmp_path / "out", epochs=30.0, learning_rate=3e-2, evaluate_every_steps=2,
                       patience_evaluations=2)
    actual = watched(out)
    assert actual.index(min(actual)) == len(actual) - 3  # two evaluations more, and no third
    assert metrics["validation_perplexity"] == min(actual) < actual[-1]
    model = load_causal(inputs["base"])
    from peft import PeftModel

    model = PeftModel.from_pretrained(model, out).eval()
    tokenizer = load_tokenizer(out)
    held_out_keys = first_question_keys(inputs["pairs"], "finetune", 0.1, 4)
    logger = TrainingLogger(tmp_path, "sft")
    again = sft.Validation(model, tokenizer, inputs["pairs"], held_out_keys, CONFIG, logger).measure(0)
    assert again["validation_perplexity"] == pytest.approx(min(actual), rel=1e-4)


def with_new_tokens(inputs, folder):
    """The base, with a tokenizer of two tokens more."""
    AutoModelForCausalLM.from_pretrained(inputs["base"]).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(inputs["base"])
    tokenizer.add_tokens(["flag", "stop"])
    tokenizer.save_pretrained(folder)
    return inputs | {"base": folder}


def test_new_tokens_are_refused_with_the_reason(inputs, tmp_path):
    given = with_new_tokens(inputs, tmp_path / "grown")
    refusal = r"2 tokens without an embedding in the base, the first is 'flag', .*resize_token_embeddings"
    with pytest.raises(ValueError, match=refusal):
        run(given, tmp_path / "refused")


def test_a_split_without_pairs_is_refused(inputs, tmp_path):
    import pyarrow.parquet as parquet

    empty = tiny_models.save_pairs(tmp_path / "pairs")
    file = empty / "finetune" / "part-00000.parquet"
    parquet.write_table(parquet.read_table(file).slice(0, 0), file)
    with pytest.raises(ValueError, match="no pairs in its finetune split"):
        run(inputs | {"pairs": empty}, tmp_path / "out")


def test_processes_that_have_not_met_are_refused(monkeypatch, inputs, tmp_path):
    """Called as a function under torchrun: Transformers' Trainer would share the data its own way."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="several processes that have not met"):
        run(inputs, tmp_path / "out")


def test_the_loss_of_a_step_is_the_mean_over_all_its_items_however_they_fall(tmp_path):
    """Three items and one: a mean of the microbatches' means would be another (CORRECTNESS P5)."""
    weight = torch.nn.Parameter(torch.zeros(1))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

    items = [[1.0, 1.0, 1.0], [5.0]]
    settings = TrainerSettings.from_section(
        CONFIG, batch=2, microbatch=1, schedule="constant", max_steps=1, learning_rate=1.0, weight_decay=0.0,
        epochs=1.0)

    def collate(lists):
        return {"content": lists[0], "items": len(lists[0])}

    rows = train(Model(), items, collate, lambda values: (weight * 0 + sum(values)).sum(), settings, tmp_path, "t")
    assert next(row["loss"] for row in rows if "loss" in row) == pytest.approx(2.0)


def test_a_microbatch_without_a_label_adds_nothing(tmp_path):
    """Blocks that hold nothing but prompts have a loss of 0, from which a backward pass can start."""
    settings = TrainerSettings.from_section(CONFIG, batch=2, microbatch=1, schedule="constant", max_steps=1)
    model = tiny_models.llama(tiny_models.tokenizer())
    use_packed_attention(model)
    prompt, answer = (PackedRow(np.arange(5, 11), (np.arange(6) > 0) & labelled) for labelled in (False, True))
    loss = summed_lm_loss(model, [prompt], "fp32")
    loss.backward()
    assert loss == 0 and not any(p.grad.any() for p in model.parameters() if p.grad is not None)
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    train(model, [[prompt], [answer]], collate_blocks, lambda rows: summed_lm_loss(model, rows, "fp32"), settings,
          tmp_path, "t")
    after = model.model.layers[0].mlp.up_proj.weight
    assert after.isfinite().all() and not after.equal(before)  # the row with labels is trained on


def test_what_is_watched_sees_the_model_without_dropout_and_its_step(tmp_path):
    model, seen = torch.nn.Linear(1, 1), []

    def measure(step):
        seen.append((step, model.training, torch.is_grad_enabled()))
        return {"quality": -step}

    settings = TrainerSettings.from_section(CONFIG, batch=1, microbatch=1, schedule="constant", max_steps=5)
    watch = Evaluation(measure, 2, lambda row: row["quality"], at_start=True)
    rows = train(model, [1.0] * 9, lambda items: {"content": items, "items": 1},
                 lambda items: model(torch.tensor([items])).sum(), settings, tmp_path, "t", watch)
    assert seen == [(step, False, False) for step in (0, 2, 4, 5)] and model.training
    assert [row["quality"] for row in rows if "quality" in row] == [0, -2, -4, -5]


@pytest.mark.parametrize("damage", ["flipped", "gone"])
def test_the_best_state_is_under_the_checkpoints_seal(tmp_path, damage):
    """What is best at step 0 is the result, although its file is damaged between a kill and the resume."""
    settings = TrainerSettings.from_section(
        CONFIG, batch=1, microbatch=1, schedule="constant", max_steps=5, save_every_steps=2)
    evaluation = Evaluation(lambda step: {"quality": -step}, 2, lambda row: row["quality"], at_start=True)

    def train_until(last_step):
        model, calls = torch.nn.Linear(1, 1), iter(range(last_step))
        torch.nn.init.constant_(model.weight, 0.75)

        def loss(items):
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return model(torch.tensor([items])).sum()

        train(model, [1.0] * 9, lambda items: {"content": items, "items": 1}, loss, settings, tmp_path, "t", evaluation)
        return model

    with pytest.raises(KeyboardInterrupt):
        train_until(3)
    best = tmp_path / "best.safetensors"
    content = bytearray(best.read_bytes())
    content[-1] ^= 1
    best.unlink()
    if damage == "flipped":
        best.write_bytes(content)
    assert train_until(9).weight.item() == 0.75
    newest, = (tmp_path / "checkpoints").glob("checkpoint-4")
    assert "best.safetensors" in json.loads((newest / "complete.json").read_text())


def test_the_curve_begins_with_the_base(trained, inputs, tmp_path):
    base, tokenizer = load_causal(inputs["base"]), load_tokenizer(inputs["base"])
    held_out = first_question_keys(inputs["pairs"], "finetune", 0.1, 4)
    measured = sft.Validation(
        base.eval(), tokenizer, inputs["pairs"], held_out, CONFIG, TrainingLogger(tmp_path, "sft")).measure(0)
    first = next(row for row in history(trained[0]) if "validation_perplexity" in row)
    assert first["step"] == 0
    assert first["validation_perplexity"] == pytest.approx(measured["validation_perplexity"], rel=1e-5)
