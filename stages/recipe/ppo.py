"""TODO docstring."""

from dataclasses import dataclass
from typing import Literal

from stages.recipe.checks import (
    LogTo,
    Precision,
    check_divides,
    check_full_precision,
    check_log_to,
    check_patience,
    log_to_setting,
)
from stages.recipe.models import Lora
from stages.recipe.schema import setting


def _check_rewards(rewards: tuple, scaling: str) -> None:
    names = [reward.source for reward in rewards]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"rewards must name at least one source, and none twice, not {', '.join(names) or 'nothing'}")
    if scaling == "model" and not any(name == "model" or "/" in name for name in names):
        raise ValueError("reward_scaling 'model' needs the reward model among rewards: {source: model}")


@dataclass(frozen=True)
class RewardSource:
    """One of the scorers whose weighted sum is the reward of a response."""

    source: str = setting(
        "model", "'model': the reward stage's, each of its members a source; folder of another reward artifact; 'lexical': word "
        "counts, fitted on the reward split; a measure: repetition, has_code, response_tokens, response_characters; "
        "'package.module:function'; folder or hub id of a sequence classifier with one output [script: model]")
    weight: float = setting(1.0, "times its score, in the sum [ours]")
    reads: Literal["text", "ids"] = setting(
        "text", "what a function is given: (questions, responses) as text, or (prompts, responses) as token ids [ours]")
    template: str = setting("Question: {question}\n\nAnswer: {response}", "what a classifier of a folder or hub id reads; "
                       "special tokens, an end of sequence among them, spelt out [script]")

    def __post_init__(self):
        if "{response}" not in self.template:
            raise ValueError(f"template must say where the {{response}} goes, and {self.template!r} does not")


