"""Every hyper-parameter of every stage. Defaults are StackLLaMA's published values; a recipe file lists differences.

Each field says its meaning, its unit (where the name does not) and where the default comes from:
[paper] the StackLLaMA blog post (Hugging Face, 2023), [script] TRL's examples/research_projects/stack_llama/scripts,
[run] that folder's README, [card] the data set cards, [ours] chosen here.
"""

from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import Literal

import yaml

from stages.plumbing.settings import SettingsError, deciding, laid_over, leaves, of, watching

DEFAULT_RECIPE = "configs/demo.yaml"
Precision = Literal["fp32", "mixed", "bf16", "int8", "nf4"]
LogTo = tuple[Literal["terminal", "jsonl", "tensorboard", "wandb"], ...]
SHARED = ("seed", "log_to")  # given once beside the sections, they go to every section that has them


def _divides(part: int, whole: int, part_name: str, whole_name: str) -> None:
    if part < 1 or whole % part:
        raise ValueError(f"{whole_name} ({whole}) must be a multiple of {part_name} ({part})")


def _check_full(tune: str, precision: str) -> None:
    if tune == "full" and precision in ("int8", "nf4"):
        raise ValueError(f"tune 'full' needs weights that can learn, and {precision} is quantised: set "
                         f"precision to fp32, mixed or bf16")


def _check_patience(evaluations: int | None) -> None:
    if evaluations is not None and evaluations < 1:
        raise ValueError(f"patience_evaluations must be 1 or more, or null, not {evaluations}")


def _log_to():
    return of(("terminal", "jsonl"), "where numbers and sample answers go while it trains: terminal, jsonl (the "
              "artifact's own files), tensorboard, wandb (offline unless WANDB_MODE says otherwise) [ours]",
              decides=False)


def _check_log_to(log_to: LogTo) -> None:
    if "jsonl" not in log_to or len(set(log_to)) < len(log_to):
        raise ValueError(f"log_to must name jsonl, whose files are part of the artifact, and nothing twice, not "
                         f"{', '.join(log_to) or 'nothing'}")


def _check_rewards(rewards: tuple, scaling: str) -> None:
    names = [reward.source for reward in rewards]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"rewards must name at least one source, and none twice, not {', '.join(names) or 'nothing'}")
    if scaling == "model" and "model" not in names:
        raise ValueError("reward_scaling 'model' needs the reward model among rewards: {source: model}")


