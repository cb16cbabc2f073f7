"""Golden values of trl 0.11.4's PPOTrainer and core: its own methods, on a trainer that was never initialised.

Run in an environment of its own (README.md). Everything in float64.
"""

import warnings

import common
import torch
from trl import PPOConfig, PPOTrainer, core
from trl.trainer.utils import AdaptiveKLController

warnings.filterwarnings("ignore")
S = common.SETTINGS
CONTROLLER = {"initial": 0.2, "target": 6.0, "horizon": 1000, "responses": 64}


def trainer() -> PPOTrainer:
    """With the attributes that the numeric methods read, and nothing else."""
    made = object.__new__(PPOTrainer)
    made.config = PPOConfig(
        gamma=S["gamma"],
        lam=S["lam"],
        cliprange=S["clip"],
        cliprange_value=S["value_clip"],
        vf_coef=S["value_coefficient"],
        batch_size=8,
        mini_batch_size=4,
        gradient_accumulation_steps=1,
    )
    made.kl_ctl = AdaptiveKLController(S["beta"], CONTROLLER["target"], CONTROLLER["horizon"])
    made.is_encoder_decoder = False
    return made


def tensors(drawn: dict) -> dict:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in drawn.items()}


def losses(ppo: PPOTrainer, x: dict, advantages: torch.Tensor, returns: torch.Tensor) -> dict:
    """PPOTrainer.loss, its statistics, and the gradients of its two parts."""
    log_p, values = x["new_log_p"].clone().requires_grad_(), x["new_values"].clone().requires_grad_()
    logits = torch.zeros(*log_p.shape, common.VOCABULARY, dtype=torch.float64)
    policy, value, stats = ppo.loss(x["log_p"], x["values"], logits, values, log_p, x["mask"], advantages, returns)
    stats.pop("policy/advantages")
    (policy_gradient,) = torch.autograd.grad(policy, [log_p])
    (value_gradient,) = torch.autograd.grad(value, [values])
    return stats | {"policy_gradient": policy_gradient, "value_gradient": value_gradient}


def objective(ppo: PPOTrainer, x: dict, kls, non_score, advantages, returns) -> dict:
    """record_step_stats of an update that has not moved: the KL of a response and the explained variance."""
    logits = torch.zeros(*kls.shape, common.VOCABULARY, dtype=torch.float64)
    *_, stats = ppo.loss(x["log_p"], x["values"], logits, x["values"], x["log_p"], x["mask"], advantages, returns)
    train = {name: torch.stack([value]) for name, value in stats.items()}
    recorded = ppo.record_step_stats(
        kl_coef=S["beta"],
        masks=x["mask"],
        kls=kls,
        logprobs=x["log_p"],
        ref_logprobs=x["log_ref"],
        non_score_reward=non_score,
        scores=x["scores"],
        train_stats=train,
        queries=[[0]] * len(kls),
        responses=[[0] * n for n in common.LENGTHS],
    )
    keys = ("objective/kl", "objective/kl_dist", "ppo/val/var_explained", "ppo/val/error", "ppo/returns/var")
    return {name: recorded[name] for name in keys}


def masked(x: dict) -> dict:
    values, mask = x["values"], x["mask"]
    return {
        "mean": core.masked_mean(values, mask),
        "variance": core.masked_var(values, mask),
        "variance_biased": core.masked_var(values, mask, unbiased=False),
        "whitened": core.masked_whiten(values, mask),
        "whitened_keeping_mean": core.masked_whiten(values, mask, shift_mean=False),
    }


def penalties(ppo: PPOTrainer, x: dict) -> dict:
    """The KL penalty's other forms, by trl's names."""
    actual = {}
    for ppo.config.kl_penalty in ("abs", "mse"):
        actual[ppo.config.kl_penalty] = ppo.compute_rewards(x["scores"], x["log_p"], x["log_ref"], x["mask"])[0]
    return actual


def controller() -> dict:
    """Twelve batches, below, at and above the target."""
    kls = [0.0, 3.0, 5.9, 6.0, 6.1, 7.0, 7.2, 9.0, 40.0, -2.0, 6.6, 4.5]
    made, betas = AdaptiveKLController(CONTROLLER["initial"], CONTROLLER["target"], CONTROLLER["horizon"]), []
    for kl in kls:
        made.update(kl, CONTROLLER["responses"])
        betas.append(float(made.value))
    return CONTROLLER | {"kls": kls, "betas": betas}


class Bigram:
    """In place of a model with a value head: (logits, loss, values) of the last token only."""

    def __init__(self, language: dict):
        self.table, self.weights = (torch.tensor(language[k]) for k in ("table", "value_weights"))

    def eval(self):
        return self

    def __call__(self, input_ids, attention_mask):
        logits = self.table[input_ids]
        return logits, None, logits @ self.weights


def forward(ppo: PPOTrainer) -> dict:
    """batched_forward_pass over left-padded rows: log-probabilities, values and entropies of the response tokens."""
    language = common.language()
    rows = [p + r for p, r in zip(language["prompts"], language["responses"], strict=True)]
    longest = max(map(len, rows))
    model_inputs = {
        "input_ids": torch.tensor([[0] * (longest - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
    }
    log_p, logits, values, masks = ppo.batched_forward_pass(
        Bigram(language), language["prompts"], language["responses"], model_inputs, return_logits=True
    )
    entropy = core.entropy_from_logits(logits)
    actual = {"log_p": log_p, "values": values, "entropy": entropy}
    return language | {
        name: [row[keep.bool()].tolist() for row, keep in zip(value, masks, strict=True)]
        for name, value in actual.items()
    }


def main() -> None:
    drawn, ppo = common.inputs(), trainer()
    x = tensors(drawn)
    rewards, non_score, kls = ppo.compute_rewards(x["scores"], x["log_p"], x["log_ref"], x["mask"])
    values, advantages, returns = ppo.compute_advantages(x["values"], rewards, x["mask"])
    unwhitened = returns - values
    content = {
        "settings": S,
        "inputs": drawn,
        "rewards": {"rewards": rewards, "non_score": non_score, "kl": kls},
        "advantages": {
            "advantages": advantages,
            "returns": returns,
            "variance": core.masked_var(unwhitened, x["mask"]),
            "variance_biased": core.masked_var(unwhitened, x["mask"], unbiased=False),
        },
        "loss": losses(ppo, x, advantages, returns),
        "objective": objective(ppo, x, kls, non_score, advantages, returns),
        "masked": masked(x),
        "controller": controller(),
        "penalties": penalties(ppo, x),
        "forward": forward(ppo),
    }
    common.write(__file__, ("trl", "transformers", "torch", "numpy"), content)


if __name__ == "__main__":
    main()
