"""A causal model with ILQL's heads, as one module that the trainer trains and saves."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stages.modeling.families import backbone, hidden_size
from stages.modeling.load import autocast
from stages.modeling.lora import unwrap_peft
from stages.modeling.merging.checks import probe_ids
from stages.modeling.output_layer import output_layer
from stages.modeling.packed.forward import packed_hidden_states, uses_cpu_kernels
from stages.modeling.packed.sequences import pack_responses
from stages.modeling.packed.token_logprobs import selective_log_softmax
from stages.modeling.q_heads.shifted_output import shift_output
from stages.offline_rl.dataset import ScoredAnswer
from stages.offline_rl.heads import TARGET, ILQLHeads
from stages.offline_rl.losses import TokenValues, final_rewards, shift_to_next
from stages.training.partial_state import PartialState


class ILQLModel(PartialState):
    """A causal model, whole or with an adapter, and heads on its last hidden state; gradients of all reach the model.

    A checkpoint holds what is trained and the targets.
    """

    def __init__(self, model, q_heads: int, precision: str):
        super().__init__()
        self.model, self.precision = model, precision
        vocabulary_tokens = self.causal_model.get_output_embeddings().out_features
        self.heads = ILQLHeads(hidden_size(self.causal_model), vocabulary_tokens, q_heads, model.device)

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
            logprobs = selective_log_softmax(output_layer(inner), states, packed.token_ids, 1.0,
                                             cpu_kernels=uses_cpu_kernels(inner))
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
