"""Golden values of trl 1.12's experimental PPOTrainer, the last one published: its train() on a tiny random model.

Run in an environment of its own (README.md). train() is one method, so nothing in it can be called alone: functions
that it calls are wrapped, and each wrapper reads the local variables of its caller. No line of trl is changed.
"""

import sys
import tempfile
import warnings

import common
import numpy as np
import torch
import trl.experimental.ppo.ppo_trainer as module
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl.experimental.ppo import PPOConfig, PPOTrainer

warnings.filterwarnings("ignore")
S = common.SETTINGS
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
PAD, EOS = common.VOCABULARY, 1  # trl masks pads before it embeds them: the model cannot draw one
ROWS, PROMPT, RESPONSE, EPOCHS = 8, 4, 8, 3
EXPERIENCE = [
    "logprobs",
    "ref_logprobs",
    "values",
    "scores",
    "rewards",
    "returns",
    "padding_mask",
    "padding_mask_p1",
    "actual_end",
    "kl",
]
MINIBATCH = [
    "micro_batch_inds",
    "mb_responses",
    "mb_logprobs",
    "mb_values",
    "mb_advantage",
    "mb_return",
    "new_logprobs",
    "vpred",
    "ratio",
    "pg_loss",
    "vf_loss",
    "loss",
    "vf_clipfrac",
]


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"w0": 0, "</s>": EOS} | {f"w{i}": i for i in range(2, common.VOCABULARY)} | {"<pad>": PAD}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w2")), pad_token="<pad>", eos_token="</s>"
    )


def network(kind, seed: int, **more):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=common.VOCABULARY, pad_token_id=None, bos_token_id=None, eos_token_id=EOS, **SIZES, **more
    )
    made = kind(config).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4 if parameter.ndim == 2 else 1)  # far from a uniform distribution
    return made


def trainer(folder: str) -> PPOTrainer:
    settings = PPOConfig(
        output_dir=folder,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        num_ppo_epochs=EPOCHS,
        total_episodes=ROWS,
        response_length=RESPONSE,
        stop_token="eos",
        temperature=S["temperature"],
        kl_coef=S["beta"],
        gamma=S["gamma"],
        lam=S["lam"],
        cliprange=S["clip"],
        cliprange_value=S["value_clip"],
        vf_coef=S["value_coefficient"],
        learning_rate=0.003,
        missing_eos_penalty=None,
        num_sample_generations=0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        seed=3,
    )
    policy, reference = (network(LlamaForCausalLM, seed) for seed in (0, 1))
    value, reward = (network(LlamaForSequenceClassification, seed, num_labels=1) for seed in (2, 3))
    generator = torch.Generator().manual_seed(4)
    np.random.seed(5)  # train() draws the order of an epoch from numpy's global generator
    prompts = torch.randint(2, common.VOCABULARY, (ROWS, PROMPT), generator=generator).tolist()
    data = Dataset.from_dict({"input_ids": prompts})
    return PPOTrainer(settings, tokenizer(), policy, reference, reward, data, value)


def picked(names: list[str], actual: dict) -> dict:
    return {n: torch.as_tensor(actual[n]).detach().clone() for n in names}


def spy(ppo: PPOTrainer) -> dict:
    """Wrap what train() calls; the dictionary fills while it runs, and keeps the last epoch's minibatch."""
    seen: dict = {}
    whiten, backward, forward = module.masked_whiten, ppo.accelerator.backward, module.forward
    mean = module.masked_mean

    def seeing_whiten(values, mask, shift_mean=True):
        seen["experience"] = picked(EXPERIENCE, sys._getframe(1).f_locals) | {"unwhitened": values.clone()}
        seen["experience"]["variance"] = module.masked_var(values, mask)
        seen["experience"]["variance_biased"] = module.masked_var(values, mask, unbiased=False)
        seen["experience"]["whitened"] = whiten(values, mask, shift_mean)
        return whiten(values, mask, shift_mean)

    def seeing_forward(model, ids, pad):
        actual = forward(model, ids, pad)
        if torch.is_grad_enabled():  # the update's: train() divides these logits by the temperature, in place
            seen["logits"] = actual[0].logits.detach()[:, PROMPT - 1 : -1].clone()
        return actual

    def seeing_backward(loss, **more):
        actual = sys._getframe(1).f_locals
        gradients = torch.autograd.grad(loss, [actual["new_logprobs"], actual["vpred"]], retain_graph=True)
        seen["minibatch"] = picked(MINIBATCH, actual) | {"logits": seen["logits"]}
        seen["minibatch"] |= dict(zip(("log_p_gradient", "vpred_gradient"), gradients, strict=True))
        backward(loss, **more)

    def seeing_mean(values, mask, axis=None):
        actual = mean(values, mask, axis)
        if "pg_losses2" in (local := sys._getframe(1).f_locals) and "loss" in local:
            seen["minibatch"]["pg_clipfrac"] = actual.clone()  # the mean that train() takes after the step
        return actual

    module.masked_whiten, module.forward, module.masked_mean = seeing_whiten, seeing_forward, seeing_mean
    ppo.accelerator.backward = seeing_backward
    return seen


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ppo = trainer(folder)
        seen, logged = spy(ppo), []
        ppo.log = lambda metrics, *_: logged.append(metrics)
        ppo.train()
    names = ("objective/kl", "policy/entropy_avg", "policy/approxkl_avg", "val/ratio")
    content = {
        "settings": S,
        "experience": seen["experience"],
        "minibatch": seen["minibatch"],
        "logged": {name: logged[0][name] for name in names},
    }
    common.write(__file__, ("trl", "transformers", "accelerate", "torch", "numpy"), content)


if __name__ == "__main__":
    main()