@dataclass(frozen=True)
class Ppo:
    """Proximal policy optimisation against the reward model, with a KL penalty to the SFT model."""

    lora: Lora = setting(Lora(dropout=0.0), "the policy's adapter [script, but no dropout: ratios compare like with like]")
    tune: Literal["lora", "full"] = setting(
        "lora", "what learns: an adapter, or every weight (the reference is then a frozen copy) [script]")
    precision: Precision = setting("int8", "of the frozen base [script]")
    value_model: Literal["head", "adapter"] = setting(
        "head", "'head': on the policy's last hidden state, from 0, its gradient into the policy [script]; 'adapter': "
        "one of its own that starts as the reward model's, given as --reward unmerged [N+]")
    gradient_checkpointing: bool = setting(False, "recompute activations in the update's backward pass [script: off]")
    compile: bool = setting(False, "torch.compile of the layers but in sampling; not for int8 and nf4 [ours: off]")
    iterations: int = setting(2500, "rollout phases [script: 20,000 'steps' over batches of 8]")
    rollout_prompts: int = setting(64, "prompts a rollout phase [run: 8 on each of 8 processes]")
    forward_prompts: int = setting(16, "prompts a forward pass without gradients: reference, values, rewards [ours]")
    minibatch_prompts: int = setting(64, "prompts an optimiser step [run: 8 accumulated, 8 processes]")
    microbatch_prompts: int = setting(8, "prompts a forward pass; gradients add up to the minibatch [ours]")
    epochs: int = setting(4, "passes over each rollout batch [run]")
    max_prompt_tokens: int = setting(512, "longer prompts are dropped and counted [script]")
    max_response_tokens: int = setting(128, "sampling stops here if no stop id came [run]")
    response_length: Literal["until_stop", "sampled", "fixed"] = setting(
        "until_stop", "'sampled': a response's most is uniform from min_ to max_response_tokens [script, without stop "
        "ids]; 'fixed': all are drawn, and cut after the first stop id [N implementation details]")
    min_response_tokens: int = setting(32, "least of the lengths when response_length is 'sampled' [script]")
    stop_ids: tuple[int, ...] | None = setting(
        None, "token ids that end a response; null: the tokenizer's EOS [ours; script: none that a model has]")
    temperature: float = setting(1.0, "divides the logits in old, new and reference log-probabilities alike [script]")
    top_k: int = setting(0, "sample among so many likeliest tokens, and score among them; 0: all [script]")
    top_p: float = setting(1.0, "of these, the likeliest that hold this share; 1: all; needs top_k [script]")
    learning_rate: float = setting(1.4e-5, "step size of Adam [run]")
    learning_rate_decay: bool = setting(False, "linear to 0 over the run [N implementation details; script: off]")
    optimizer: Literal["adam", "adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor"] = setting(
        "adam", "the last three take less memory, the paged one on a CUDA GPU only [TRL default]")
    adam_epsilon: float = setting(1e-5, "of Adam's denominator; Adafactor has its own [N implementation details]")
    weight_decay: float = setting(0.0, "of the optimiser [TRL default]")
    optimizer_in_backward: bool = setting(
        False, "each parameter steps once its gradient is there, and frees it: for full fine-tuning [torchtune]")
    max_gradient_norm: float | None = setting(1.0, "global norm clip; null: none [Llama 2]")
    gamma: float = setting(1.0, "discount [TRL default]")
    gae_lambda: float = setting(0.95, "of generalised advantage estimation [TRL default]")
    advantage_variance: Literal["biased", "unbiased"] = setting(
        "biased", "in whitening: 'biased' divides by the tokens [N implementation details]; 'unbiased': as TRL")
    critic_warmup_iterations: int = setting(0, "first iterations, in which the value head alone learns [NeMo-Aligner]")
    whiten_rewards: bool = setting(False, "token rewards to standard deviation 1, their mean kept [TRL default: off]")
    clip_range: float = setting(0.2, "of the probability ratio [TRL default]")
    value_clip_range: float | None = setting(0.2, "of the value, around the old one; null: not clipped [TRL default]")
    value_coefficient: float = setting(0.1, "weight of the value loss [TRL default]")
    kl_coefficient: float = setting(0.2, "beta at the start [script]")
    kl_estimator: Literal["k1", "k2", "k3", "absolute"] = setting(
        "k1", "of the KL in the reward; only k1's gradient is the KL's [TRL default: 'kl']")
    kl_target_nats: float | None = setting(6.0, "KL a response that beta is steered to; null: fixed beta [TRL default]")
    kl_horizon_responses: int = setting(10_000, "time constant of the adaptive beta [TRL default]")
    update_kl_limit: float | None = setting(
        0.15, "stop an update when the policy moved this far from the rollout's, nats a token [TRL: 1.5 x 0.1]")
    max_ratio: float = setting(10.0, "skip and count a minibatch whose mean ratio is above [TRL default]")
    rewards: tuple[RewardSource, ...] = setting(
        (RewardSource(),), "what is summed up to a reward: a list of {source, weight, reads, template} [script]")
    reward_combine: Literal["mean", "min", "mean_minus_std"] = setting(
        "mean", "how the scores of several reward models become one [Coste et al. 2023]")
    spread_penalty: float = setting(0.0, "coefficient of the standard deviation in 'mean_minus_std' [Coste et al. 2023]")
    min_reward_correlation: float = setting(
        0.95, "of the reward model's scores here and in training, on reference answers; below, no run starts [ours]")
    reward_baseline: float = setting(0.0, "taken from every sum [script]")
    reward_scaling: Literal["none", "model", "running"] = setting(
        "none", "divide by a standard deviation: 'model': the reward model's, on reference answers; 'running': that of "
        "every rollout so far [script: none; TRL, trlX: either]")
    reward_clip: float | None = setting(None, "rewards beyond plus or minus this are cut to it; null: none are [script]")
    missing_eos: Literal["reduce", "replace"] = setting(
        "reduce", "the penalty is taken from the reward [ours]; 'replace': it becomes the reward [N+]")
    missing_eos_penalty: float = setting(1.0, "for a response without EOS, after the clip [N+ implementation details]")
    short_response_tokens: int = setting(0, "responses of fewer tokens, EOS among them, pay short_response_penalty [ours]")
    short_response_penalty: float = setting(0.0, "taken from their reward, after the clip [torchtune: set to -3 under 18]")
    validation_prompts: int = setting(64, "of the rl split, held out to choose the policy; at most a quarter [ours]")
    evaluate_every_iterations: int = setting(10, "iterations between evaluations on them [ours]")
    max_kl_nats: float = setting(10.0, "stop, and never keep a policy, above this KL a response on held-out prompts [ours]")
    patience_evaluations: int | None = setting(None, "stop after so many without a better objective; null: never [ours]")
    max_skipped_in_a_row: int | None = setting(None, "stop when more minibatches in a row are skipped; null: never [ours]")
    min_entropy_nats: float = setting(0.0, "stop when the policy's entropy a token falls below; 0: never [ours]")
    save_every_iterations: int = setting(10, "iterations between checkpoints [ours]")
    keep_checkpoints: int = setting(2, "newest ones kept, each with the best policy so far [ours]")
    log_to: LogTo = log_to_setting()
    seed: int = setting(0, "of prompts, sampling and minibatches [script]")

    def __post_init__(self):
        check_log_to(self.log_to)
        check_full_precision(self.tune, self.precision)
        if self.compile and self.precision in ("int8", "nf4"):
            raise ValueError(f"compile goes with precision fp32, mixed or bf16: the products of {self.precision} "
                             f"cannot be traced")
        if self.lora.dropout:
            raise ValueError("lora.dropout must be 0 in ppo: old and new log-probabilities must come from one function")
        if self.top_p < 1 and not self.top_k:
            raise ValueError("top_p alone may keep any number of tokens, and each must be scored under the old, new "
                             "and the reference policy: set top_k, too, or leave top_p at 1")
        _check_rewards(self.rewards, self.reward_scaling)
        if self.spread_penalty and self.reward_combine != "mean_minus_std":
            raise ValueError(f"spread_penalty is the coefficient of reward_combine 'mean_minus_std', and has no effect "
                             f"with {self.reward_combine!r}: set reward_combine, or leave spread_penalty at 0")
        check_divides(self.minibatch_prompts, self.rollout_prompts, "minibatch_prompts", "rollout_prompts")
        check_divides(self.microbatch_prompts, self.minibatch_prompts, "microbatch_prompts", "minibatch_prompts")
        check_patience(self.patience_evaluations)
        if self.keep_checkpoints < 1:
            raise ValueError(f"keep_checkpoints must be 1 or more, not {self.keep_checkpoints}")
        if self.optimizer_in_backward:
            _check_in_backward(self)


def _check_in_backward(ppo: Ppo) -> None:
    if ppo.microbatch_prompts != ppo.minibatch_prompts:
        raise ValueError(f"optimizer_in_backward steps at every backward pass: microbatch_prompts "
                         f"({ppo.microbatch_prompts}) must equal minibatch_prompts ({ppo.minibatch_prompts})")
    if ppo.max_gradient_norm is not None:
        raise ValueError("optimizer_in_backward never holds all gradients together, so their global norm cannot be "
                         "clipped: max_gradient_norm must be null")
    if ppo.optimizer not in ("adam", "adamw", "adafactor"):
        raise ValueError(f"optimizer_in_backward goes with adam, adamw or adafactor, not with {ppo.optimizer}")
