"""Settings of RLOO and GRPO, and those that all policy gradient methods share, PPO as well."""

from dataclasses import dataclass
from typing import Literal

from stages.recipe.ranges import (
    BATCH,
    COEFFICIENT,
    COUNT,
    COUNT_OR_NONE,
    DECAY,
    LEARNING_RATE,
    POSITIVE,
    SEED,
    TEMPERATURE,
    TOKENS,
    Range,
)
from stages.recipe.schema import setting
from stages.recipe.sections.models import Lora
from stages.recipe.sections.rewards import RewardSettings
from stages.recipe.sections.shared import Precision, ShardedTraining, check_divides, check_training


@dataclass(frozen=True)
class PolicyGradient(RewardSettings, ShardedTraining):
    """What a policy gradient method on sampled responses needs, without what a critic needs."""

    lora: Lora = setting(
        Lora(dropout=0.0), "the policy's adapter [script, but no dropout: ratios compare like with like]")
    tune: Literal["lora", "full"] = setting(
        "lora", "what is trained: an adapter, or all weights (the reference is then a frozen copy) [script]")
    precision: Precision = setting("int8", "precision of the frozen base model [script]")
    gradient_checkpointing: bool = setting(False, "recompute activations in the update's backward pass [script: off]")
    iterations: int = setting(2500, "number of rollouts [script: 20,000 'steps' over batches of 8]", within=COUNT)
    rollout_prompts: int = setting(64, "prompts per rollout [run: 8 on each of 8 processes]", within=BATCH)
    rollout_units: int = setting(
        1, "parts in which a rollout is sampled, one after the other: so many processes can share it [ours]",
        within=COUNT, absent_means=1)
    forward_prompts: int = setting(
        16, "prompts per forward pass without gradients: reference, values, rewards [ours]", within=BATCH)
    minibatch_prompts: int = setting(64, "prompts per optimizer step [run: 8 accumulated, 8 processes]", within=BATCH)
    microbatch_prompts: int = setting(
        8, "prompts per forward pass of the update; gradients are summed over the minibatch [ours]", within=BATCH)
    epochs: int = setting(4, "passes over each rollout [run]", within=Range(1, 10**6))
    prompt_column: str | None = setting(
        None, "column of your own prompts (--prompts); null: the first of prompt, question, text [ours]",
        absent_means=None)
    prompt_template: Literal["question", "none", "chat"] = setting(
        "question", "form of your own prompts (--prompts): 'question', the pipeline's Question and Answer; 'none', "
        "the text as it is, in which special tokens can be written out; 'chat', a user's message in the tokenizer's "
        "own chat template [ours]", absent_means="question")
    max_prompt_tokens: int = setting(512, "drop and count longer prompts [script]", within=TOKENS)
    max_response_tokens: int = setting(128, "maximum response length [run]", within=TOKENS)
    response_length: Literal["until_stop", "sampled"] = setting(
        "until_stop", "'until_stop': sample up to a stop id; 'sampled': the same, with a maximum drawn uniformly from "
        "min_ to max_response_tokens [script, without stop ids]")
    min_response_tokens: int = setting(32, "smallest maximum, if response_length is 'sampled' [script]", within=TOKENS)
    stop_ids: tuple[int, ...] | None = setting(
        None, "token ids that end a response; null: the tokenizer's EOS [ours; script: none that a model has]",
        within=Range(0, 2**31 - 1))
    temperature: float = setting(
        1.0, "divides the logits of the old, the new and the reference policy alike [script]", within=TEMPERATURE)
    final_temperatures: tuple[float, ...] = setting(
        (), "temperatures, beside 1, that the best policy is tried with on the validation prompts after training; its "
        "logits are divided for good by the one with the best validation_selection_score; []: by none [ours]",
        within=TEMPERATURE, absent_means=[])
    learning_rate: float = setting(1.4e-5, "learning rate [run]", within=LEARNING_RATE)
    learning_rate_decay: bool = setting(
        False, "decay the learning rate linearly to 0 over the run [N implementation details; script: off]")
    optimizer: Literal["adam", "adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor"] = setting(
        "adam", "the last three use less memory, paged_adamw_8bit only on a CUDA GPU [TRL default]")
    adam_epsilon: float = setting(
        1e-5, "epsilon in Adam's denominator; Adafactor has its own [N implementation details]",
        within=Range(0, 1, above=True))
    weight_decay: float = setting(0.0, "weight decay of the optimizer [TRL default]", within=DECAY)
    max_gradient_norm: float | None = setting(
        1.0, "clip the global gradient norm to this; null: no clipping [Llama 2]", within=POSITIVE)
    clip_range: float = setting(
        0.2, "clip range of the probability ratio [TRL default]", within=Range(0, 10, above=True))
    kl_coefficient: float = setting(0.2, "initial KL coefficient, beta [script]", within=COEFFICIENT)
    kl_anneal_factor: float = setting(
        1.0, "factor of beta in the first iteration, which falls geometrically to 1 over the first half of the "
        "iterations; 1: none [ours; script: none]", within=Range(1, 1000), absent_means=1.0)
    kl_target_nats: float | None = setting(
        6.0, "KL per response that an adaptive beta aims at; null: fixed beta [TRL default]", within=POSITIVE)
    kl_horizon_responses: int = setting(10_000, "time constant of the adaptive beta [TRL default]", within=COUNT)
    update_kl_limit: float | None = setting(
        0.15, "stop an update once the KL between old and new policy is above this, nats per token [TRL: 1.5 x 0.1]",
        within=POSITIVE)
    max_ratio: float = setting(
        10.0, "skip and count a minibatch with a mean probability ratio above this [TRL default]",
        within=Range(1, 10**6))
    max_sampler_ratio: float | None = setting(
        2.0, "where old log-probabilities are of a forward pass that rounds differently from the sampler (int8, nf4, "
        "bf16 without the CPU kernels): weight the policy loss by the ratio of old to sampler's probability, at most "
        "this; null: no weights [Yao et al. 2025, truncated importance sampling]", within=Range(1, 10**6),
        absent_means=2.0)
    reward_scaling: Literal["none", "model", "running", "start"] = setting(
        "none", "divide rewards by a standard deviation: 'model', of the reward model's scores of reference answers; "
        "'running', of all rollouts so far; 'start', of the answers to the validation prompts before training, whose "
        "mean is subtracted, too [script: none; TRL, trlX: either of the first two]")
    validation_prompts: int = setting(
        64, "prompts held out, of the rl split or of your own, at most a quarter, to select the best policy [ours]",
        within=COUNT)
    evaluation_prompts: int = setting(
        320, "prompts of your own (--prompts) held out for the evaluation, at most a quarter: no policy is trained on "
        "them or selected by them; 0: none [ours]", within=COUNT_OR_NONE, absent_means=320)
    evaluate_every_iterations: int = setting(
        10, "iterations between evaluations on the held-out prompts [ours]", within=COUNT)
    max_kl_nats: float = setting(
        10.0, "stop above this KL per response on held-out prompts, and never keep such a policy [ours]",
        within=POSITIVE)
    patience_evaluations: int | None = setting(
        None, "stop after this many evaluations without a better validation_selection_score; null: never [ours]",
        within=COUNT)
    save_every_iterations: int = setting(10, "iterations between checkpoints [ours]", within=COUNT)
    seed: int = setting(0, "seed of prompts, sampling and minibatches [script]", within=SEED)

    def __post_init__(self):
        super().__post_init__()
        check_divides(self.minibatch_prompts, self.rollout_prompts, "minibatch_prompts", "rollout_prompts")
        check_training(self, self.trains_whole_model())
        if self.lora.dropout:
            raise ValueError("lora.dropout must be 0: old and new log-probabilities must come from one function")
        if self.response_length == "sampled" and self.min_response_tokens > self.max_response_tokens:
            raise ValueError(f"min_response_tokens ({self.min_response_tokens}) must be at most max_response_tokens "
                             f"({self.max_response_tokens}) where response_length is 'sampled'")

    def trains_whole_model(self) -> bool:
        """Tell whether all weights of some model are trained, not adapters only."""
        return self.tune == "full"


