"""Run the checks before the first update of a PPO run: each prints its value, or stops the run with the reason.

PPO with a wiring error still runs, for days. These checks cover the silent faults that users of other PPO systems met
most: an adapter that is not fresh, old and new log-probabilities from two functions, missing gradients, random heads,
and EOS ids that disagree.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import expm1
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from stages.distributed import group, sharding
from stages.generation.rollout import Rollout
from stages.modeling import families, lora
from stages.modeling.adapters import adapter_name
from stages.modeling.tokenizer import check_special_tokens
from stages.rl.checks import logprob_agreement
from stages.rl.losses import masked_mean
from stages.rl.policy import Policy, TokenScores
from stages.stackexchange.prompt import adds_bos

ZERO_AT_START = ("lora_A", "lora_embedding_B")  # their gradient is 0 until the other factor, which starts at 0, moves


@dataclass(frozen=True)
class StartupReport:
    """Results of the checks, under the names of startup.json.

    value_head_norm: None without a critic. rollout_*_difference: None if the rollout has no log-probabilities or
    values. keep_rollout_log_p: whether the update may reuse those of the sampler.
    """

    eos_id: int
    pad_id: int
    value_head_norm: float | None
    reward_head_norms: dict[str, float]
    kl_nats: float
    noise_nats: float
    ratio_deviation: float
    rollout_log_p_difference: float | None
    rollout_values_difference: float | None
    keep_rollout_log_p: bool
    smallest_gradient_norm: float


class Agreement(NamedTuple):
    """What forward passes without gradients gave: old log-probabilities [N], the mean noise, fields of the report."""

    old_logprobs: torch.Tensor
    mean_noise: float
    report: dict


def run_checks(
    policy: Policy, rollout: Rollout, tokenizer, classifiers: dict[str, tuple], *, clip_range: float,
    microbatch_prompts: int, say: Callable[[str], None],
) -> StartupReport:
    """Check an untrained policy on its first rollout, one line per check to `say`; raise ValueError at the first fault.

    classifiers: name to (tokenizer, model) of each reward model. One with another tokenizer than the policy's reads
    text, so its special ids need not agree.
    """

    def line(name, value, limit, verdict="ok"):
        say(f"check  {name}  {value}  ({limit})  {verdict}")

    parts = _check_parts(policy, tokenizer, classifiers, line)
    agreement = _check_agreement(policy, rollout, clip_range, microbatch_prompts, line)
    update = _check_update(policy, rollout, clip_range, microbatch_prompts, agreement, line)
    return StartupReport(**parts, **agreement.report, **update)


def _check_parts(policy: Policy, tokenizer, classifiers: dict[str, tuple], line: Callable) -> dict:
    """Check what needs no rollout: special tokens and heads."""
    same_tokenizer = {name: model for name, (its_tokenizer, model) in classifiers.items() if its_tokenizer is tokenizer}
    eos_id, pad_id = check_special_ids(tokenizer, {"policy": policy.model, **same_tokenizer})
    line("special tokens", f"EOS {eos_id}, pad {pad_id}", "the same in tokenizers, configs and generation configs")
    value_norm = check_value_head(policy) if policy.has_critic else None
    if value_norm is not None:
        line("value head", f"norm {value_norm:.3g}", "as wide as the hidden states, finite")
    norms = {name: check_reward_head(name, model) for name, (_, model) in classifiers.items()}
    for name, norm in norms.items():
        line(f"head of {name}", f"norm {norm:.3g}", "one output, finite, not 0")
    return {"eos_id": eos_id, "pad_id": pad_id, "value_head_norm": value_norm, "reward_head_norms": norms}


def _check_agreement(
    policy: Policy, rollout: Rollout, clip_range: float, microbatch_prompts: int, line: Callable
) -> Agreement:
    """Compare forward passes without gradients with each other and with the sampler's numbers."""
    rows = torch.arange(len(rollout.prompts)).split(microbatch_prompts)
    logprobs, values = logprob_agreement.forward_in_batches(policy, rollout, rows)[:2]
    kl = logprob_agreement.check_reference_kl(policy, rollout, logprobs, rows)
    line("KL to the reference", f"{kl:.2g}", f"limit {logprob_agreement.KL_LIMIT_NATS:g} nats a response")
    noise, mean_noise = logprob_agreement.measure_noise(policy, rollout, microbatch_prompts, clip_range)
    line("noise over batch compositions", f"{noise:.2g} nats", f"limit: clip {clip_range:g}",
         _verdict(expm1(noise), clip_range))
    differences = logprob_agreement.compare_with_rollout(rollout, logprobs, values)
    reuse = logprob_agreement.can_reuse_rollout(differences, values, clip_range)
    value = ("not in the rollout" if None in differences
             else f"{differences[0]:.2g} in logprobs, {differences[1]:.2g} in values")
    limit = f"limit {logprob_agreement.REUSE_SHARE * clip_range:g}"
    line("rollout and forward pass", value, limit, "reused" if reuse else "forwarded again")
    if not reuse and rollout.logprobs is not None:
        rounding = max(mean_noise, logprob_agreement.measure_rounding(policy, rollout, logprobs))
        mean = logprob_agreement.check_sampler(rollout, logprobs, rounding, clip_range)
        line("ratio of old to sampler's", f"1 within {mean:.2g} in the mean",
             f"rounding in {policy.precision}: {rounding:.2g}")
    old = logprob_agreement.flatten_tokens(rollout, rollout.logprobs) if reuse else logprobs
    return Agreement(old, mean_noise, {
        "kl_nats": kl,
        "noise_nats": noise,
        "rollout_log_p_difference": differences[0],
        "rollout_values_difference": differences[1],
        "keep_rollout_log_p": reuse,
    })


