"""Checks before the first update of every PPO run: each is a line with its value, or the run stops with the reason.

A PPO that is wired wrongly still runs, and for days: these are the silent faults that users of earlier systems met
most (adapter not fresh, old and new log-probabilities of two functions, no gradient, random heads, EOS mismatched).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import expm1

import torch
from torch import nn

from stages.modeling import families, lora
from stages.modeling.adapters import role_of
from stages.modeling.tokenizer import check_special_tokens
from stages.rl import losses
from stages.rl.checks import logprob_agreement
from stages.rl.policy import Policy
from stages.stackexchange.prompt import adds_bos

WAITING = ("lora_A", "lora_embedding_B")  # what multiplies a factor that starts at 0 has no gradient before it moves


@dataclass(frozen=True)
class Measured:
    """Values of the checks. None: the rollout came without its own log-probabilities or values."""

    eos_id: int
    pad_id: int
    value_head_norm: float
    reward_head_norms: dict[str, float]
    kl_nats: float
    noise_nats: float
    ratio_deviation: float
    rollout_log_p_difference: float | None
    rollout_values_difference: float | None
    keep_rollout_log_p: bool
    smallest_gradient_norm: float


def run_checks(
    policy: Policy,
    rollout,
    tokenizer,
    rewards: dict,
    *,
    clip_range: float,
    microbatch_prompts: int,
    say: Callable[[str], None],
) -> Measured:
    """All checks of a fresh policy on its first rollout, one line each to `say`; ValueError at the first that fails.

    rollout: see agreement.py. rewards: name to (tokenizer, model) of every reward that is a classifier; one with a
    tokenizer of its own reads text, and its ids are its own affair.
    keep_rollout_log_p of the result says whether the update may take the sampler's log_p and values as they are.
    """

    def line(name, value, limit, verdict="ok"):
        say(f"check  {name}  {value}  ({limit})  {verdict}")

    parts = _check_parts(policy, tokenizer, rewards, line)
    numbers = _check_agreement(policy, rollout, clip_range, microbatch_prompts, line)
    rows = slice(microbatch_prompts)
    gradient = smallest_gradient(policy, rollout.prompts[rows], rollout.responses[rows])
    line("gradients", f"smallest norm {gradient:.2g}", "all finite, no matrix's 0")
    return Measured(**parts, **numbers, smallest_gradient_norm=gradient)


def _check_parts(policy: Policy, tokenizer, rewards: dict, line: Callable) -> dict:
    """What can be said without a rollout: special tokens and heads."""
    sharing = {name: model for name, (its_own, model) in rewards.items() if its_own is tokenizer}
    eos_id, pad_id = special_ids(tokenizer, {"policy": policy.model, **sharing})
    line("special tokens", f"EOS {eos_id}, pad {pad_id}", "the same in tokenizers, configs and generation configs")
    value_norm = value_head_norm(policy)
    line("value head", f"norm {value_norm:.3g}", "as wide as the hidden states, finite")
    norms = {name: reward_head_norm(name, model) for name, (_, model) in rewards.items()}
    for name, norm in norms.items():
        line(f"head of {name}", f"norm {norm:.3g}", "one output, finite, not 0")
    return {"eos_id": eos_id, "pad_id": pad_id, "value_head_norm": value_norm, "reward_head_norms": norms}


def _check_agreement(policy: Policy, rollout, clip_range: float, microbatch_prompts: int, line: Callable) -> dict:
    """Forward passes against each other and against the sampler's numbers."""

    def verdict(deviation):
        share = deviation / clip_range
        return "ok" if share <= logprob_agreement.WARN_SHARE else f"WARNING: rounding takes {share:.0%} of the clip range"

    rows = torch.arange(len(rollout.prompts)).split(microbatch_prompts)
    log_p, values = logprob_agreement.forwarded(policy, rollout, rows)[:2]
    kl = logprob_agreement.reference_kl(policy, rollout, log_p, rows)
    line("KL to the reference", f"{kl:.2g}", f"limit {logprob_agreement.KL_LIMIT_NATS:g} nats a response")
    noise, mean_noise = logprob_agreement.noise_floor(policy, rollout, microbatch_prompts, clip_range)
    line("noise over batch compositions", f"{noise:.2g} nats", f"limit: clip {clip_range:g}", verdict(expm1(noise)))
    deviation = logprob_agreement.ratio_deviation(policy, rollout, log_p, microbatch_prompts, mean_noise, clip_range)
    line("ratio of new to old", f"1 within {deviation:.2g}", "in the first epoch, nothing learnt", verdict(deviation))
    apart = logprob_agreement.rollout_differences(rollout, log_p, values)
    keep = logprob_agreement.may_keep(apart, values, clip_range)
    shown = "not given" if None in apart else f"{apart[0]:.2g} in log_p, {apart[1]:.2g} in values"
    limit = f"limit {logprob_agreement.KEPT_SHARE * clip_range:g}"
    line("rollout against a forward", shown, limit, "kept" if keep else "re-forwarded")
    return {
        "kl_nats": kl,
        "noise_nats": noise,
        "ratio_deviation": deviation,
        "rollout_log_p_difference": apart[0],
        "rollout_values_difference": apart[1],
        "keep_rollout_log_p": keep,
    }


