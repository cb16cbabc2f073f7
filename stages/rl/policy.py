"""The policy, its reference and its value function, on one frozen base; see roles.py.

The policy is an adapter on the base, or a whole model that learns (then the base is a frozen copy of it); the reference
is the base alone. Values come from a head on the policy's last hidden state, whose gradient flows into the policy as in
TRL's AutoModelForCausalLMWithValueHead, or from an adapter of their own.

Dropout is off throughout: old, new and reference log-probabilities must come from the same function.
Shapes: B rows, R response tokens, N tokens of all rows, M response tokens of all rows, D width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import nn

from stages.modeling.adapters import POLICY, VALUE, active_adapter, parameters_of
from stages.modeling.families import backbone, hidden_size
from stages.modeling.layer_calls import Layers
from stages.modeling.load import autocast
from stages.modeling.lora import adapted_layers, unwrap_peft
from stages.modeling.packed.forward import chunks_by_length, last_hidden_states, packed_hidden_states
from stages.modeling.packed.sequences import PackedResponses, by_row, pack_responses
from stages.modeling.packed.token_logprobs import selective_log_softmax
from stages.modeling.pretrained import save_adapter, save_adapters, save_model
from stages.reward_modeling.shared_base import RewardAdapter, SharedScorer, add_reward_adapter


class TokenScores(NamedTuple):
    """What a forward pass says of given responses; all [B, R], fp32, 0 outside the mask."""

    log_p: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor


class Policy(nn.Module):
    """A causal model with a LoRA adapter, or one that learns whole, and a linear value head.

    The head starts at 0 ("The N Implementation Details of RLHF with PPO") unless `values_start_from` is called.
    gradient_checkpointing: updates recompute a layer's activations in the backward pass, sampling is not touched.
    compiled: layers are compiled by torch.compile in all forward passes but sampling's.
    """

    def __init__(
        self, model, temperature: float, precision: str, *, gradient_checkpointing: bool = False, compiled: bool = False
    ):
        super().__init__()
        self.model, self.temperature, self.precision = model.eval(), temperature, precision
        _check_head(self.causal, precision)
        self.frozen_copy = None if isinstance(model, PeftModel) else deepcopy(model).requires_grad_(False)
        self.layers = Layers(gradient_checkpointing, compiled)
        self.samples_values = True
        self.value_head = nn.Linear(hidden_size(self.causal), 1, device=model.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @property
    def causal(self) -> nn.Module:
        """The policy's model under its adapters, if it has any."""
        return unwrap_peft(self.model)

    @property
    def base(self) -> nn.Module:
        """The model whose own weights are frozen: reference, and carrier of the other roles' adapters."""
        return self.model if self.frozen_copy is None else self.frozen_copy

    def values_start_from(self, reward: Path) -> None:
        """Give the value function an adapter of its own: a copy of the reward adapter in `reward`, score head and all.

        To be called before an optimiser is made. From then on sampling knows no values: see `with_values`.
        """
        model, head = add_reward_adapter(self.base, reward, VALUE, learns=True)
        self._carry(model)
        self.samples_values = False
        with torch.no_grad():
            self.value_head.weight.copy_(head)

    def scorer(self, reward: Path, forward_prompts: int, role: str = "reward") -> SharedScorer:
        """The reward adapter in `reward` as one more role on the base: its scores cost no second base in memory."""
        role = RewardAdapter(self.base, reward, role)
        self._carry(role.model)
        return SharedScorer(role, self.precision, batch_rows=forward_prompts)

    def trained(self) -> dict[str, nn.Parameter]:
        """Name to parameter, of everything that learns; tied weights once."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def forward(
        self, prompts: list[list[int]], responses: list[list[int]], kept: torch.Tensor | None = None
    ) -> TokenScores:
        """Score the responses under the policy; kept: ids [B, R or more, K] that they were drawn among (Rollout)."""
        texts = pack_responses(prompts, responses, self.model.device)
        hidden = self._states(texts, POLICY)
        log_p = self._log_p(self.causal, hidden, texts, kept)
        values = self._head(hidden if self.samples_values else self._states(texts, VALUE))
        return TokenScores(by_row(log_p, texts), by_row(values, texts), texts.mask)

    @torch.no_grad()
    def reference(
        self, prompts: list[list[int]], responses: list[list[int]], kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Log-probabilities [B, R] under the reference, of the softmax over the same tokens."""
        texts = pack_responses(prompts, responses, self.model.device)
        return by_row(self._log_p(unwrap_peft(self.base), self._states(texts, None), texts, kept), texts)

    def values_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Values [M] fp32 at the policy's hidden states [M, D]; 0 where those do not tell them (see `with_values`)."""
        return self._head(hidden) if self.samples_values else hidden.new_zeros(len(hidden), dtype=torch.float32)

    @torch.no_grad()
    def with_values(self, rollout, forward_prompts: int):
        """The rollout, with values that sampling could not know: those of a value function with an adapter of its own.

        They are those of a forward pass, `forward_prompts` rows at a time.
        """
        if self.samples_values or rollout.values is None:
            return rollout
        rows = list(zip(rollout.prompts, rollout.responses, strict=True))
        values = torch.zeros_like(rollout.values)
        for chunk in chunks_by_length([len(prompt) + len(response) for prompt, response in rows], forward_prompts):
            texts = pack_responses(*zip(*(rows[i] for i in chunk), strict=True), self.model.device)
            found = by_row(self._head(self._states(texts, VALUE)), texts)
            values[chunk, : found.shape[1]] = found.to(values)
        return replace(rollout, values=values)

    @contextmanager
    def only_values(self) -> Iterator[None]:
        """Critic warm-up: what happens here teaches the value function alone, not the policy that it may read."""
        critic = {*self.value_head.parameters(), *parameters_of(self.base, VALUE).values()}
        waiting = [p for p in self.trained().values() if p not in critic]
        for parameter in waiting:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in waiting:
                parameter.requires_grad_(True)

    @contextmanager
    def merged(self) -> Iterator[nn.Module]:
        """The policy as one model without an adapter, for sampling; exact weights come back after it.

        Only in fp32: a coarser sum would be rounded as the update's forward pass, base and adapter apart, is not.
        """
        exact = self.precision == "fp32"
        layers = [layer for layer in adapted_layers(self.model) if exact and POLICY in layer.scaling]
        kept = [layer.get_base_layer().weight.data for layer in layers]
        if not layers:
            yield self.model
            return
        try:
            with torch.no_grad():
                for layer, weight in zip(layers, kept, strict=True):
                    layer.get_base_layer().weight.data = weight + layer.get_delta_weight(POLICY).to(weight)
            with active_adapter(self.model, None):
                yield self.causal
        finally:
            for layer, weight in zip(layers, kept, strict=True):
                layer.get_base_layer().weight.data = weight

    def save(self, out: Path, tokenizer) -> None:
        """Into `out`: the policy (an adapter, or a whole model) with its tokenizer, value_head.safetensors, and in
        value/ the value function's adapter if it has one."""
        if self.frozen_copy is None:
            save_adapter(self.model, tokenizer, out)
        else:
            save_model(self.model, tokenizer, out)
        if not self.samples_values:
            save_adapters(self.base, out, [VALUE])
        head = {name: t.detach().cpu().contiguous() for name, t in self.value_head.state_dict().items()}
        save_file(head, out / "value_head.safetensors")

    def _carry(self, model: nn.Module) -> None:
        """The base, now with another adapter (PEFT makes another object of a model that had none)."""
        if self.frozen_copy is not None:
            self.frozen_copy = model

    def _states(self, texts: PackedResponses, role: str | None) -> torch.Tensor:
        """Hidden states [M, D] that predict each response token."""
        model = self.model if role == POLICY else self.base
        with active_adapter(model, role), self.layers.called(backbone(unwrap_peft(model)), role), autocast(self.precision):
            return packed_hidden_states(unwrap_peft(model), texts.batch, texts.before)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.value_head(hidden.float()).squeeze(-1)

    def _log_p(self, model: nn.Module, hidden: torch.Tensor, texts: PackedResponses, kept: torch.Tensor | None) -> torch.Tensor:
        if kept is not None:
            kept = kept[:, : texts.mask.shape[1]].flatten(0, 1)[texts.place]
        with autocast(self.precision):
            return selective_log_softmax(model.get_output_embeddings(), hidden, texts.chosen, self.temperature, kept)


@torch.no_grad()
def _check_head(model, precision: str) -> None:
    """ValueError unless the logits are the output layer's alone: what is sampled would not be what is scored.

    Some families (Gemma 2, Cohere, Granite) cap or scale them afterwards. No KL to the reference would show it, for
    policy and reference are scored alike.
    """
    ids = torch.arange(2, device=model.device)[None]
    with autocast(precision):
        sampled = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        scored = model.get_output_embeddings()(last_hidden_states(model, ids, torch.ones_like(ids)))
    if not (sampled - scored).abs().max() <= 4 * torch.finfo(scored.dtype).eps * scored.abs().max():
        raise ValueError(
            f"{model.config.model_type} changes its logits after the output layer (it caps or scales them): "
            f"this PPO would score another distribution than the one it samples from"
        )
