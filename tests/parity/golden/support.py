"""Golden values of the peers, and a policy with given log-probabilities and values."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from stages.generation.rollout import Rollout
from stages.modeling.lora import add_lora
from stages.recipe.recipe import select_settings
from stages.recipe.sections.ppo import Ppo
from stages.rl.policy import ROLES, Policy, TokenScores
from stages.rl.policy_gradient_trainer import UpdateSettings
from stages.rl.trajectory import Trajectory
from tests.helpers.trajectories import build_trajectory

EPS = 1e-8  # under the root of every whitening here
FOLDER = Path(__file__).parent
TRL, TUNE, TRL_1_12, UPDATES = (
    json.loads((FOLDER / f"{name}.json").read_text())
    for name in ("trl_0_11", "torchtune_0_6", "trl_1_12", "trl_0_11_update")
)
SETTINGS = TRL["settings"]


def tensors(section: dict) -> dict[str, torch.Tensor]:
    """Numbers of a section as float64, masks as 1.0 and 0.0."""
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in section.items()}


def same(computed, expected, rel: float = 1e-9, mask=None) -> None:
    """Equal to `rel`, everywhere or where `mask` is 1."""
    computed, expected = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (computed, expected))
    keep = ... if mask is None else mask.bool()
    torch.testing.assert_close(computed[keep], expected[keep], rtol=rel, atol=1e-12)


def golden_settings(**changes) -> UpdateSettings:
    """Return the settings of the golden values: one epoch over all rows, no limits; the rest as in the recipe."""
    recipe = Ppo()
    numbers = select_settings(UpdateSettings, recipe) | {
        "epochs": 1,
        "minibatch_prompts": 8,
        "microbatch_prompts": 8,
        "clip_range": SETTINGS["clip"],
        "value_clip_range": SETTINGS["value_clip"],
        "value_coefficient": SETTINGS["value_coefficient"],
        "max_gradient_norm": 1e9,
        "max_ratio": 1e9,
        "update_kl_limit": None,
    }
    return UpdateSettings(**(numbers | changes))


def golden_trajectory(policy, rollout: Rollout, rewards: torch.Tensor, **conventions) -> Trajectory:
    """Build a trajectory with the settings of the golden values, in float64."""
    with float64():
        return build_trajectory(
            policy, rollout, rewards,
            **{"beta": SETTINGS["beta"], "gamma": SETTINGS["gamma"], "gae_lambda": SETTINGS["lam"]} | conventions)


@contextmanager
def float64() -> Iterator[None]:
    """Use the dtype of the golden values as the default one."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class GivenPolicy(nn.Module):
    """A policy whose log-probabilities and values are its parameters; a prompt is the index of its row."""

    share_prompts = False

    def __init__(self, logprobs, values, mask, ref_logprobs=None):
        super().__init__()
        self.logprobs, self.values = nn.Parameter(logprobs.clone()), nn.Parameter(values.clone())
        self.mask, self.given_ref_logprobs = mask, ref_logprobs
        self.model = SimpleNamespace(device=mask.device)

    def separate_roles(self):
        return [ROLES]

    def parameters_of(self, roles):
        return [self.logprobs, self.values]

    def forward(self, prompts, responses, roles=ROLES) -> TokenScores:
        rows, width = self._rows(prompts, responses)
        logprobs, values, mask = (x[rows, :width] for x in (self.logprobs, self.values, self.mask))
        return TokenScores(logprobs, values, mask)

    def ref_logprobs(self, prompts, responses):
        rows, width = self._rows(prompts, responses)
        return self.given_ref_logprobs[rows, :width]

    @staticmethod
    def _rows(prompts, responses):
        return [prompt[0] for prompt in prompts], max(map(len, responses))


def rows_of(mask) -> dict:
    return {"prompts": [[row] for row in range(len(mask))], "responses": [[0] * int(n) for n in mask.sum(-1)]}


def unbiased_to_biased(section: dict) -> float:
    """The peers whiten by the unbiased variance, we by the biased one (CORRECTNESS A5): factor from theirs to ours."""
    return ((section["variance"] + EPS) / (section["variance_biased"] + EPS)) ** 0.5


def bigram_policy(table, value_weights=None, temperature: float = 1.0) -> Policy:
    """Our Policy on a LLaMA whose logits after a token are its row of the table [V, V]; its value, row times weights.

    The embedding is one-hot, the layer adds nothing, and the output layer holds the table; sqrt(V) undoes the norm.
    """
    table = torch.tensor(table, dtype=torch.float64)
    size, root = len(table), len(table) ** 0.5
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=2,
        num_hidden_layers=1,
        num_attention_heads=1,
        head_dim=2,
        rms_norm_eps=1e-12,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(root * torch.eye(size))
        model.lm_head.weight.copy_(table.T / root)
        for silent in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj):
            silent.weight.zero_()
        model = add_lora(model, r=1, alpha=1, dropout=0.0, target_modules=("q_proj",), precision="fp32")
        policy = Policy(model, temperature, "fp32")
        if value_weights is not None:
            policy.value_head.weight.copy_(table @ torch.tensor(value_weights, dtype=torch.float64) / root)
    return policy