def _is_day(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


@dataclass(frozen=True)
class Posts:
    """Dump to questions with scored answers."""

    votes: Literal["net", "up"] = of("net", "up minus down, as the dump's Score [ours: not stated]; 'up': of Votes.xml")
    min_answers: int = of(2, "questions with fewer answers are dropped [card]")
    sites: tuple[str, ...] = of((), "only these; empty: all [card]")
    tags: tuple[str, ...] = of((), "only questions with one of these; empty: all [card]")
    asked_from: str | None = of(None, "only questions of this day and later, as 2015-01-31 [ours: not limited]")
    asked_before: str | None = of(None, "only questions of before this day, as 2016-01-31 [ours: not limited]")
    code_languages: tuple[str, ...] = of(
        (), "only questions with a code block, or an answer's, marked as one of these; empty: all [card]")
    max_questions: int | None = of(None, "keep so many, drawn by `seed`; null: all [card]")
    max_bad_rows_share: float = of(0.01, "stop when more than this share of the rows cannot be read [ours]")
    max_row_bytes: int = of(16_777_216, "rows over this size are set aside [ours]")
    max_question_bytes: int = of(67_108_864, "questions that with their answers are over this size are dropped [ours]")
    part_bytes: int = of(67_108_864, "of posts' text, from which one part-*.parquet is made, about [ours]")
    seed: int = of(42, "of the order of the questions, and so of which `max_questions` are kept [card]")

    def __post_init__(self):
        for name in ("asked_from", "asked_before"):
            if getattr(self, name) is not None and not _is_day(getattr(self, name)):
                raise ValueError(f"{name} must be a day, as 2015-01-31, not {getattr(self, name)!r}")
        if self.max_questions is not None and self.max_questions < 1:
            raise ValueError(f"max_questions must be 1 or more, or null, not {self.max_questions}")


@dataclass(frozen=True)
class Pairs:
    """Questions to preference pairs, split by question."""

    max_pairs_per_question: int = of(10, "drawn without replacement from all pairs that differ in score [paper]")
    min_score_gap: int = of(1, "least difference of a pair's scores [paper: any]")
    markdown: Literal["published", "clean"] = of(
        "published", "'published': markdownify's defaults, blank lines collapsed, in code too [card: notebook]; "
        "'clean': code as it is, nothing escaped")
    length_unit: Literal["characters", "tokens"] = of("characters", "of the four lengths below, in Markdown [ours]")
    tokenizer: str | None = of(None, "folder or hub id, when length_unit is tokens [ours]")
    min_question_length: int = of(0, "shorter questions are dropped [card: none]")
    max_question_length: int | None = of(None, "longer questions are dropped; null: none [card]")
    min_answer_length: int = of(0, "pairs with a shorter answer are dropped [card: none]")
    max_answer_length: int | None = of(None, "pairs with a longer answer are dropped; null: none [card]")
    max_post_characters: int = of(200_000, "of HTML or of Markdown; posts over this are not converted [ours]")
    max_post_tags: int = of(5_000, "posts with more '<' are not converted [ours]")
    max_post_depth: int = of(100, "posts with more nested elements are not converted [ours]")
    max_post_blanks: int = of(1_000, "posts with more white space in a row are not converted [ours]")
    finetune_share: float = of(3.0, "part of the questions, relative to the other three [card: millions]")
    reward_share: float = of(3.0, "as finetune_share [card]")
    rl_share: float = of(3.0, "as finetune_share [card]")
    evaluation_share: float = of(1.8, "as finetune_share; never trained on [card]")
    seed: int = of(42, "of the split and of the draw of pairs [card]")

    def __post_init__(self):
        if self.min_score_gap < 1:
            raise ValueError(f"min_score_gap must be 1 or more, not {self.min_score_gap}")
        if self.length_unit == "tokens" and not self.tokenizer:
            raise ValueError("length_unit tokens needs a tokenizer: a folder or hub id")


@dataclass(frozen=True)
class Scratch:
    """The small LLaMA that is trained when base.model is 'scratch'."""

    vocabulary_tokens: int = of(2048, "size of the byte-level BPE, special tokens included [ours]")
    hidden_size: int = of(128, "width of the residual stream [ours]")
    intermediate_size: int = of(384, "width of the gated MLP [ours]")
    layers: int = of(4, "transformer blocks [ours]")
    heads: int = of(4, "attention heads [ours]")
    max_position_tokens: int = of(1024, "longest sequence [ours]")
    initializer_range: float = of(0.05, "standard deviation of initial weights; 0.02 learns facts slower here [ours]")
    epochs: float = of(2.0, "passes over the site's text [ours]")
    max_tokens: int = of(8_000_000, "stop after this many tokens, whatever epochs says [ours]")
    learning_rate: float = of(2e-3, "peak step size of AdamW [ours]")
    weight_decay: float = of(0.05, "of AdamW [ours]")
    warmup_share: float = of(0.05, "share of the steps in which the step size rises [ours]")
    sequence_length_tokens: int = of(256, "length of a packed block [ours]")
    batch_sequences: int = of(16, "blocks a step [ours]")
    precision: Literal["fp32", "mixed"] = of("mixed", "'mixed': fp32 weights, bf16 matrix products [ours]")
    save_every_steps: int = of(250, "steps between checkpoints [ours]")


@dataclass(frozen=True)
class Base:
    """The pretrained model that everything starts from."""

    model: str = of("huggyllama/llama-7b", "hub id, local folder, or 'scratch' [paper: LLaMA 7B]")
    revision: str | None = of(None, "commit or tag of a hub model; null is the newest [ours]")
    scratch: Scratch = of(Scratch(), "used only when model is 'scratch'")
    seed: int = of(42, "of initialisation and order [ours]")


@dataclass(frozen=True)
class Lora:
    """A low-rank adapter (Hu et al. 2021)."""

    r: int = of(16, "rank [script]")
    alpha: int = of(32, "scale is alpha / r [script]")
    dropout: float = of(0.05, "on the adapter's input while it trains [script]")
    target_modules: tuple[str, ...] = of((), "names of linear layers; empty: PEFT's choice for the family [script]")


@dataclass(frozen=True)
class Sft:
    """Supervised fine-tuning on the better answers of the finetune split."""

    lora: Lora = of(Lora(), "the adapter")
    tune: Literal["lora", "full"] = of("lora", "what learns: an adapter, or every weight [script]")
    train_new_tokens: bool = of(
        False, "give tokens that the tokenizer has and the base has not a vector, and train those vectors [ours]")
    precision: Precision = of("int8", "of the base while it trains [script]")
    packing: Literal["wrapped", "bfd"] = of(
        "wrapped", "'wrapped': concatenate and cut [script]; 'bfd': no attention across documents")
    loss_on: Literal["all", "answer"] = of("all", "'answer': question and template have no label [script: all]")
    sequence_length_tokens: int = of(1024, "length of a packed block [script]")
    batch_sequences: int = of(32, "blocks an optimiser step [run: 4 on each of 8 processes]")
    microbatch_sequences: int = of(4, "blocks a forward pass [script]")
    max_steps: int | None = of(5000, "optimiser steps; null: epochs decides [run]")
    epochs: float = of(1.0, "passes over the packed blocks, when max_steps is null [ours]")
    learning_rate: float = of(1e-5, "peak step size, cosine to 0 [run; the script's default is 1e-4]")
    warmup_steps: int = of(100, "steps in which the step size rises [script]")
    weight_decay: float = of(0.05, "of AdamW [script]")
    gradient_checkpointing: bool = of(False, "recompute activations in the backward pass [script: off by default]")
    save_every_steps: int = of(1000, "steps between checkpoints [script]")
    validation_questions: int = of(
        64, "of the finetune split, held out to watch perplexity, ends and samples; at most a tenth [ours]")
    evaluate_every_steps: int = of(1000, "steps between evaluations [script]")
    patience_evaluations: int | None = of(
        None, "stop after so many without a lower perplexity, and keep the best; null: the last is kept [script]")
    log_to: LogTo = _log_to()
    seed: int = of(0, "of initialisation, order and dropout [script]")

    def __post_init__(self):
        _check_log_to(self.log_to)
        _divides(self.microbatch_sequences, self.batch_sequences, "microbatch_sequences", "batch_sequences")
        _check_full(self.tune, self.precision)
        _check_patience(self.patience_evaluations)


@dataclass(frozen=True)
class Reward:
    """Pairwise reward model: loss -log sigmoid(r_j - r_k)."""

    start_from: Literal["sft", "base"] = of("sft", "the model that the adapter and the head go on [paper]")
    lora: Lora = of(Lora(r=8, alpha=32, dropout=0.1), "the adapter [script]")
    precision: Precision = of("bf16", "of the frozen base while it trains [script]")
    batching: Literal["pair", "question"] = of(
        "pair", "'pair' [script]; 'question': each answer forwarded once, all its pairs in one step [InstructGPT 3.5]")
    pooling: Literal["last", "mean", "sum"] = of(
        "last", "where the head reads: at the last token [script]; 'mean', 'sum': at all of the answer's, averaged, or "
        "summed in hundreds, a token that comes again for less [ours]")
    log_probability_weight: float = of(
        0.0, "times an answer's mean log-probability a token, added to the head's score; 0: the head alone [script]")
    lexical_buckets: int = of(
        0, "of a hash of tokens and pairs of neighbours, whose counts add a linear term to the score, learnt first and "
        "alone (stages/learning/lexical.py); 0: no such term [script]")
    lexical_penalty: float = of(2000.0, "times half the sum of that term's squared weights, in its loss [ours]")
    margin_per_score: float = of(0.0, "gap asked of the rewards for each step of the scores' gap [Llama 2; script: 0]")
    label_smoothing: float = of(0.0, "share of pairs held to be the wrong way round, under 0.5 [cDPO; script: 0]")
    centring_weight: float = of(0.0, "times (r_j + r_k)^2, in the loss [Eisenstein et al. 2023; script: 0]")
    language_model_weight: float = of(
        0.0, "times the mean nats a token of the better answer, in the loss [Askell et al. 2021; script: 0]")
    members: int = of(1, "models trained apart, of seed, seed + 1 and so on, whose scores are averaged [script]")
    max_length_tokens: int = of(512, "longer texts are dropped and counted [script]")
    train_pairs: int = of(100_000, "at most, from the reward split [script]")
    batch_pairs: int = of(32, "pairs (or questions) an optimiser step [script: 4 on each of 8 processes]")
    microbatch_pairs: int = of(4, "pairs (or questions) a forward pass [script]")
    epochs: float = of(1.0, "passes over the pairs [script]")
    learning_rate: float = of(2e-5, "peak step size, linear to 0 [script]")
    weight_decay: float = of(0.001, "of AdamW [script]")
    gradient_checkpointing: bool = of(False, "recompute activations in the backward pass [script: off by default]")
    validation_share: float = of(0.05, "of the reward split's questions, held out to pick the best checkpoint [ours]")
    save_every_steps: int = of(500, "steps between checkpoints and evaluations [script]")
    patience_evaluations: int | None = of(None, "stop after so many without a better one; null: never [script]")
    log_to: LogTo = _log_to()
    seed: int = of(0, "of the head, order and dropout [script]")

    def __post_init__(self):
        _check_log_to(self.log_to)
        _divides(self.microbatch_pairs, self.batch_pairs, "microbatch_pairs", "batch_pairs")
        _check_patience(self.patience_evaluations)
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must be from 0 to below 0.5, not {self.label_smoothing}")
        if self.lexical_buckets < 0 or self.lexical_penalty <= 0:
            raise ValueError(f"lexical_buckets must be 0 or more, lexical_penalty above 0, not {self.lexical_buckets} "
                             f"and {self.lexical_penalty}")
        if self.members < 1:
            raise ValueError(f"members must be 1 or more, not {self.members}")
        if not 0 <= self.validation_share < 1:
            raise ValueError(f"validation_share must be from 0 to below 1, not {self.validation_share}")


@dataclass(frozen=True)
class Merge:
    """Adapters into base weights, in fp32 on the unquantised base."""

    dtype: Literal["fp32", "bf16"] = of("bf16", "of the saved weights [script]")
    max_shard_bytes: int = of(5_000_000_000, "of a file of weights; a larger model has several [Transformers 4]")
    max_logit_difference: float = of(1e-3, "largest |adapter-on minus merged| in fp32 that is published [ours]")
    max_perplexity_change: float = of(
        0.01, "largest |after / before - 1| that is published: reloaded from disk against adapters on [ours]")
    max_accuracy_change: float = of(0.05, "of a reward model, as much of its pair accuracy, absolute [ours]")

    def __post_init__(self):
        if self.max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes must be 1 or more, not {self.max_shard_bytes}")


@dataclass(frozen=True)
class RewardSource:
    """One of the scorers whose weighted sum is the reward of a response."""

    source: str = of(
        "model", "'model': the reward stage's; a measure: repetition, has_code, response_tokens, response_characters; "
        "'package.module:function'; folder or hub id of a sequence classifier with one output [script: model]")
    weight: float = of(1.0, "times its score, in the sum [ours]")
    reads: Literal["text", "ids"] = of(
        "text", "what a function is given: (questions, responses) as text, or (prompts, responses) as token ids [ours]")
    template: str = of("Question: {question}\n\nAnswer: {response}", "what a classifier of a folder or hub id reads; "
                       "special tokens, an end of sequence among them, spelt out [script]")

    def __post_init__(self):
        if "{response}" not in self.template:
            raise ValueError(f"template must say where the {{response}} goes, and {self.template!r} does not")


@dataclass(frozen=True)
class Ppo:
    """Proximal policy optimisation against the reward model, with a KL penalty to the SFT model."""

    lora: Lora = of(Lora(dropout=0.0), "the policy's adapter [script, but no dropout: ratios compare like with like]")
    tune: Literal["lora", "full"] = of(
        "lora", "what learns: an adapter, or every weight (the reference is then a frozen copy) [script]")
    precision: Precision = of("int8", "of the frozen base [script]")
    value_model: Literal["head", "adapter"] = of(
        "head", "'head': on the policy's last hidden state, from 0, its gradient into the policy [script]; 'adapter': "
        "one of its own that starts as the reward model's, given as --reward unmerged [N+]")
    gradient_checkpointing: bool = of(False, "recompute activations in the update's backward pass [script: off]")
    compile: bool = of(False, "torch.compile of the layers but in sampling; not for int8 and nf4 [ours: off]")
    iterations: int = of(2500, "rollout phases [script: 20,000 'steps' over batches of 8]")
    rollout_prompts: int = of(64, "prompts a rollout phase [run: 8 on each of 8 processes]")
    forward_prompts: int = of(16, "prompts a forward pass without gradients: reference, values, rewards [ours]")
    minibatch_prompts: int = of(64, "prompts an optimiser step [run: 8 accumulated, 8 processes]")
    microbatch_prompts: int = of(8, "prompts a forward pass; gradients add up to the minibatch [ours]")
    epochs: int = of(4, "passes over each rollout batch [run]")
    max_prompt_tokens: int = of(512, "longer prompts are dropped and counted [script]")
    max_response_tokens: int = of(128, "sampling stops here if no stop id came [run]")
    response_length: Literal["until_stop", "sampled", "fixed"] = of(
        "until_stop", "'sampled': a response's most is uniform from min_ to max_response_tokens [script, without stop "
        "ids]; 'fixed': all are drawn, and cut after the first stop id [N implementation details]")
    min_response_tokens: int = of(32, "least of the lengths when response_length is 'sampled' [script]")
    stop_ids: tuple[int, ...] | None = of(
        None, "token ids that end a response; null: the tokenizer's EOS [ours; script: none that a model has]")
    temperature: float = of(1.0, "divides the logits in old, new and reference log-probabilities alike [script]")
    top_k: int = of(0, "sample among so many likeliest tokens, and score among them; 0: all [script]")
    top_p: float = of(1.0, "of these, the likeliest that hold this share; 1: all; needs top_k [script]")
    learning_rate: float = of(1.4e-5, "step size of Adam [run]")
    learning_rate_decay: bool = of(False, "linear to 0 over the run [N implementation details; script: off]")
    optimizer: Literal["adam", "adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor"] = of(
        "adam", "the last three take less memory, the paged one on a CUDA GPU only [TRL default]")
    adam_epsilon: float = of(1e-5, "of Adam's denominator; Adafactor has its own [N implementation details]")
    weight_decay: float = of(0.0, "of the optimiser [TRL default]")
    optimizer_in_backward: bool = of(
        False, "each parameter steps once its gradient is there, and frees it: for full fine-tuning [torchtune]")
    max_gradient_norm: float | None = of(1.0, "global norm clip; null: none [Llama 2]")
    gamma: float = of(1.0, "discount [TRL default]")
    gae_lambda: float = of(0.95, "of generalised advantage estimation [TRL default]")
    advantage_variance: Literal["biased", "unbiased"] = of(
        "biased", "in whitening: 'biased' divides by the tokens [N implementation details]; 'unbiased': as TRL")
    critic_warmup_iterations: int = of(0, "first iterations, in which the value head alone learns [NeMo-Aligner]")
    whiten_rewards: bool = of(False, "token rewards to standard deviation 1, their mean kept [TRL default: off]")
    clip_range: float = of(0.2, "of the probability ratio [TRL default]")
    value_clip_range: float | None = of(0.2, "of the value, around the old one; null: not clipped [TRL default]")
    value_coefficient: float = of(0.1, "weight of the value loss [TRL default]")
    kl_coefficient: float = of(0.2, "beta at the start [script]")
    kl_estimator: Literal["k1", "k2", "k3", "absolute"] = of(
        "k1", "of the KL in the reward; only k1's gradient is the KL's [TRL default: 'kl']")
    kl_target_nats: float | None = of(6.0, "KL a response that beta is steered to; null: fixed beta [TRL default]")
    kl_horizon_responses: int = of(10_000, "time constant of the adaptive beta [TRL default]")
    update_kl_limit: float | None = of(
        0.15, "stop an update when the policy moved this far from the rollout's, nats a token [TRL: 1.5 x 0.1]")
    max_ratio: float = of(10.0, "skip and count a minibatch whose mean ratio is above [TRL default]")
    rewards: tuple[RewardSource, ...] = of(
        (RewardSource(),), "what is summed up to a reward: a list of {source, weight, reads, template} [script]")
    spread_penalty: float = of(0.0, "times the standard deviation of several reward models' scores, taken from their "
                               "mean [Coste et al. 2023]")
    min_reward_correlation: float = of(
        0.95, "of the reward model's scores here and in training, on reference answers; below, no run starts [ours]")
    reward_baseline: float = of(0.0, "taken from every sum [script]")
    reward_scaling: Literal["none", "model", "running"] = of(
        "none", "divide by a standard deviation: 'model': the reward model's, on reference answers; 'running': that of "
        "every rollout so far [script: none; TRL, trlX: either]")
    reward_clip: float | None = of(None, "rewards beyond plus or minus this are cut to it; null: none are [script]")
    missing_eos: Literal["reduce", "replace"] = of(
        "reduce", "the penalty is taken from the reward [ours]; 'replace': it becomes the reward [N+]")
    missing_eos_penalty: float = of(1.0, "for a response without EOS, after the clip [N+ implementation details]")
    short_response_tokens: int = of(0, "responses of fewer tokens, EOS among them, pay short_response_penalty [ours]")
    short_response_penalty: float = of(0.0, "taken from their reward, after the clip [torchtune: set to -3 under 18]")
    validation_prompts: int = of(64, "of the rl split, held out to choose the policy; at most a quarter [ours]")
    evaluate_every_iterations: int = of(10, "iterations between evaluations on them [ours]")
    max_kl_nats: float = of(10.0, "stop, and never keep a policy, above this KL a response on held-out prompts [ours]")
    patience_evaluations: int | None = of(None, "stop after so many without a better objective; null: never [ours]")
    max_skipped_in_a_row: int | None = of(None, "stop when more minibatches in a row are skipped; null: never [ours]")
    min_entropy_nats: float = of(0.0, "stop when the policy's entropy a token falls below; 0: never [ours]")
    save_every_iterations: int = of(10, "iterations between checkpoints [ours]")
    keep_checkpoints: int = of(2, "newest ones kept, each with the best policy so far [ours]")
    log_to: LogTo = _log_to()
    seed: int = of(0, "of prompts, sampling and minibatches [script]")

    def __post_init__(self):
        _check_log_to(self.log_to)
        _check_full(self.tune, self.precision)
        if self.compile and self.precision in ("int8", "nf4"):
            raise ValueError(f"compile goes with precision fp32, mixed or bf16: the products of {self.precision} "
                             f"cannot be traced")
        if self.lora.dropout:
            raise ValueError("lora.dropout must be 0 in ppo: old and new log-probabilities must come from one function")
        if self.top_p < 1 and not self.top_k:
            raise ValueError("top_p alone may keep any number of tokens, and each must be scored under the old, new "
                             "and the reference policy: set top_k, too, or leave top_p at 1")
        _check_rewards(self.rewards, self.reward_scaling)
        _divides(self.minibatch_prompts, self.rollout_prompts, "minibatch_prompts", "rollout_prompts")
        _divides(self.microbatch_prompts, self.minibatch_prompts, "microbatch_prompts", "minibatch_prompts")
        _check_patience(self.patience_evaluations)
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


@dataclass(frozen=True)
class Evaluate:
    """Held-out comparison of reward model with baselines, and of policies with each other."""

    max_pairs: int = of(20_000, "held-out pairs that the reward model is judged on, at most [ours]")
    surface_pairs: int = of(5_000, "pairs of the reward split that the logistic regression learns from, at most [ours]")
    prompts: int = of(256, "held-out prompts that every policy answers [ours]")
    best_of: tuple[int, ...] = of(
        (2, 4, 8, 16), "best-of-n of SFT for each n; the largest is how many answers SFT gives to a prompt; "
        "empty: none [ours]")
    batch_prompts: int = of(64, "prompts a forward pass [ours]")
    max_prompt_tokens: int = of(512, "as in ppo [script]")
    max_response_tokens: int = of(128, "as in ppo [run]")
    temperature: float = of(1.0, "of all policies [script]")
    bootstrap_samples: int = of(2000, "for 95 % intervals, by question [ours]")
    gold: str | None = of(None, "'package.module:function' over (questions, responses) that knows the truth [ours]")
    scorers: tuple[str, ...] = of(
        (), "further scores of all policies, as sources in ppo.rewards that read text: 'package.module:function', "
        "has_code, ...; a rise in one counts in the verdict as a rise in reward [ours]")
    seed: int = of(0, "of sampling and bootstrap [ours]")

    def __post_init__(self):
        if any(n < 2 for n in self.best_of) or len(set(self.best_of)) < len(self.best_of):
            raise ValueError(f"best_of must be numbers of 2 or more, none twice, not {self.best_of}")
        if "model" in self.scorers or len(set(self.scorers)) < len(self.scorers):
            raise ValueError(f"scorers come beside the reward model, and none twice, not {', '.join(self.scorers)}")


@dataclass(frozen=True)
class Report:
    """One page for people."""

    side_by_side: int = of(40, "questions shown with all answers [ours]")
    figure_width_inches: float = of(7.0, "of each figure [ours]")


@dataclass(frozen=True)
class Recipe:
    """A whole run."""

    name: str = of("stackllama", "results go to results/<name>/")
    dump: tuple[str, ...] = of((), "folders, Posts.xml files, .7z archives, parquet folders or hub ids")
    posts: Posts = of(Posts(), "dump to posts")
    pairs: Pairs = of(Pairs(), "posts to pairs")
    base: Base = of(Base(), "the pretrained model")
    sft: Sft = of(Sft(), "supervised fine-tuning")
    reward: Reward = of(Reward(), "reward model")
    merge: Merge = of(Merge(), "adapter into base, for sft, reward and ppo")
    ppo: Ppo = of(Ppo(), "policy optimisation")
    evaluate: Evaluate = of(Evaluate(), "held-out evaluation")
    report: Report = of(Report(), "the page at the end")


def load(path: str | Path, overrides: dict | None = None) -> Recipe:
    """Recipe file, then overrides laid over it. A file that gives no name is named after itself.

    Keys beside the sections are `seed` and `log_to`, which every section that has them takes.
    Values of `overrides` may be text (Snakemake hands nested --config values over as strings): they are converted
    by the field's type. Values of the file may not. Raises SettingsError with one line for people.
    """
    recipe = _with_shared(Recipe(name=Path(path).stem), _read_yaml(Path(path)), str(path), from_text=False)
    return _with_shared(recipe, overrides or {}, "--config", from_text=True)


def _with_shared(recipe: Recipe, values: dict, where: str, from_text: bool) -> Recipe:
    values = dict(values)
    for key in SHARED:
        if (value := values.pop(key, None)) is not None:
            taking = [f.name for f in fields(recipe) if hasattr(getattr(recipe, f.name), key)]
            recipe = replace(recipe, **{
                name: laid_over(getattr(recipe, name), {key: value}, where, from_text=from_text) for name in taking})
    return laid_over(recipe, values, where, from_text=from_text)


def _read_yaml(path: Path) -> dict:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(sorted(str(p) for p in Path("configs").glob("*.yaml")))
        raise SettingsError(f"no recipe at {path}; there are: {known}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values or {}, dict):
        raise SettingsError(f"{path} must map names to values")
    return values or {}


def named(kind: type, settings: object) -> dict:
    """The settings that the dataclass `kind` has fields for."""
    return {field.name: getattr(settings, field.name) for field in fields(kind)}


def section(recipe: Recipe, name: str) -> dict:
    """One section as plain values: what a Snakemake rule holds in `params` and a manifest records.

    Without what changes nothing of the result, so that a change of it makes nothing stale.
    """
    return deciding(getattr(recipe, name))


def published(name: str) -> list[tuple]:
    """Every setting of one section that a manifest records: dotted name, default as a plain value, meaning with its
    source."""
    settings = getattr(Recipe(), name)
    return [leaf for leaf in leaves(settings) if leaf[0] not in watching(settings)]
