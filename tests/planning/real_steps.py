"""Steps of the trainings with real weights: the stages' own models and losses, on texts of full length."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

from stages.finetuning.packing import PackedRow, summed_lm_loss
from stages.modeling import lora
from stages.modeling.adapters import VALUE, adapter_parameters
from stages.modeling.load import carry_batch, precision_arguments, register_attention
from stages.modeling.packed import attention
from stages.offline_rl.dataset import ScoredAnswer
from stages.offline_rl.losses import LossSettings, token_losses, total_loss
from stages.offline_rl.model import ILQLModel
from stages.planning.stage_plan import reads_reward_model
from stages.preference.logprobs import ReferencedExample
from stages.preference.loss import PreferenceLoss
from stages.recipe.recipe import select_settings
from stages.reward_modeling.dataset import Example
from stages.reward_modeling.loss import PairwiseLoss
from stages.reward_modeling.scoring_file import Scoring
from stages.rl.policy import Policy
from stages.rl.policy_gradient_trainer import MinibatchSize, UpdateSettings, policy_gradient_loss
from stages.rl.trajectory import Trajectory


class Step(NamedTuple):
    """The model with all that is trained, the models beside it by name, and what runs a step of training."""

    model: nn.Module
    others: Mapping[str, nn.Module]
    run: Callable[[], object]


def build_causal(config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    """Build a causal model of random weights, with packed attention."""
    return _build(AutoModelForCausalLM, config, dtype)


def build_classifier(config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    """Build a sequence classifier with one output, with packed attention."""
    config = deepcopy(config)
    config.num_labels = 1
    return _build(AutoModelForSequenceClassification, config, dtype)


def _build(auto_class, config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    register_attention(config)
    model = auto_class.from_config(config, dtype=dtype, attn_implementation=attention.PACKED)
    carry_batch(model)
    return model.eval().requires_grad_(False)


def weights_dtype(precision: str) -> torch.dtype:
    """Return the number format of the weights that a precision loads."""
    return precision_arguments(precision)["dtype"]


def preset_gradients(model: nn.Module) -> None:
    """Give every trained parameter a gradient, as after a first microbatch."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)


def lm_step(config: PretrainedConfig, settings: Any, rows: int) -> Step:
    """Build a step of language modelling on so many blocks: sft, expert_iteration, and a base from scratch."""
    model = _trainable(build_causal(config, weights_dtype(settings.precision)), settings)
    length = settings.sequence_length_tokens
    blocks = [PackedRow(np.zeros(length, int), np.arange(length) > 0)] * rows
    return Step(model, {}, lambda: summed_lm_loss(model, blocks, settings.precision).backward())


def reward_step(config: PretrainedConfig, settings: Any, rows: int) -> Step:
    """Build a step of the reward model on so many pairs; config: of its layers alone."""
    model = _trainable(build_classifier(config, weights_dtype(settings.precision)), settings, True)
    loss, scoring = (kind(**select_settings(kind, settings)) for kind in (PairwiseLoss, Scoring))
    pairs = [_longest_pair(settings)] * rows
    return Step(model, {}, lambda: loss.summed_loss(model, pairs, scoring, settings.precision).backward())


def dpo_step(config: PretrainedConfig, settings: Any, rows: int) -> Step:
    """Build a step of DPO on so many pairs; the reference's log-probabilities are stored beforehand."""
    model = _trainable(build_causal(config, weights_dtype(settings.precision)), settings)
    loss = PreferenceLoss(**select_settings(PreferenceLoss, settings))
    pairs = [ReferencedExample(_longest_pair(settings), (0.0, 0.0))] * rows
    return Step(model, {}, lambda: loss.summed_loss(model, pairs, settings.precision).backward())


def ilql_step(config: PretrainedConfig, settings: Any, rows: int) -> Step:
    """Build a step of ILQL on so many answers."""
    model = _trainable(build_causal(config, weights_dtype(settings.precision)), settings)
    learner = ILQLModel(model, settings.precision)
    losses = LossSettings(**select_settings(LossSettings, settings))
    answers = [ScoredAnswer([0], [0] * (settings.max_length_tokens - 1), 0.0)] * rows
    return Step(learner, {}, lambda: total_loss(token_losses(learner(answers), losses), losses).sum().backward())


