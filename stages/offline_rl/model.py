"""A causal model with ILQL's heads, as one module that the trainer trains and saves.

The heads on the last hidden state are Q heads with slowly moving copies (targets), and a V head. As in trlX, each is a
perceptron with one hidden layer of twice the model's hidden size. They are computed in fp32, or as autocast says.
Shapes: M states, D hidden size, H Q heads, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import nn
from torch.nn import functional

from stages.modeling.families import backbone, hidden_size
from stages.modeling.load import autocast
from stages.modeling.lora import unwrap_peft
from stages.modeling.merging.checks import probe_ids
from stages.modeling.packed.forward import packed_hidden_states
from stages.modeling.packed.sequences import pack_responses
from stages.modeling.packed.token_logprobs import logprobs_from_hidden, selective_log_softmax
from stages.modeling.q_heads import QHeads, shift_output
from stages.offline_rl.dataset import ScoredAnswer
from stages.offline_rl.losses import TokenValues, final_rewards, shift_to_next
from stages.training.step_trainer import PartialState

TARGET = "target_q_heads."
Q_HEADS = 2  # H: the smaller Q of an action counts


class Head(nn.Module):
    """A perceptron D -> 2 D -> outputs."""

    def __init__(self, hidden_size: int, outputs: int):
        super().__init__()
        self.hidden = nn.Linear(hidden_size, 2 * hidden_size, dtype=torch.float32)
        self.out = nn.Linear(2 * hidden_size, outputs, dtype=torch.float32)

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

    def __init__(self, hidden_size: int, vocabulary_tokens: int):
        super().__init__()
        self.q_heads = nn.ModuleList(Head(hidden_size, vocabulary_tokens) for _ in range(Q_HEADS))
        self.v_head = Head(hidden_size, 1)
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


class ILQLModel(PartialState):
    """A causal model, whole or with an adapter, and heads on its last hidden state; gradients of all reach the model.

    A checkpoint holds what is trained and the targets.
    """

    def __init__(self, model, precision: str):
        super().__init__()
        self.model, self.precision = model, precision
        vocabulary_tokens = self.causal_model.get_output_embeddings().out_features
        # Drawn on the CPU: a GPU's generator would draw other weights.
        self.heads = ILQLHeads(hidden_size(self.causal_model), vocabulary_tokens).to(model.device)

    @property
    def causal_model(self):
        """Return the model without its PEFT wrapper."""
        return unwrap_peft(self.model)

    def is_updated(self, name: str) -> bool:
        return name.startswith(f"heads.{TARGET}")

    def forward(self, rows: list[ScoredAnswer]) -> TokenValues:
        """Compute what the losses need of the answers' tokens, row by row."""
        lengths = [len(row.answer) for row in rows]
        packed = pack_responses([row.prompt for row in rows], [row.answer for row in rows], self.model.device)
        inner = self.causal_model
        with autocast(self.precision):
            states = packed_hidden_states(inner, packed.batch, packed.predictor_positions)
            logprobs = logprobs_from_hidden(inner, states, packed.token_ids)
            outputs = self.heads(states, packed.token_ids)
        rewards = final_rewards([row.reward for row in rows], lengths, self.model.device)
        return TokenValues(logprobs=logprobs, next_values=shift_to_next(outputs["values"], lengths), rewards=rewards,
                           **outputs)

    @contextmanager
    def shifted(self, beta: float) -> Iterator[None]:
        """Make the model the policy with shifted logits inside the context."""
        inner = self.causal_model
        layer = shift_output(inner, self.heads.sampling_heads(beta))
        try:
            yield
        finally:
            inner.set_output_embeddings(layer)

    @torch.no_grad()
    def check_shift(self) -> str:
        """Describe how the shifted policy at beta 0 differs from the model's own logits.

        Raises ValueError if it does: some families cap or scale their logits after the output layer (Gemma 2, Cohere,
        Granite), and the shift would be capped or scaled with them.
        """
        inner = self.causal_model
        ids = probe_ids(inner.config.vocab_size)[:1].to(self.model.device)
        mask = torch.ones_like(ids)
        with autocast(self.precision):
            own = inner(input_ids=ids, attention_mask=mask).logits
            states = backbone(inner)(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            with self.shifted(0.0):
                shifted = inner.get_output_embeddings()(states)
        difference = float((own - shifted).abs().max())
        limit = 4 * torch.finfo(shifted.dtype).eps * float(shifted.abs().max())
        if not difference <= limit:
            raise ValueError(f"{inner.config.model_type} changes its logits after the output layer (it caps or scales "
                             f"them): ilql cannot shift them")
        return f"the policy at beta 0  differs by {difference:.2g} from the model  (limit {limit:.2g})  ok"
