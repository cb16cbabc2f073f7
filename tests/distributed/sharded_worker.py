"""What the processes of test_sharding.py compute: the same training with whole and with sharded weights.

    python -m tests.distributed.sharded_worker FOLDER PROCESSES [FOLDER PROCESSES ...]      see forked_ranks.py
"""

import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from stages.distributed import group, sharding
from stages.generation.sampler import sample
from stages.modeling import lora
from stages.modeling.families import backbone
from stages.modeling.packed.forward import use_packed_attention
from stages.modeling.pretrained import save_model
from stages.reward_modeling.scorer import Scorer
from stages.rewards.kl import KlController
from stages.rewards.reward_functions import RewardFunction
from stages.rewards.shaping import RewardShaper
from stages.rl.advantages import gae_advantages
from stages.rl.collect_rollouts import SamplingParams
from stages.rl.policy import Policy
from stages.rl.policy_gradient_trainer import PolicyGradientTrainer
from stages.training import checkpoint
from tests.distributed import worker
from tests.distributed.forked_ranks import run_in_ranks
from tests.helpers import tiny_models
from tests.helpers.settings import shaping

MODES = ("whole", "sharded")


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: sharding.whole(p.detach()).clone() for name, p in model.named_parameters() if p.requires_grad}


def local_bytes(model: torch.nn.Module) -> int:
    return sum(sharding.local(p).nbytes for p in model.parameters())


def train_ppo(mode: str, tune: str, precision: str) -> tuple[dict, dict]:
    """Run two iterations; with `full`, the value function is a model of its own, too."""
    torch.manual_seed(0)
    model = tiny_models.llama(tiny_models.tokenizer())
    if precision == "bf16":
        model = model.to(torch.bfloat16)
    if tune == "lora":
        model = lora.add_lora(model, r=4, alpha=8, dropout=0.0, target_modules=(), precision=precision)
    else:
        model.requires_grad_(True)
    policy = Policy(model, 1.0, precision, gradient_checkpointing=tune == "full")
    if tune == "full":
        policy.value_model, policy.value_shares_policy = tiny_models.classifier(2).requires_grad_(True), False
        policy.value_model.score.requires_grad_(False)
    scorer = Scorer(tiny_models.classifier(1), precision)
    if mode == "sharded":
        policy.shard()
        sharding.shard(backbone(scorer.model))
    optimizer = torch.optim.Adam(policy.trainable_parameters().values(), lr=1e-3)
    trainer = PolicyGradientTrainer(
        policy=policy, kl_controller=KlController(0.1, 1.0, 20), optimizer=optimizer, update_settings=worker.UPDATE,
        reward_shaper=RewardShaper([RewardFunction("model", 1.0, "ids", scorer, part="model")], None,
                                   shaping()),
        sampling=SamplingParams(1.0, (2, 5, 9, 40), "until_stop", 1, 12), kl_estimator="k1", forward_prompts=2,
        estimate_advantages=partial(gae_advantages, gamma=0.98, gae_lambda=0.9))
    rows = []
    for i in range(2):
        rows.append(trainer.step(worker.PROMPTS, lambda purpose, i=i: torch.Generator().manual_seed(i))[0])
        pass_through_checkpoint(policy, optimizer)
    return {"rows": rows, "bytes": local_bytes(policy)}, trained(policy)


@torch.no_grad()
def pass_through_checkpoint(policy: Policy, optimizer) -> None:
    """Gather weights and optimizer state as for a checkpoint, forget them, and restore them from there."""
    tensors = checkpoint.flatten_optimizer_state(optimizer) | policy.trainable_parameters()
    tensors = {name: sharding.whole(tensor).clone() for name, tensor in tensors.items()}
    optimizer.state.clear()
    for name, parameter in policy.trainable_parameters().items():
        parameter.zero_()
        parameter.copy_(sharding.split_like(tensors[name], parameter))
    checkpoint.restore_optimizer_state(optimizer, tensors)


def check_sampling(mode: str) -> dict:
    """Sample where one process ends long before the others, and where others have no prompt at all."""
    model = tiny_models.llama(tiny_models.tokenizer())
    use_packed_attention(model)
    if mode == "sharded":
        sharding.shard(backbone(model))
    options = {"temperature": 1.0, "stop_ids": (), "value_fn": lambda hidden: hidden.float().mean(-1)}
    limits = [1, 1, 2, 20, 20]
    rollout = sample(model, worker.PROMPTS, max_new_tokens=limits, generator=torch.Generator().manual_seed(3),
                     **options)
    one = sample(model, worker.PROMPTS[:1], max_new_tokens=6, generator=torch.Generator().manual_seed(3), **options)
    return {"responses": rollout.responses, "logprobs": rollout.logprobs.tolist(), "one": one.responses,
            "bytes": local_bytes(model), "layer_bytes": sum(
                p.numel() * p.element_size() for layer in model.model.layers for p in layer.parameters())}


def finetune(mode: str, out: Path, tune: str, begun: Path | None = None) -> tuple[dict, dict]:
    """Train with checkpoints, and save the whole model; begun: continue from the first checkpoint of that folder."""
    if begun:
        group.from_main(None)  # its process is the first one, and has written it
        shutil.copytree(begun, out)
        shutil.rmtree(out / "checkpoints/checkpoint-6")
    model = tiny_models.llama(tiny_models.tokenizer())
    use_packed_attention(model)
    if tune == "lora":
        model = lora.add_lora(model, r=4, alpha=8, dropout=0.0, target_modules=(), precision="fp32")
    if mode == "sharded":
        sharding.shard(backbone(lora.unwrap_peft(model)))
    history = worker.train_on_blocks(model, out, replace(worker.TRAINING, save_every_steps=3))
    if tune == "full":
        save_model(model, tiny_models.tokenizer(), out / "saved")
    return {"history": history}, trained(model)


def run_checks(own: Path) -> tuple[dict, dict]:
    """Return facts and tensors by mode and name; in two processes, of more kinds of training."""
    facts, tensors = {}, {}
    first = own.with_name("files-0") / "sharded/full"
    for mode in MODES:
        facts[mode] = {"sampling": check_sampling(mode)}
        checks = {"ppo full": partial(train_ppo, mode, "full", "fp32"),
                  "sft full": partial(finetune, mode, own / mode / "full", "full")}
        if group.world_size() == 2:
            checks |= {"ppo lora": partial(train_ppo, mode, "lora", "fp32"),
                       "ppo lora bf16": partial(train_ppo, mode, "lora", "bf16"),
                       "sft lora": partial(finetune, mode, own / mode / "lora", "lora"),
                       "sft resumed": partial(finetune, mode, own / mode / "resumed", "full",
                                              first if mode == "sharded" else None)}
        for name, check in checks.items():
            facts[mode][name], weights = check()
            tensors |= {f"{mode}.{name}.{key}": tensor for key, tensor in weights.items()}
    return facts, tensors


if __name__ == "__main__":
    sys.exit(run_in_ranks(run_checks, sys.argv[1:]))