def policy_gradient_step(config: PretrainedConfig, settings: Any, rows: int, value_model: str | None,
                         reward_lora: Any, members: int) -> Step:
    """Build a step of PPO, RLOO or GRPO on so many responses, with the reward models beside the policy.

    value_model: as in the section ppo; None: no critic. reward_lora: the reward model's adapter. members: number of
    reward models.
    """
    group = settings.responses_per_prompt
    policy = _build_policy(config, settings, value_model, reward_lora, share_prompts=group > 1)
    update = UpdateSettings(**select_settings(UpdateSettings, settings))
    prompts = [[row // group] + [0] * (settings.max_prompt_tokens - 1) for row in range(rows)]
    trajectory = _longest_trajectory(prompts, settings.max_response_tokens)

    def backward():
        for roles in policy.separate_roles():
            policy_gradient_loss(policy, trajectory, torch.arange(rows), MinibatchSize(1, rows), update, 0.0, roles
                                 )[0].backward()

    return Step(policy, _reward_models(config, policy, settings, value_model, reward_lora, members), backward)


def _trainable(model, settings: Any, scorer: bool = False):
    """Return the model in training mode, with what is trained requiring gradients, and recomputation if it is set."""
    if (tune := getattr(settings, "tune", "full")) == "full":
        model.requires_grad_(True)
    elif tune == "head":
        model.requires_grad_(False).score.requires_grad_(True)
    else:
        model = _adapt(model, settings, scorer)
    model.train()
    if getattr(settings, "gradient_checkpointing", False):
        lora.unwrap_peft(model).activation_checkpointing_enable(
            activation_checkpointing_kwargs={"use_reentrant": False})
    return model


def _adapt(model, settings: Any, scorer: bool = False):
    return lora.add_lora(model, precision="bf16", scorer=scorer, **vars(settings.lora))


def _build_policy(config: PretrainedConfig, settings: Any, value_model: str | None, reward_lora: Any,
                  share_prompts: bool) -> Policy:
    dtype = weights_dtype(settings.precision)
    model = build_causal(config, dtype)
    model = model.requires_grad_(True) if settings.tune == "full" else _adapt(model, settings)
    policy = Policy(model, settings.temperature, settings.precision,
                    gradient_checkpointing=settings.gradient_checkpointing, critic=value_model is not None,
                    share_prompts=share_prompts)
    if value_model == "adapter":
        _add_role(policy, VALUE, reward_lora, learns=True)
    if value_model == "model":
        policy.value_precision = "mixed" if settings.precision == "bf16" else settings.precision
        policy.value_model = build_classifier(config, weights_dtype(policy.value_precision)).requires_grad_(True)
        policy.value_model.score.requires_grad_(False)
    policy.value_shares_policy = value_model == "head"
    return policy


def _reward_models(config: PretrainedConfig, policy: Policy, settings: Any, value_model: str | None, reward_lora: Any,
                   members: int) -> dict[str, nn.Module]:
    """Return the models beside the policy; a reward model that is given as an adapter shares the policy's base."""
    if not reads_reward_model(settings):
        return {}
    if value_model != "adapter":
        dtype = weights_dtype(settings.precision)
        return {"reward model": nn.ModuleList(build_classifier(config, dtype) for _ in range(members))}
    for number in range(members):
        _add_role(policy, f"reward-{number}", reward_lora, learns=False)
    return {}


def _add_role(policy: Policy, role: str, adapter: Any, learns: bool) -> None:
    """Add an adapter to the policy's base, as reward_modeling/load.py does with one from a folder."""
    config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=adapter.r, lora_alpha=adapter.alpha, lora_dropout=0.0,
                        target_modules=list(adapter.target_modules) or None)
    required = [(p, p.requires_grad) for p in policy.base.parameters()]
    model = policy.base
    if isinstance(model, PeftModel):
        model.add_adapter(role, config)
    else:
        policy.frozen_copy = model = get_peft_model(model, config, adapter_name=role)
    for parameter, flag in [*required, *((p, learns) for p in adapter_parameters(model, role).values())]:
        parameter.requires_grad_(flag)


def _longest_pair(settings: Any) -> Example:
    """Return a pair with answers of full length, and next to no question that they could share."""
    return Example((), [0], [[0] * (settings.max_length_tokens - 1)] * 2, [(0, 1)], [1])


def _longest_trajectory(prompts: list[list[int]], response: int) -> Trajectory:
    """Return responses of full length; prompts that are equal are computed once."""
    rows = len(prompts)
    logprobs, ref_logprobs, values, advantages, returns = torch.zeros(5, rows, response)
    return Trajectory(logprobs, ref_logprobs, values, torch.ones(rows, response), prompts, [[0] * response] * rows,
                      advantages, returns)
