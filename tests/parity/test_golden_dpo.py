"""The losses of DPO and IPO against trl 1.16's DPOTrainer, and whole training runs beside it on a tiny model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.evaluation.pair_accuracy import HeldOutPairs
from stages.preference.logprobs import collate_rows
from stages.preference.loss import PreferenceLoss, preference_losses
from stages.preference.reference import compute_reference
from stages.preference.validation import preference_metrics
from stages.reward_modeling.dataset import Example
from stages.training import trainer
from stages.training.trainer import TrainerSettings
from tests.helpers import tiny_models
from tests.parity.golden.support import same

GOLDEN = json.loads((Path(__file__).parent / "golden/trl_1_16_dpo.json").read_text())
INPUTS = {name: torch.tensor(value, dtype=torch.float64) for name, value in GOLDEN["inputs"].items()}
TOKENS = INPUTS["better_tokens"], INPUTS["worse_tokens"]


def read(name: str) -> tuple[dict, dict]:
    loss, beta = name.split()
    return {"loss": loss, "beta": float(beta)}, GOLDEN["values"][name]


@pytest.mark.parametrize("name", GOLDEN["values"])
def test_losses_and_gradients_are_those_of_trl(name):
    settings, golden = read(name)
    sides = [INPUTS[side].clone().requires_grad_() for side in ("better", "worse")]
    ratios = [side.sum(1) - INPUTS[ref].sum(1) for side, ref in zip(sides, ("better_ref", "worse_ref"), strict=True)]
    losses = preference_losses(*ratios, *TOKENS, **settings)
    same(losses, golden["losses"])
    same(losses.mean(), golden["mean"])
    losses.mean().backward()
    same(torch.cat([side.grad for side in sides]), golden["gradient"])


@pytest.mark.parametrize("name", GOLDEN["values"])
def test_metrics_are_those_of_trl(name):
    settings, golden = read(name)
    logprobs, refs = (torch.cat([INPUTS[f"better{end}"], INPUTS[f"worse{end}"]]).sum(1).numpy() for end in ("", "_ref"))
    count = len(logprobs) // 2
    pairs = held_out(np.arange(count), np.arange(count) + count)
    loss = PreferenceLoss(**settings, label_smoothing=0.0)
    ours = preference_metrics(pairs, logprobs, refs, torch.cat(TOKENS).numpy(), loss)
    theirs = golden["metrics"]
    for key, expected in {"preference_loss": golden["mean"], "implicit_accuracy": theirs["rewards/accuracies"],
                          "implicit_margin": theirs["rewards/margins"], "better_logprob": theirs["logps/chosen"],
                          "worse_logprob": theirs["logps/rejected"]}.items():
        assert ours[f"validation_{key}"] == pytest.approx(expected, rel=1e-6), key  # trl takes accuracies in fp32


def held_out(better: np.ndarray, worse: np.ndarray) -> HeldOutPairs:
    """Pairs of which only the indices matter."""
    return HeldOutPairs([], [], [], [], better, worse, np.arange(len(better)), 0)


STEPS, BATCH = 6, 4


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_a_run_follows_trls_trainer(loss, tmp_path, monkeypatch):
    """The same pairs in the same order, all weights, AdamW and cosine decay: the loss of each step, then the weights.

    TRL pads and computes the reference in each step; ours packs, shares prefixes and computes it once.
    """
    tokenizer, settings = tiny_models.tokenizer(), PreferenceLoss(loss, beta=0.3, label_smoothing=0.0)
    numbers = np.random.default_rng(0)
    examples = [Example(("tiny", i), numbers.integers(5, 300, 3 + i % 4).tolist(),
                        [numbers.integers(5, 300, 2 + (i + side) % 5).tolist() + [2] for side in (0, 2)], [(0, 1)], [1])
                for i in range(STEPS * BATCH)]
    theirs, expected = train_with_trl(tokenizer, examples, settings, tmp_path / "trl")

    model = tiny_models.llama(tokenizer)
    rows = compute_reference(model, examples, "fp32", tmp_path / "reference.parquet", "reference")
    ours = TrainerSettings(batch=BATCH, microbatch=2, learning_rate=1e-3, schedule="cosine", weight_decay=0.01, seed=0,
                           save_every_steps=100, warmup_steps=2)
    monkeypatch.setattr(trainer, "LOG_EVERY_STEPS", 1)
    history = trainer.train(model, rows, collate_rows, lambda items: settings.summed_loss(model, items, "fp32"),
                            ours, tmp_path, "test")
    assert [row["loss"] for row in history] == pytest.approx(expected, rel=1e-4)
    assert len(expected) == STEPS and max(expected) - min(expected) > 0.01
    start = dict(tiny_models.llama(tokenizer).named_parameters())
    others = dict(theirs.named_parameters())
    for name, weight in model.named_parameters():
        moved = (others[name] - start[name]).norm()
        assert (weight - others[name]).norm() <= 1e-2 * moved, name


def train_with_trl(tokenizer, examples: list[Example], settings: PreferenceLoss, out: Path) -> tuple:
    """Train with TRL's DPOTrainer on token ids; return its model and the loss of each step."""
    import datasets
    from trl import DPOConfig, DPOTrainer

    class Tokenized(DPOTrainer):
        def _prepare_dataset(self, dataset, *_):
            return dataset

    data = datasets.Dataset.from_list([
        {"prompt_ids": one.prompt, "chosen_ids": one.answers[0], "rejected_ids": one.answers[1]} for one in examples])
    config = DPOConfig(
        output_dir=str(out), loss_type=[settings.loss], beta=settings.beta, per_device_train_batch_size=BATCH,
        num_train_epochs=1, learning_rate=1e-3, lr_scheduler_type="cosine", warmup_steps=2, weight_decay=0.01, seed=0,
        data_seed=0, logging_steps=1, use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no",
        report_to=[], disable_tqdm=True, dataloader_pin_memory=False)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = tiny_models.llama(tokenizer)
    model.set_attn_implementation("eager")
    peer = Tokenized(model, tiny_models.llama(tokenizer), config, train_dataset=data, processing_class=tokenizer)
    peer.train()
    return peer.model, [row["loss"] for row in peer.state.log_history if "loss" in row]