def _check_update(
    policy: Policy, rollout: Rollout, clip_range: float, microbatch_prompts: int, agreement: Agreement, line: Callable
) -> dict:
    """Compare the first microbatch of an update with the old log-probabilities, and check its gradients."""
    rows = range(min(microbatch_prompts, len(rollout.prompts)))
    with torch.enable_grad():
        scores = policy([rollout.prompts[i] for i in rows], [rollout.responses[i] for i in rows])
    new = scores.logprobs.detach()[scores.mask.bool()].float().cpu()
    deviation = logprob_agreement.check_ratio(
        agreement.old_logprobs[: len(new)], new, agreement.mean_noise, clip_range)
    line("ratio of new to old", f"1 within {deviation:.2g}", "before any update", _verdict(deviation, clip_range))
    gradient = check_gradients(policy, scores)
    line("gradients", f"smallest norm {gradient:.2g}", "all finite, no matrix's 0")
    return {"ratio_deviation": deviation, "smallest_gradient_norm": gradient}


def _verdict(deviation: float, clip_range: float) -> str:
    share = deviation / clip_range
    return f"WARNING: rounding takes {share:.0%} of the clip range" if share > logprob_agreement.WARN_SHARE else "ok"


def check_special_ids(tokenizer, models: dict[str, nn.Module]) -> tuple[int, int]:
    """Return the tokenizer's EOS and pad ids; raise ValueError unless every named model agrees with the tokenizer.

    Config and generation config must have its EOS, and its BOS if it adds one. EOS must be an id of the model: the
    published script's 100,000 was not, so no answer could end. Pad must differ from EOS.
    """
    eos, pad, bos = tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id
    if eos == pad:
        raise ValueError(f"pad and EOS are both id {eos}: ends would be masked as padding; give the tokenizer a "
                         f"separate pad token")
    for name, model in models.items():
        for config in filter(None, (model.config, getattr(model, "generation_config", None))):
            where = f"{name}, {type(config).__name__}"
            try:
                check_special_tokens(tokenizer, config)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            if adds_bos(tokenizer) and config.bos_token_id not in (None, bos):
                raise ValueError(f"{where}: the tokenizer begins texts with id {bos}, this config with "
                                 f"{config.bos_token_id}: correct the config or the tokenizer of the base")
        if eos >= model.config.vocab_size:
            raise ValueError(f"{name}: EOS is id {eos}, but the model has only {model.config.vocab_size}: no answer "
                             f"could end; make the tokenizer's eos_token one that the model knows")
    return eos, pad


