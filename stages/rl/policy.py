"""Compute policy, reference and value function, as roles on one frozen base (modeling/adapters.py).

The policy is an adapter on the base, or a whole model (then the base is a frozen copy of it); the reference is the base
alone. Values come from a linear head on the policy's last hidden state, whose gradient reaches the policy as in TRL's
AutoModelForCausalLMWithValueHead, from a value adapter, or from a separate value model. Without a critic they are 0.

Dropout is off throughout: old, new and reference log-probabilities must come from the same function.
Shapes: B responses (rows), R response tokens, M response tokens of all rows, D hidden size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from stages.distributed import group, sharding
from stages.generation.rollout import Rollout
from stages.modeling.adapters import POLICY, VALUE, active_adapter, adapter_parameters, is_adapter, merged_adapter
from stages.modeling.families import backbone, hidden_size
from stages.modeling.final_norm import divide_final_norm
from stages.modeling.finite_weights import DIVERGED, check_finite
from stages.modeling.load import autocast
from stages.modeling.lora import unwrap_peft
from stages.modeling.packed.forward import own_chunks, packed_hidden_states
from stages.modeling.packed.sequences import PackedResponses, scatter_to_rows
from stages.modeling.packed.shared_prefix import pack_rows, row_lengths
from stages.modeling.packed.token_logprobs import logprobs_from_hidden
from stages.modeling.pretrained import save_adapter, save_adapters, save_model
from stages.modeling.torch_setup import without_autocast
from stages.reward_modeling.load import RewardAdapter, SharedScorer, add_reward_adapter, load_classifier
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import load_scoring

ROLES = (POLICY, VALUE)


class TokenScores(NamedTuple):
    """Log-probabilities and values of response tokens, and their mask; all [B, R], fp32, 0 outside the mask."""

    logprobs: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor


class Policy(nn.Module):
    """A causal model that is trained whole or by a LoRA adapter, with a linear value head (critic) or without.

    The head starts at 0 ("The N Implementation Details of RLHF with PPO") unless `init_value_from_reward` is called.
    temperature: divides the logits of policy and reference. final_temperature: divides the policy's once more.
    gradient_checkpointing: recompute activations in the backward pass of updates; sampling is not affected.
    share_prompts: compute a prompt with several responses of a batch once; for methods that sample several.
    """

    def __init__(
        self, model, temperature: float, precision: str, *, gradient_checkpointing: bool = False,
        critic: bool = True, share_prompts: bool = False
    ):
        super().__init__()
        self.share_prompts = share_prompts
        self.model, self.temperature, self.precision = model.eval(), temperature, precision
        self.final_temperature = 1.0
        self.value_precision = precision
        self.frozen_copy = None if isinstance(model, PeftModel) else deepcopy(model).requires_grad_(False)
        self.gradient_checkpointing = gradient_checkpointing
        self.value_shares_policy, self.value_model, self.value_head = critic, None, None
        if not critic:
            return
        self.value_head = nn.Linear(hidden_size(self.causal_model), 1, device=model.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @property
    def causal_model(self) -> nn.Module:
        """Return the policy's model without its PEFT wrapper."""
        return unwrap_peft(self.model)

    @property
    def base(self) -> nn.Module:
        """Return the model with the frozen weights: the reference, and the carrier of the other roles' adapters."""
        return self.model if self.frozen_copy is None else self.frozen_copy

    @property
    def has_critic(self) -> bool:
        """Tell whether there is a value function; without one, all values are 0."""
        return self.value_head is not None

    def init_value_from_reward(self, reward: Path, cpu_kernels: str = "off") -> None:
        """Compute values by a separate adapter or model, initialised, with its head, from the reward model in `reward`.

        An adapter gives an adapter on the base, a whole model another whole model. The bias subtracts the mean of the
        reference answers, so that values start as rewards. Call it before building an optimiser. Sampling then cannot
        compute values: see `fill_values`.
        """
        if is_adapter(reward):
            model, head = add_reward_adapter(self.base, reward, VALUE, learns=True)
            self._rebind_base(model)
            mean = load_scoring(reward)["mean"]
        else:
            if self.precision == "bf16":
                self.value_precision = "mixed"  # all weights learn: bf16 would round small updates away
            classifier = load_classifier(reward, self.value_precision, cpu_kernels=cpu_kernels)
            head, self.value_model = classifier.score.weight, classifier.requires_grad_(True)
            classifier.score.requires_grad_(False)  # the value head takes its place
            mean = Scorer(classifier, self.value_precision).mean
        self.value_shares_policy = False
        with torch.no_grad():
            self.value_head.weight.copy_(head)
            self.value_head.bias.fill_(-mean)

    @torch.no_grad()
    def rescale_values(self, factor: float, offset: float) -> None:
        """Multiply by `factor` and add `offset`, where values start as the reward model's; others start at 0."""
        if self.has_critic and not self.value_shares_policy:
            self.value_head.weight.mul_(factor)
            self.value_head.bias.mul_(factor).add_(offset)

    def add_scorer(self, reward: Path, forward_prompts: int, role: str = "reward") -> SharedScorer:
        """Load the reward adapter in `reward` onto the base as a role, so that scoring needs no second base."""
        adapter = RewardAdapter(self.base, reward, role)
        self._rebind_base(adapter.model)
        return SharedScorer(adapter, self.precision, batch_rows=forward_prompts, share_prompts=self.share_prompts)

    def shard(self) -> None:
        """Split the layers of base, whole policy and value model over the processes (distributed/sharding.py)."""
        for model in filter(None, (self.model, self.frozen_copy, self.value_model)):
            sharding.shard(backbone(unwrap_peft(model)))

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that require gradients, by name; tied weights once."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def parameters_of(self, roles: tuple[str, ...]) -> list[nn.Parameter]:
        """List the trained parameters of these roles."""
        own = {POLICY: self.policy_parameters, VALUE: self.critic_parameters}
        return [parameter for role in roles for parameter in own[role]()]

    def critic_parameters(self) -> list[nn.Parameter]:
        """List the trained parameters of the value function alone."""
        if not self.has_critic:
            return []
        separate = self.value_model.parameters() if self.value_model else adapter_parameters(self.base, VALUE).values()
        return [p for p in (*self.value_head.parameters(), *separate) if p.requires_grad]

    def policy_parameters(self) -> list[nn.Parameter]:
        """List the other trained parameters."""
        critic = {id(parameter) for parameter in self.critic_parameters()}
        return [p for p in self.trainable_parameters().values() if id(p) not in critic]

    def separate_roles(self) -> list[tuple[str, ...]]:
        """List the roles that are computed together: policy and value function, apart where they share no weights that
        are trained. Sharded layers are computed by all processes at once, so that all compute the same roles.
        """
        if self.value_shares_policy or not self.has_critic or sharding.is_active():
            return [ROLES]
        return [(role,) for role in ROLES]

    def forward(
        self, prompts: list[list[int]], responses: list[list[int]], roles: tuple[str, ...] = ROLES
    ) -> TokenScores:
        """Score the responses: log-probabilities under the policy, and values; 0 of a role that is not among `roles`.

        roles: one of `separate_roles`, or all.
        """
        packed = pack_rows(prompts, responses, self.model.device, self.share_prompts)
        logprobs = values = torch.zeros(len(packed.token_ids), device=self.model.device)
        if POLICY in roles:
            hidden = self._hidden_states(packed, POLICY)
            logprobs = self._logprobs(self.causal_model, hidden, packed, self.temperature * self.final_temperature)
        if VALUE in roles and self.has_critic:
            values = self._values(hidden if self.value_shares_policy else self._hidden_states(packed, VALUE))
        return TokenScores(scatter_to_rows(logprobs, packed), scatter_to_rows(values, packed), packed.mask)

    @torch.no_grad()
    def ref_logprobs(self, prompts: list[list[int]], responses: list[list[int]]) -> torch.Tensor:
        """Compute log-probabilities [B, R] under the reference."""
        packed = pack_rows(prompts, responses, self.model.device, self.share_prompts)
        hidden = self._hidden_states(packed, None)
        return scatter_to_rows(self._logprobs(unwrap_peft(self.base), hidden, packed, self.temperature), packed)

    def values_from_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute values [M], fp32, from the policy's hidden states [M, D]; 0 if they do not come from those."""
        if self.value_shares_policy:
            return self._values(hidden)
        return hidden.new_zeros(len(hidden), dtype=torch.float32)

    @torch.no_grad()
    def fill_values(self, rollout: Rollout, forward_prompts: int) -> Rollout:
        """Fill in the values of a separate value adapter, which sampling cannot compute.

        forward_prompts: rows per forward pass. The rows are shared among the processes.
        """
        if self.value_shares_policy or not self.has_critic or rollout.values is None:
            return rollout
        prompts, responses, values = rollout.prompts, rollout.responses, torch.zeros_like(rollout.values)
        for chunk in own_chunks(row_lengths(prompts, responses, self.share_prompts), forward_prompts):
            packed = pack_rows([prompts[i] for i in chunk], [responses[i] for i in chunk], self.model.device,
                               self.share_prompts)
            chunk_values = scatter_to_rows(self._values(self._hidden_states(packed, VALUE)), packed)
            values[chunk, : chunk_values.shape[1]] = chunk_values.to(values)
        return replace(rollout, values=group.sum_tensor(values))

    @contextmanager
    def critic_only(self) -> Iterator[None]:
        """Freeze all but the value function inside the context, for critic warm-up."""
        frozen = self.policy_parameters()
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)

    @contextmanager
    def merge_adapter(self) -> Iterator[nn.Module]:
        """Yield the policy as one model without an adapter, for sampling (adapters.merged_adapter)."""
        with merged_adapter(self.model, self.precision) as model:
            yield model

    def save(self, out: Path, tokenizer) -> None:
        """Save to `out` the adapter or the whole model with its tokenizer, value_head.safetensors, and the value
        adapter or model, if there is one, in value/; without a critic, no value file.

        The saved policy has `final_temperature` in its final norm. Raises ValueError if a weight is not finite.
        """
        if self.has_critic:
            check_finite(self.value_head.named_parameters("value_head"), DIVERGED)
        norm = divide_final_norm(self.causal_model, self.final_temperature) if self.final_temperature != 1 else {}
        (save_adapter if self.frozen_copy is None else save_model)(self.model, tokenizer, out, norm)
        if not self.has_critic:
            return
        if self.value_model is not None:
            save_model(self.value_model, tokenizer, out / VALUE)
        elif not self.value_shares_policy:
            save_adapters(self.base, out, [VALUE])
        head = {name: t.detach().cpu().contiguous() for name, t in self.value_head.state_dict().items()}
        if self.value_shares_policy:
            head["weight"] = head["weight"] * self.final_temperature  # values are computed from the divided norm
        save_file(head, out / "value_head.safetensors")

    def _rebind_base(self, model: nn.Module) -> None:
        """Point `base` at `model`: PEFT wraps a model without adapters in a new object when it adds the first one."""
        if self.frozen_copy is not None:
            self.frozen_copy = model

    def _hidden_states(self, packed: PackedResponses, role: str | None) -> torch.Tensor:
        """Compute the hidden states [M, D] that predict each response token."""
        model = self.model if role == POLICY else self.base
        if role == VALUE and self.value_model is not None:
            model = self.value_model
        inner = unwrap_peft(model)
        recomputed = self.gradient_checkpointing and torch.is_grad_enabled()
        layers = recomputed_layers(backbone(inner), role) if recomputed else nullcontext()
        precision = self.value_precision if role == VALUE else self.precision
        with active_adapter(model, role), layers, autocast(precision):
            return packed_hidden_states(inner, packed.batch, packed.predictor_positions)

    def _values(self, hidden: torch.Tensor) -> torch.Tensor:
        with without_autocast(hidden):  # sampling calls this under autocast, updates do not
            return self.value_head(hidden.float()).squeeze(-1)

    def _logprobs(self, model: nn.Module, hidden: torch.Tensor, packed: PackedResponses, temperature: float
                  ) -> torch.Tensor:
        with autocast(self.precision):
            return logprobs_from_hidden(model, hidden, packed.token_ids, temperature)


@contextmanager
def recomputed_layers(backbone: nn.Module, adapter: str | None) -> Iterator[None]:
    """Recompute the layers' activations in the backward pass (arXiv 1604.06174) of forward passes while this is open.

    Transformers' own checkpointing requires training mode, in which some families apply dropout, and its recomputation
    does not restore the adapter that was active in the forward pass. adapter: the active one.
    """
    layers = [layer for layer in backbone.modules() if isinstance(layer, GradientCheckpointingLayer)]
    previous = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = _checkpoint_forward(layer.forward, layer, adapter)
    try:
        yield
    finally:
        for layer, own in zip(layers, previous, strict=True):
            if own is None:
                del layer.forward
            else:
                layer.forward = own


def _checkpoint_forward(forward: Callable, layer: nn.Module, adapter: str | None) -> Callable:
    # Another adapter may be active by the time of the backward pass.
    contexts = lambda: (nullcontext(), active_adapter(layer, adapter))  # noqa: E731
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
