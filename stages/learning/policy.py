"""The policy: one frozen base; the adapter is the policy, the base without it the reference; a value head on top.

Dropout is off throughout: old, new and reference log-probabilities must come from the same function.
Shapes: B rows, T tokens of prompt and response, R response tokens, V vocabulary, D width.
"""

from typing import NamedTuple

import torch
from torch import nn

from stages.learning.families import width
from stages.learning.models import autocast, batched, last_hidden_states


class Scored(NamedTuple):
    """What a forward pass says of given responses; all [B, R], fp32."""

    log_p: torch.Tensor
    values: torch.Tensor
    entropy: torch.Tensor
    mask: torch.Tensor


class Policy(nn.Module):
    """A causal model with a LoRA adapter, and a linear value head that starts at 0 (N implementation details).

    The value head reads the policy's own last hidden state, and its gradient flows into the adapter, as in TRL's
    AutoModelForCausalLMWithValueHead.
    """

    def __init__(self, model, temperature: float, precision: str):
        super().__init__()
        self.model, self.temperature, self.precision = model.eval(), temperature, precision
        _check_head(model.get_base_model(), precision)
        self.value_head = nn.Linear(width(model.get_base_model()), 1, device=model.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def trained(self) -> dict[str, nn.Parameter]:
        """Name to parameter, of everything that learns."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def forward(self, prompts: list[list[int]], responses: list[list[int]]) -> Scored:
        """Score the responses under the policy."""
        hidden, chosen, mask = self._response_states(prompts, responses)
        log_p, entropy = self._log_probabilities(hidden, chosen)
        return Scored(log_p, self.value_head(hidden.float()).squeeze(-1), entropy, mask)

    @torch.no_grad()
    def reference(self, prompts: list[list[int]], responses: list[list[int]]) -> torch.Tensor:
        """Log-probabilities [B, R] under the reference: the same base with the adapter off."""
        with self.model.disable_adapter():
            hidden, chosen, _ = self._response_states(prompts, responses)
            return self._log_probabilities(hidden, chosen)[0]

    def _response_states(self, prompts, responses) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states [B, R, D] that predict each response token, the tokens [B, R], and their mask."""
        rows = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        input_ids, keep_mask = batched(rows, where=self.model.device)
        chosen, mask = batched(responses, where=self.model.device)
        first = torch.tensor([len(prompt) - 1 for prompt in prompts], device=chosen.device)
        place = first[:, None] + torch.arange(chosen.shape[1], device=chosen.device)
        place = torch.where(mask.bool(), place, 0)
        with autocast(self.precision):
            states = last_hidden_states(self.model.get_base_model(), input_ids, keep_mask)
        return states.gather(1, place[..., None].expand(-1, -1, states.shape[-1])), chosen, mask.float()

    def _log_probabilities(self, hidden: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of the chosen tokens and, without gradient, the entropy; logits of the response only."""
        with autocast(self.precision):
            logits = self.model.get_base_model().get_output_embeddings()(hidden)
        scores = torch.log_softmax(logits.float() / self.temperature, dim=-1)
        log_p = scores.gather(-1, chosen[..., None]).squeeze(-1)
        with torch.no_grad():
            entropy = -(scores.exp() * scores).sum(-1)
        return log_p, entropy


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