@dataclass(frozen=True)
class GroupedPolicyGradient(PolicyGradient):
    """A method without a critic that compares several responses to each prompt; `prompts` come with all responses."""

    responses_per_prompt: int = setting(
        4, "responses to each prompt of a rollout, whose rewards are compared [RLOO paper: 2, 4]",
        within=Range(2, 1000))
    rollout_prompts: int = setting(
        16, "prompts per rollout, each with responses_per_prompt responses [ours: 64 responses, as in ppo]",
        within=BATCH)
    forward_prompts: int = setting(
        4, "prompts per forward pass without gradients, each with its responses [ours]", within=BATCH)
    minibatch_prompts: int = setting(
        16, "prompts per optimizer step, each with its responses [ours: 64 responses, as in ppo]", within=BATCH)
    microbatch_prompts: int = setting(
        2, "prompts per forward pass of the update, each with its responses [ours]", within=BATCH)
    epochs: int = setting(1, "passes over each rollout [RLOO and GRPO papers, TRL default]", within=Range(1, 10**6))
    # No settings: there is no critic.
    value_coefficient, value_clip_range, critic_warmup_iterations = 0.0, None, 0


@dataclass(frozen=True)
class Rloo(GroupedPolicyGradient):
    """REINFORCE leave-one-out: each response's reward against the mean of the others to its prompt; no critic."""

    kl_coefficient: float = setting(0.05, "initial KL coefficient, beta [TRL default]", within=COEFFICIENT)
    kl_estimator: Literal["k1", "k2", "k3", "absolute"] = setting(
        "k1", "estimator of the KL penalty in the reward [RLOO paper, TRL]")
    normalize_advantages: bool = setting(
        False, "scale the advantages of a rollout to mean 0 and standard deviation 1 [TRL default: off]")
    ratio_level: Literal["token", "sequence"] = setting(
        "sequence", "whose probability ratio is clipped, that of a whole response or of each token [TRL: sequence]")
    loss_mean: Literal["token", "sequence"] = setting(
        "sequence", "the loss is a mean over all tokens, or over responses of the mean over their tokens [RLOO paper: "
        "sequence]")
    kl_importance_weight = False  # no setting: the KL is in the reward


