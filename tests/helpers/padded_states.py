"""The backbone's states of padded rows, as Transformers computes them: what packed batches are compared with."""

import torch
from transformers import PreTrainedModel

from stages.modeling.families import backbone


def compute_position_ids(attention_mask: torch.Tensor) -> torch.Tensor:
    """Count the real tokens before each token, [rows, length]: positions that do not depend on the padding."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def last_hidden_states(model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Compute the backbone's last hidden states, [rows, length, width], of rows padded on either side."""
    position_ids = compute_position_ids(attention_mask)
    states = backbone(model)(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)
    return states.last_hidden_state
