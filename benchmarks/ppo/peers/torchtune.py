"""Time torchtune's PPO recipe (0.6.1, ppo_full_finetune_single_device), fp32 on the CPU, in its own environment.

The recipe's file is loaded as shipped and its train() runs; only setup() is replaced, by models, optimiser and prompts
in memory. It is a full fine-tune of policy and value model: the recipe has no LoRA.
"""

import contextlib
import importlib.util
import warnings
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torchtune
from torch.utils.data import DataLoader, DistributedSampler
from torchtune import generation, training
from torchtune.data import padded_collate
from torchtune.models.llama2 import llama2
from torchtune.models.llama2._component_builders import llama2_classifier
from torchtune.modules import TiedLinear, local_kv_cache
from torchtune.rlhf.loss import PPOLoss

from benchmarks.ppo import workload

PACKAGES = ("torchtune", "torchao", "torch", "torchdata")


def published_recipe():
    path = Path(torchtune.__file__).parents[1] / "recipes" / "ppo_full_finetune_single_device.py"
    spec = importlib.util.spec_from_file_location("ppo_recipe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PPOFullFinetuneRecipeSingleDevice


def random_llama(model):
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def networks(shape: workload.Shape) -> tuple:
    """Build policy, reference, reward and value model."""
    sizes = {"vocab_size": shape.vocabulary, "num_layers": shape.layers, "num_heads": shape.heads,
             "num_kv_heads": shape.key_heads or shape.heads, "embed_dim": shape.width, "max_seq_len": shape.positions,
             "intermediate_dim": shape.intermediate}

    def language_model():
        torch.manual_seed(0)
        model = random_llama(llama2(**sizes))
        del model.output  # a registered Linear; the builder of tied models passes TiedLinear, which is no nn.Module
        model.output = TiedLinear(model.tok_embeddings)
        return model

    return (language_model(), language_model(), random_llama(llama2_classifier(num_classes=1, **sizes)),
            random_llama(llama2_classifier(num_classes=1, **sizes)))


def build_recipe(clock: workload.Clock):
    class Recipe(published_recipe()):
        """The published recipe, timed, writing no files."""

        def __init__(self):
            pass

        def log_metrics(self, *args):
            clock.end_step()

        def save_checkpoint(self, *args, **kwargs):
            pass

    return Recipe()


def set_up(recipe, shape: workload.Shape, steps: int, clock: workload.Clock) -> None:
    """Set the attributes that the recipe's setup() would set."""
    policy, reference, reward, value = networks(shape)
    recipe._policy_model, recipe._ref_policy_model, recipe._reward_model, recipe._value_model = (
        policy, reference.eval().requires_grad_(False), reward.eval().requires_grad_(False), value)
    for model, name in ((reference, "old and reference"), (reward, "reward"), (value, "value")):
        model.forward = clock.wrap(model.forward, lambda _, name=name: None if torch.is_grad_enabled() else name)
    generation.generate = clock.wrap(generation.generate, lambda _: "generate")
    recipe._device, recipe._dtype, recipe.compile = torch.device("cpu"), torch.float32, False
    recipe._tokenizer = type("Tokenizer", (), {"pad_id": workload.PAD})()
    recipe._optimizer_in_bwd = False
    recipe._optimizer = torch.optim.AdamW(chain(policy.parameters(), value.parameters()), lr=workload.LEARNING_RATE,
                                          fused=True)
    recipe._loss_fn = PPOLoss(epsilon=0.2, value_coeff=0.1, value_clip_range=0.2)
    rows = [{"tokens": prompt, "labels": prompt} for step in workload.prompts(shape, 1 + steps) for prompt in step]
    recipe._sampler = DistributedSampler(rows, num_replicas=1, rank=0, shuffle=True, seed=0)
    recipe._dataloader = DataLoader(
        rows, sampler=recipe._sampler, batch_size=shape.batch, drop_last=True,
        collate_fn=partial(padded_collate, pad_direction="left", keys_to_pad=["tokens", "labels"],
                           padding_idx=workload.PAD))
    set_numbers(recipe, shape, steps)
    recipe.cache_ctx_manager = lambda enable, decoder_max_seq_len: (
        local_kv_cache(policy, batch_size=shape.batch, dtype=torch.float32, device=recipe._device,
                       decoder_max_seq_len=decoder_max_seq_len) if enable else contextlib.nullcontext())


def set_numbers(recipe, shape: workload.Shape, steps: int) -> None:
    recipe.batch_size = recipe._forward_batch_size = shape.batch
    recipe._ppo_epochs, recipe._ppo_batch_size, recipe._ppo_backward_batch_size = (
        shape.epochs, shape.minibatch, shape.minibatch)
    recipe._gradient_accumulation_steps = 1
    recipe.enable_kv_cache, recipe._max_generated_tokens = True, shape.response
    recipe._temperature, recipe._top_k, recipe._rng = 1.0, None, torch.Generator().manual_seed(0)
    recipe._stop_token_ids, recipe._penalise_no_eos = torch.tensor([-1]), False
    recipe._min_response_length, recipe._reward_penalty = None, 0
    recipe._gamma, recipe._lmbda, recipe._kl_coeff = 1.0, 0.95, workload.KL_COEFFICIENT
    recipe._total_steps, recipe._steps_run, recipe.global_step = 1 + steps, 0, 0
    recipe._total_epochs, recipe._epochs_run, recipe._log_every_n_steps = 1, 0, 1
    recipe.profiler_profile_memory, recipe._profiler = False, training.DummyProfiler()


def main() -> None:
    arguments = workload.parse_worker_arguments(__doc__)
    clock = workload.Clock()
    recipe = build_recipe(clock)
    set_up(recipe, arguments.shape, arguments.steps, clock)
    clock.start_step()
    recipe.train()
    for step in clock.steps:
        step["phases"]["optimise"] = step["phases"].pop("other")
    workload.write_results(arguments.out, clock, PACKAGES)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    workload.set_threads()
    main()
