"""ILQL's heads on the last hidden state: Q heads with slowly moving copies (targets), and a V head.

As in trlX, each is a perceptron with one hidden layer of twice the model's hidden size. Computed in fp32, or as
autocast says. Shapes: M states, D hidden size, H Q heads, V vocabulary.
"""

from copy import deepcopy

import torch
from torch import nn
from torch.nn import functional

from stages.modeling.packed.token_logprobs import selective_log_softmax
from stages.modeling.q_heads.files import QHeads

TARGET = "target_q_heads."


class Head(nn.Module):
    """A perceptron D -> 2 D -> outputs."""

    def __init__(self, hidden_size: int, outputs: int, device: torch.device):
        super().__init__()
        self.hidden = nn.Linear(hidden_size, 2 * hidden_size, device=device, dtype=torch.float32)
        self.out = nn.Linear(2 * hidden_size, outputs, device=device, dtype=torch.float32)

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """Compute the hidden layer's activations [M, 2 D]."""
        return functional.relu(self.hidden(states))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.out(self.features(states))

    def at(self, features: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Compute the outputs at `token_ids` [M] only: [M], fp32."""
        return (features.float() * self.out.weight[token_ids]).sum(-1) + self.out.bias[token_ids]


class ILQLHeads(nn.Module):
    """The Q heads, their targets, which have no gradients, and the V head."""

    def __init__(self, hidden_size: int, vocabulary_tokens: int, q_heads: int, device: torch.device):
        super().__init__()
        self.q_heads = nn.ModuleList(Head(hidden_size, vocabulary_tokens, device) for _ in range(q_heads))
        self.v_head = Head(hidden_size, 1, device)
        self.target_q_heads = deepcopy(self.q_heads).requires_grad_(False)

    def forward(self, states: torch.Tensor, token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute Q of the actions, their log softmax, and Q by the targets, each [H, M], and V [M], all fp32."""
        states = states.float()
        features = [head.features(states) for head in self.q_heads]
        pairs = list(zip(self.q_heads, features, strict=True))
        return {
            "q_values": torch.stack([head.at(each, token_ids) for head, each in pairs]),
            "q_logprobs": torch.stack([selective_log_softmax(head.out, each, token_ids, 1.0) for head, each in pairs]),
            "target_q_values": self.target_q_values(states, token_ids),
            "values": self.v_head(states).squeeze(-1).float(),
        }

    @torch.no_grad()
    def target_q_values(self, states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Compute Q [H, M] of the actions by the targets."""
        return torch.stack([head.at(head.features(states), token_ids) for head in self.target_q_heads])

    @torch.no_grad()
    def synchronise_targets(self, alpha: float) -> None:
        """Move the targets towards the Q heads: target = alpha Q + (1 - alpha) target (Polyak averaging)."""
        for target, current in zip(self.target_q_heads.parameters(), self.q_heads.parameters(), strict=True):
            target.copy_(alpha * current + (1 - alpha) * target)

    def sampling_heads(self, beta: float) -> QHeads:
        """Return what sampling reads: the targets, as in trlX. They share the memory of these."""
        return QHeads({name: p.detach() for name, p in self.target_q_heads.named_parameters()}, beta)

    def other_tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters that only training reads, by name."""
        return {name: p.detach() for name, p in self.named_parameters() if not name.startswith(TARGET)}
