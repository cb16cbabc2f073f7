"""The module that is trained: what its checkpoints hold, how it resumes, what it refuses."""

from dataclasses import replace

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM

from stages.modeling import lora
from stages.modeling.packed.forward import use_packed_attention
from stages.offline_rl.dataset import ScoredAnswer, collate_answers
from stages.offline_rl.losses import LossSettings, token_losses, total_loss
from stages.offline_rl.model import ILQLModel
from stages.training.trainer import TrainerSettings, train
from tests.helpers import tiny_models

ROWS = [ScoredAnswer([3 + i, 40, 50], [60 + i, *range(80, 80 + i % 4), 2], i % 3 - 1.0) for i in range(12)]
LOSS = LossSettings(gamma=0.9, tau=0.7, cql_scale=0.1, awac_scale=1.0, awac_beta=0.5)
TRAINING = TrainerSettings(batch=4, microbatch=2, learning_rate=2e-3, schedule="cosine", weight_decay=0.01, seed=0,
                           save_every_steps=2, max_steps=6)


class KilledError(Exception):
    """Stands for a kill in the middle of a training."""


def build(dropout: float = 0.1) -> ILQLModel:
    torch.manual_seed(0)
    causal = lora.add_lora(tiny_models.llama(tiny_models.tokenizer(), width=16), r=4, alpha=8, dropout=dropout,
                           target_modules=(), precision="fp32")
    use_packed_attention(lora.unwrap_peft(causal))
    return ILQLModel(causal, "fp32")


def learn(out, killed_at: int | None = None) -> dict[str, torch.Tensor]:
    """Return the state after training into `out`, where a checkpoint may be."""
    learner = build()

    def after_step(step: int) -> None:
        if step == killed_at:
            raise KilledError
        if step % 2:  # between checkpoints: targets that a resume did not restore would differ
            learner.heads.synchronise_targets(0.3)

    out.mkdir(exist_ok=True)
    train(learner, ROWS, collate_answers, lambda rows: total_loss(token_losses(learner(rows), LOSS), LOSS).sum(),
          TRAINING, out, "test", after_step=after_step)
    return learner.state_dict()


def test_a_resumed_training_has_the_same_bits_targets_included(tmp_path):
    whole = learn(tmp_path / "whole")
    with pytest.raises(KilledError):
        learn(tmp_path / "cut", killed_at=5)
    resumed = learn(tmp_path / "cut")
    assert whole.keys() == resumed.keys() and all(whole[name].equal(resumed[name]) for name in whole)
    fresh = build().heads.state_dict()
    targets = [name for name in fresh if name.startswith("target_q_heads.")]
    assert targets and all(not whole[f"heads.{name}"].equal(fresh[name]) for name in targets)


def test_a_checkpoint_holds_what_changes_and_nothing_else():
    learner = build()
    names = set(learner.state_dict())
    assert names == {name for name, _ in learner.named_parameters() if "lora_" in name or name.startswith("heads.")}
    assert any("target_q_heads" in name for name in names)
    assert not [p for p in learner.heads.target_q_heads.parameters() if p.requires_grad]


def test_gradients_of_the_heads_reach_the_adapter():
    """As in the paper, Q and V are learnt with the model, not on fixed features."""
    learner = build(dropout=0.0)
    settings = replace(LOSS, awac_scale=0.0)
    torch.nn.init.normal_(next(p for name, p in learner.named_parameters() if "lora_B" in name))
    total_loss(token_losses(learner(ROWS), settings), settings).sum().backward()
    reached = {name for name, p in learner.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert any("lora_A" in name for name in reached) and any("v_head" in name for name in reached)


def test_outside_of_the_context_the_model_has_its_own_layer():
    learner = build().eval()
    own = learner.causal_model.get_output_embeddings()
    with pytest.raises(KilledError), learner.shifted(3.0):
        assert learner.causal_model.get_output_embeddings() is not own
        raise KilledError
    assert learner.causal_model.get_output_embeddings() is own and "differs by 0 " in learner.check_shift()


def test_a_family_that_scales_its_logits_is_refused():
    config = GraniteConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                           num_attention_heads=2, num_key_value_heads=2, logits_scaling=2.0)
    with pytest.raises(ValueError, match="granite changes its logits after the output layer"):
        ILQLModel(GraniteForCausalLM(config), "fp32").check_shift()
