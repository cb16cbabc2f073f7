"""Golden values of torchtune 0.6.1's rlhf functions and PPOLoss, in float64.

Run in an environment of its own (README.md). What stands after the end of a response is what torchtune's recipe puts
there: log-probabilities of 1, values of 0. The score is put at the last response token; the recipe itself puts it one
further (`value_seq_idxs`), as trl 1.x does: see trl_1_12.py.
"""

import common
import torch
from torchtune import rlhf
from torchtune.rlhf.loss import PPOLoss

S = common.SETTINGS


def losses(x: dict, advantages: torch.Tensor, returns: torch.Tensor) -> dict:
    """PPOLoss and the gradients of its total."""
    log_p, values = x["new_log_p"].clone().requires_grad_(), x["new_values"].clone().requires_grad_()
    loss = PPOLoss(epsilon=S["clip"], value_clip_range=S["value_clip"], value_coeff=S["value_coefficient"])
    keep = x["mask"].bool()
    total, policy, value, ratio, clip_fraction = loss(
        x["log_p"], log_p, advantages, x["values"], values, returns, padding_masks=keep, value_padding_masks=keep
    )
    total.backward()
    return {
        "total": total.detach(),
        "policy": policy,
        "value": value,
        "ratio": ratio,
        "clip_fraction": clip_fraction,
        "policy_gradient": log_p.grad,
        "value_gradient": values.grad,
    }


def masked(x: dict) -> dict:
    values, keep = x["values"], x["mask"].bool()
    centred = values - rlhf.masked_mean(values, keep)
    return {
        "mean": rlhf.masked_mean(values, keep),
        "variance": rlhf.masked_var(centred, keep),
        "variance_biased": rlhf.masked_var(centred, keep, unbiased=False),
        "whitened": rlhf.whiten(values, keep, shift_mean=False),
    }


def forward() -> dict:
    """Log-probabilities at a temperature, of right-padded responses after one fixed token."""
    language = common.language()
    table = torch.tensor(language["table"])
    pairs = zip(language["prompts"], language["responses"], strict=True)
    before = [[prompt[-1], *response[:-1]] for prompt, response in pairs]
    actual = []
    for last, response in zip(before, language["responses"], strict=True):
        logits = table[torch.tensor(last)][None]
        actual.append(rlhf.logits_to_logprobs(logits, torch.tensor([response]), S["temperature"])[0].tolist())
    return language | {"log_p": actual}


def main() -> None:
    drawn = common.inputs()
    x = {name: torch.tensor(value, dtype=torch.float64) for name, value in drawn.items()}
    keep = x["mask"].bool()
    for name in ("log_p", "log_ref", "new_log_p"):
        x[name] = torch.where(keep, x[name], 1.0)
    for name in ("values", "new_values"):
        x[name] = torch.where(keep, x[name], 0.0)
    last = x["mask"].sum(-1).long() - 1
    rewards, kl, kl_rewards = rlhf.get_rewards_ppo(x["scores"], x["log_p"], x["log_ref"], S["beta"], last)
    advantages, returns = rlhf.estimate_advantages(x["values"], rewards, S["gamma"], S["lam"], masks=keep.clone())
    unwhitened = returns - x["values"]
    mean = rlhf.masked_mean(unwhitened, keep)
    content = {
        "settings": S,
        "inputs": drawn,
        "rewards": {"rewards": rewards, "non_score": kl_rewards, "kl": kl},
        "advantages": {
            "advantages": advantages,
            "returns": returns,
            "mean": mean,
            "variance": rlhf.masked_var(unwhitened - mean, keep),
            "variance_biased": rlhf.masked_var(unwhitened - mean, keep, unbiased=False),
        },
        "loss": losses(x, advantages, returns),
        "masked": masked(x),
        "forward": forward(),
    }
    common.write(__file__, ("torchtune", "torchao", "torch", "numpy"), content)


if __name__ == "__main__":
    main()
