"""Golden values of trl 1.16.0's RLOOTrainer and GRPOTrainer: their train() on a tiny random model.

trl 1.16.0 is in the project's own environment (README.md). Its methods are wrapped, to read what they are given and
what they return; a batch is not shuffled, so that a prompt's responses stay together. No line of trl is changed. The
reference is another random model, and the second pass over a batch has other probabilities than the first.
"""

import tempfile
import warnings

import common
import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer import grpo_trainer, rloo_trainer

warnings.filterwarnings("ignore")
PAD, EOS, PROMPTS, RESPONSES, RESPONSE = common.VOCABULARY, 1, 3, 4, 6
SHARED = {
    "per_device_train_batch_size": PROMPTS * RESPONSES, "gradient_accumulation_steps": 1, "num_generations": RESPONSES,
    "num_iterations": 2, "max_completion_length": RESPONSE, "max_steps": 2, "learning_rate": 0.2, "epsilon": 0.2,
    "temperature": common.SETTINGS["temperature"], "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
    "save_strategy": "no", "report_to": [], "seed": 3, "disable_tqdm": True, "lr_scheduler_type": "constant",
    "mask_truncated_completions": False,
}
CASES = {
    "rloo": (RLOOTrainer, RLOOConfig, {"beta": 0.15}),
    "rloo normalized": (RLOOTrainer, RLOOConfig, {"beta": 0.15, "normalize_advantages": True}),
    "grpo": (GRPOTrainer, GRPOConfig, {"beta": 0.04, "loss_type": "grpo", "scale_rewards": "group"}),
    "grpo paper": (GRPOTrainer, GRPOConfig, {"beta": 0.04, "loss_type": "grpo", "scale_rewards": "group",
                                             "use_bias_correction_kl": False}),
    "grpo batch": (GRPOTrainer, GRPOConfig, {"beta": 0.04, "loss_type": "bnpo", "scale_rewards": "batch"}),
    "grpo none": (GRPOTrainer, GRPOConfig, {"beta": 0.0, "loss_type": "bnpo", "scale_rewards": "none"}),
}


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"w0": 0, "</s>": EOS} | {f"w{i}": i for i in range(2, common.VOCABULARY)} | {"<pad>": PAD}
    made = Tokenizer(models.WordLevel(words, unk_token="w2"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


def network(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    made = LlamaForCausalLM(LlamaConfig(
        vocab_size=common.VOCABULARY + 1, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, pad_token_id=PAD, bos_token_id=None, eos_token_id=EOS)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4 if parameter.ndim == 2 else 1)  # far from a uniform distribution
    return made


def score(completions: list[str], **_) -> list[float]:
    return [float(np.sin(sum(map(ord, text)))) + 0.1 * len(text.split()) for text in completions]


def record(kind, config, options: dict) -> list[dict]:
    """Train two passes over one batch; return what went into each loss, and the loss with its gradient."""
    rows, calls, rewards = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        network(1).save_pretrained(folder)
        policy = network(0)
        policy.config._name_or_path = folder  # where the trainer loads the reference from
        trainer = kind(
            model=policy, reward_funcs=score, processing_class=tokenizer(),
            args=config(output_dir=folder, **{key: value for key, value in (SHARED | options).items()
                                              if key in config.__dataclass_fields__}),
            train_dataset=Dataset.from_list([{"prompt": f"w{i} w{i + 2} w3"} for i in range(2, 2 + PROMPTS)]))
        if trainer.ref_model is not None:
            trainer.ref_model.double().load_state_dict(network(1).state_dict())
        logprobs_of, loss_of, rewards_of = (
            trainer._get_per_token_logps_and_entropies, trainer._compute_loss, trainer._calculate_rewards)

        def keep_logprobs(*args, **kwargs):
            outputs = logprobs_of(*args, **kwargs)
            calls.append(outputs[0])
            return outputs

        def keep_rewards(*args, **kwargs):
            rewards.append(rewards_of(*args, **kwargs))
            return rewards[-1]

        def keep_loss(model, inputs):
            loss = loss_of(model, inputs)
            (gradient,) = torch.autograd.grad(loss, [calls[-1]], retain_graph=True)
            rows.append({"new": calls[-1].detach(), "gradient": gradient, "loss": loss.detach(),
                         "advantages": inputs["advantages"], "mask": inputs["completion_mask"]})
            return loss

        trainer._get_per_token_logps_and_entropies = keep_logprobs
        trainer._compute_loss, trainer._calculate_rewards = keep_loss, keep_rewards
        trainer.train()
    old = calls[0].detach()  # the calls: when the batch is made, under policy and reference; then once a pass
    ref = calls[1].detach() if options["beta"] else old
    return [row | {"old": old, "ref": ref, "rewards": rewards[0].nansum(1)} for row in rows]


def main() -> None:
    torch.set_default_dtype(torch.float64)
    for module in (grpo_trainer, rloo_trainer):
        module.shuffle_sequence_dict = lambda batch: batch
    values = {name: {"options": options, "passes": record(kind, config, options)}
              for name, (kind, config, options) in CASES.items()}
    common.write(__file__, ("trl", "transformers", "torch", "numpy"), {
        "responses_per_prompt": RESPONSES, "clip_range": SHARED["epsilon"], "values": values})


if __name__ == "__main__":
    main()