def special_ids(tokenizer, readers: dict[str, nn.Module]) -> tuple[int, int]:
    """The tokenizer's (EOS, pad) ids; ValueError unless every named model that reads its ids agrees with it.

    Config and generation config must know its EOS, and its BOS where it writes one; the EOS must be an id the model
    has (the published script's 100,000 was not: no answer could end); pad is not EOS.
    """
    eos, pad, bos = tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id
    if eos == pad:
        raise ValueError(f"pad and EOS are both id {eos}: ends would be masked as padding; give the tokenizer a pad "
                         f"token of its own")
    for name, model in readers.items():
        for config in filter(None, (model.config, getattr(model, "generation_config", None))):
            place = f"{name}, {type(config).__name__}"
            try:
                check_special_tokens(tokenizer, config)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
            if adds_bos(tokenizer) and config.bos_token_id not in (None, bos):
                raise ValueError(f"{place}: the tokenizer begins texts with id {bos}, this config with "
                                 f"{config.bos_token_id}: correct the config or the tokenizer of the base")
        if eos >= model.config.vocab_size:
            raise ValueError(f"{name}: EOS is id {eos}, but the model has only {model.config.vocab_size}: no answer "
                             f"could end; make the tokenizer's eos_token one that the model knows")
    return eos, pad


def value_head_norm(policy: Policy) -> float:
    """Norm of the value head; ValueError unless it reads the policy's states and is finite."""
    weight, states = policy.value_head.weight, families.hidden_size(policy.causal)
    if tuple(weight.shape) != (1, states) or not weight.isfinite().all():
        finite = "finite" if weight.isfinite().all() else "not finite"
        raise ValueError(f"the value head is {list(weight.shape)} and {finite}, but must be [1, {states}] and finite: "
                         f"make it anew")
    return float(weight.detach().norm())


def reward_head_norm(name: str, model: nn.Module) -> float:
    """Norm of a classifier's head: what lies outside its trunk. ValueError unless it gives one finite number.

    A head left at its random initial values cannot be told from a trained one by its numbers: it is refused where it
    would be made, when loading (models.load_scorer).
    """
    inner = lora.unwrap_peft(model)
    head = {n: p for n, p in inner.named_parameters()
            if not n.startswith(f"{inner.base_model_prefix}.") and ".original_module." not in n}
    matrices = [p for p in head.values() if p.dim() == 2]
    if not matrices or matrices[-1].shape[0] != 1:
        raise ValueError(f"{name}: a {type(inner).__name__} has no head with one output: it cannot score an answer")
    norm = float(torch.cat([p.detach().float().flatten() for p in head.values()]).norm())
    if not 0 < norm < float("inf"):
        raise ValueError(f"{name}: the norm of its head is {norm}: its scores would say nothing; make the model anew")
    return norm


def smallest_gradient(policy: Policy, prompts: list[list[int]], responses: list[list[int]]) -> float:
    """Smallest norm of a gradient that may not be 0; ValueError naming the tensors that learn nothing.

    One backward of mean(values - log_p). Every trained tensor must get a finite gradient, every matrix a non-zero one,
    except those in WAITING. Re-entrant gradient checkpointing and quantised weights that are repacked stop gradients
    without a word. Parameters and their .grad are left as they are, hooks of an optimizer in the backward too.
    """
    trained = policy.trained()
    adapters = {role_of(name) for name in trained} - {None}
    frozen = [name for name, p in policy.named_parameters() if role_of(name) in adapters and name not in trained]
    if frozen or all(name.startswith("value_head") for name in trained):
        raise ValueError(f"of the adapter, {_some(frozen) or 'every tensor'} is frozen: let it require gradients")
    with torch.enable_grad():
        scored = policy(prompts, responses)
        loss = losses.masked_mean(scored.values - scored.log_p, scored.mask)
    gradients = dict(zip(trained, torch.autograd.grad(loss, list(trained.values()), allow_unused=True), strict=True))
    norms = {name: float("nan") if g is None else float(g.float().norm()) for name, g in gradients.items()}
    moving = [name for name, p in trained.items() if p.dim() == 2 and not any(part in name for part in WAITING)]
    stuck = [name for name, norm in norms.items() if not norm < float("inf") or (norm == 0 and name in moving)]
    if stuck:
        raise ValueError(f"{len(stuck)} of {len(trained)} trained tensors get no finite, non-zero gradient: "
                         f"{_some(stuck)}; checkpointing must be non-reentrant, and no quantised weight repacked")
    return min(norms[name] for name in moving)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
