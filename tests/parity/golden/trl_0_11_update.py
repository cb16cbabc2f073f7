"""Golden values of whole updates by trl 0.11.4: PPOTrainer.step on a tiny LLaMA with LoRA and a value head, float32.

Run in an environment of its own (README.md). trl's own step, unchanged; the order of the minibatches comes from torch's
generator, so that a test can have the same, and train_minibatch is wrapped to keep what it returned.
"""

import warnings

import common
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

warnings.filterwarnings("ignore")
U = common.UPDATE
CASES = {
    "k1": {"kl_penalty": "kl"},
    "absolute": {"kl_penalty": "abs"},
    "k2_whitened_rewards": {"kl_penalty": "mse", "whiten_rewards": True},
}
KEPT_STATISTICS = {
    "policy_loss": "loss/policy",
    "value_loss": "loss/value",
    "clip_fraction": "policy/clipfrac",
    "value_clip_fraction": "val/clipfrac",
}


def policy() -> AutoModelForCausalLMWithValueHead:
    config = LlamaConfig(
        vocab_size=U["vocabulary"],
        hidden_size=U["width"],
        intermediate_size=U["hidden"],
        num_hidden_layers=U["layers"],
        num_attention_heads=U["heads"],
        pad_token_id=0,
        eos_token_id=1,
        attn_implementation="eager",
    )
    lora = LoraConfig(r=U["r"], lora_alpha=U["alpha"], lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    adapted = get_peft_model(LlamaForCausalLM(config), lora)
    made = AutoModelForCausalLMWithValueHead(adapted, summary_dropout_prob=0.0)
    made.is_peft_model = True  # from_pretrained would have set it
    weights = common.update_weights()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(torch.tensor(weights.pop(common.base_name(name))))
    assert not weights, f"not set: {list(weights)}"
    return made


def tokenizer() -> PreTrainedTokenizerFast:
    """As LLaMA's: pads on the left, so that every row of a batch ends in the same column."""
    words = {"<pad>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, U["vocabulary"])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w2")),
        pad_token="<pad>",
        eos_token="</s>",
        padding_side="left",
    )


def trainer(**conventions) -> PPOTrainer:
    config = PPOConfig(
        batch_size=U["batch"],
        mini_batch_size=U["minibatch"],
        gradient_accumulation_steps=1,
        ppo_epochs=U["epochs"],
        learning_rate=U["learning_rate"],
        cliprange=U["clip"],
        cliprange_value=U["value_clip"],
        vf_coef=U["value_coefficient"],
        init_kl_coef=U["beta"],
        gamma=U["gamma"],
        lam=U["lam"],
        target=U["target"],
        horizon=U["horizon"],
        accelerator_kwargs={"cpu": True},
        **conventions,
    )
    made = PPOTrainer(config, policy(), None, tokenizer())
    (group,) = made.optimizer.param_groups
    assert group["eps"] == U["adam_epsilon"] and group["weight_decay"] == 0
    return made


def trained(model) -> dict:
    named = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return {common.base_name(name): p.detach().numpy().copy() for name, p in named}


def deterministic_order() -> list:
    """From here on numpy's permutations are torch's; the list fills with those that step() drew."""
    generator, drawn = torch.Generator().manual_seed(U["order_seed"]), []

    def permutation(count):
        drawn.append(torch.randperm(count, generator=generator).tolist())
        return np.array(drawn[-1])

    np.random.permutation = permutation
    return drawn


def seen_by(ppo: PPOTrainer) -> dict:
    """Wrap the trainer's methods; the dictionary fills while step() runs. Response tokens only, row by row."""
    seen = {"minibatches": [], "weights": []}
    forward, advantages, minibatch = ppo.batched_forward_pass, ppo.compute_advantages, ppo.train_minibatch

    def rows(value, mask):
        return [row[keep.bool()].numpy() for row, keep in zip(value, mask, strict=True)]

    def seeing_forward(*given, **named):
        actual = forward(*given, **named)
        if not torch.is_grad_enabled():  # before the epochs: the policy first, then the reference
            seen["log_ref" if "log_p" in seen else "log_p"] = rows(actual[0], actual[3])
        return actual

    def seeing_advantages(values, rewards, mask):
        actual = advantages(values, rewards, mask)
        names = ("values", "advantages", "returns")
        seen.update({name: rows(value, mask) for name, value in zip(names, actual, strict=True)})
        return actual

    def seeing_minibatch(*given):
        statistics = minibatch(*given)
        seen["minibatches"].append({name: float(statistics[key]) for name, key in KEPT_STATISTICS.items()})
        seen["weights"].append(trained(ppo.model))
        return statistics

    ppo.batched_forward_pass, ppo.compute_advantages = seeing_forward, seeing_advantages
    ppo.train_minibatch = seeing_minibatch
    return seen


def case(conventions: dict) -> dict:
    ppo, given = trainer(**conventions), common.update_rollout()
    seen, order = seen_by(ppo), deterministic_order()
    statistics = ppo.step(
        [torch.tensor(ids) for ids in given["prompts"]],
        [torch.tensor(ids) for ids in given["responses"]],
        [torch.tensor(score) for score in given["scores"]],
    )
    weights = seen.pop("weights")
    assert len(weights) == U["epochs"] * U["batch"] // U["minibatch"]
    return seen | {
        "order": order,
        "objective_kl": float(statistics["objective/kl"]),
        "beta_after": ppo.kl_ctl.value,
        "weights_after_3": weights[2],
        "weights_after_6": weights[-1],
    }


def main() -> None:
    content = {"weights_sha256": common.digest(common.update_weights()), "rollout": common.update_rollout()}
    for name, conventions in CASES.items():
        content[name] = case(conventions)
    common.write(__file__, ("trl", "transformers", "peft", "accelerate", "torch", "numpy"), content)


if __name__ == "__main__":
    main()