@dataclass(frozen=True)
class Grpo(GroupedPolicyGradient):
    """Group relative policy optimisation: rewards normalised among the responses to a prompt; the KL is in the loss."""

    kl_coefficient: float = setting(
        0.04, "coefficient of the KL (k3) in the loss, beta [GRPO paper; TRL: 0]", within=COEFFICIENT)
    kl_importance_weight: bool = setting(
        True, "weight a token's KL in the loss by its probability ratio: its gradient is then that of the KL [TRL "
        "default, DeepSeek-V3.2, arXiv 2512.02556; GRPO paper: off]")
    scale_rewards: Literal["group", "batch", "none"] = setting(
        "group", "divide advantages by the standard deviation of a prompt's rewards ('group') [GRPO paper, TRL "
        "default], of all rewards ('batch') [arXiv 2508.08221], or by nothing ('none') [Dr. GRPO, arXiv 2503.20783]")
    loss_mean: Literal["token", "sequence"] = setting(
        "sequence", "the loss is a mean over responses of the mean over their tokens [GRPO paper], or over all tokens "
        "of a minibatch [DAPO, arXiv 2503.14476]")
    ratio_level: Literal["token", "sequence"] = setting(
        "token", "whose probability ratio is clipped and whose KL is in the loss, a token's or a whole response's "
        "[GRPO paper: token; RLOO: sequence]", absent_means="token")