def check_value_head(policy: Policy) -> float:
    """Return the norm of the value head; raise ValueError unless it fits the hidden states and is finite."""
    weight, size = policy.value_head.weight, families.hidden_size(policy.causal_model)
    if tuple(weight.shape) != (1, size) or not weight.isfinite().all():
        finite = "finite" if weight.isfinite().all() else "not finite"
        raise ValueError(f"the value head is {list(weight.shape)} and {finite}, but must be [1, {size}] and finite: "
                         f"initialise it again")
    return float(weight.detach().norm())


def check_reward_head(name: str, model: nn.Module) -> float:
    """Return the norm of a classifier's head, its parameters outside the backbone; raise ValueError unless it has one
    output and is finite.

    A randomly initialised head cannot be recognised by its norm; reward_modeling.load.load_scorer refuses to make one.
    """
    inner = lora.unwrap_peft(model)
    head = {n: p for n, p in inner.named_parameters()
            if not n.startswith(f"{inner.base_model_prefix}.") and ".original_module." not in n}
    matrices = [p for p in head.values() if p.dim() == 2]
    if not matrices or matrices[-1].shape[0] != 1:
        raise ValueError(f"{name}: a {type(inner).__name__} has no head with one output: it cannot score an answer")
    norm = float(torch.cat([p.detach().float().flatten() for p in head.values()]).norm())
    if not 0 < norm < float("inf"):
        raise ValueError(f"{name}: the norm of its head is {norm}: its scores would mean nothing; train it again")
    return norm


def check_gradients(policy: Policy, scores: TokenScores) -> float:
    """Return the smallest gradient norm that must not be 0; raise ValueError naming the tensors that cannot learn.

    scores: of some responses, computed with gradients.

    Differentiates mean(values - logprobs). Every trained tensor must get a finite gradient, every matrix a non-zero
    one, except those in ZERO_AT_START. Re-entrant gradient checkpointing and repacked quantised weights stop gradients
    silently. Leaves parameters and their .grad unchanged, and triggers no optimizer in the backward pass.
    """
    trained = policy.trainable_parameters()
    adapters = {adapter_name(name) for name in trained} - {None}
    frozen = [name for name, p in policy.named_parameters() if adapter_name(name) in adapters and name not in trained]
    if frozen or all(name.startswith("value_head") for name in trained):
        raise ValueError(f"of the adapter, {_some(frozen) or 'every tensor'} is frozen: let it require gradients")
    with torch.enable_grad():
        loss = masked_mean(scores.values - scores.logprobs, scores.mask)
    norms = {name: float("nan") if g is None else float(sharding.whole(g.float().norm()))
             for name, g in zip(trained, _differentiate(loss, list(trained.values())), strict=True)}
    must_move = [name for name, p in trained.items()
                 if p.dim() == 2 and not any(part in name for part in ZERO_AT_START)]
    stuck = [name for name, norm in norms.items() if not norm < float("inf") or (norm == 0 and name in must_move)]
    if stuck:
        raise ValueError(f"{len(stuck)} of {len(trained)} trained tensors get no finite, non-zero gradient: "
                         f"{_some(stuck)}; checkpointing must be non-reentrant, and no quantised weight repacked")
    return min(norms[name] for name in must_move)


def _differentiate(loss: torch.Tensor, parameters: list[nn.Parameter]) -> list[torch.Tensor | None]:
    if not any(isinstance(p, DTensor) for p in parameters):
        return list(torch.autograd.grad(loss, parameters, allow_unused=True))
    loss.backward()  # the gradient of a sharded parameter is not in the graph, FSDP writes it into .grad
    # Every process has computed the same rows.
    gradients = [p.grad / group.world_size() if isinstance(p, DTensor) else p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
