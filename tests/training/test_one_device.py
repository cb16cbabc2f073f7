"""Several GPUs in one machine: one process computes on one, and the batch stays what the recipe says."""

import pytest
import torch
from transformers import TrainingArguments

from stages.modeling import torch_setup
from stages.training.trainer import TrainerSettings, train

SETTINGS = TrainerSettings(batch=4, microbatch=2, learning_rate=0.1, schedule="constant", weight_decay=0.0, seed=0,
                           save_every_steps=10, max_steps=3)


@pytest.fixture
def eight_gpus(monkeypatch):
    """Let Transformers and torch count eight GPUs, on a machine that may have none."""
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 8))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


def test_a_step_takes_the_recipes_batch_on_one_device(eight_gpus, tmp_path):
    model, batches = torch.nn.Linear(1, 1), []

    def collate(items):
        return {"content": torch.tensor(items, dtype=torch.float32)[:, None], "items": len(items)}

    def loss_fn(content):
        batches.append(len(content))
        return model(content.to(model.weight.device)).square().sum()

    train(model, list(range(64)), collate, loss_fn, SETTINGS, tmp_path, "test")
    assert batches == [2] * 6  # three steps of two microbatches


def test_it_is_said_which_one_is_used(eight_gpus, capsys):
    torch_setup.prepare()
    assert capsys.readouterr().err == (
        "8 GPUs are visible, and a stage computes on one, the first: CUDA_VISIBLE_DEVICES chooses another\n")
