"""Settings that earlier versions had, with advice for a recipe that names one."""

from typing import Any, NamedTuple

NOT_FIXED = object()
GPU_ADVICE = "leave it out, docs/gpu.md says what it did"
LEXICAL_ADVICE = "word counts are a baseline of evaluate and a reward source, ppo.rewards: [{source: lexical}]"


class RemovedSetting(NamedTuple):
    """What a user who names the setting does instead, and the value with which this version always computes.

    An artifact or a recipe of an earlier version that has the fixed value is read as one without the setting.
    """

    advice: str
    fixed_value: Any = NOT_FIXED


NO_EVIDENCE = "no recipe set it, and no measurement was about it"
REMOVED_SETTINGS = {
    "score_length": RemovedSetting("give the reward model sampled pairs, reward.sampled_questions", True),
    "compile": RemovedSetting(NO_EVIDENCE, False),
    "top_k": RemovedSetting(f"{NO_EVIDENCE}; rollouts are sampled from the whole distribution", 0),
    "top_p": RemovedSetting(f"{NO_EVIDENCE}; rollouts are sampled from the whole distribution", 1.0),
    "short_response_tokens": RemovedSetting("add a function or the measure response_tokens to rewards", 0),
    "short_response_penalty": RemovedSetting("add a function or the measure response_tokens to rewards", 0.0),
    "max_skipped_in_a_row": RemovedSetting(f"{NO_EVIDENCE}; skipped minibatches are in the history", None),
    "min_entropy_nats": RemovedSetting(f"{NO_EVIDENCE}; the entropy is in the history", 0.0),
    "cuda_graphs": RemovedSetting(GPU_ADVICE, False),
    "liger_kernels": RemovedSetting(GPU_ADVICE, "off"),
    "sampling_engine": RemovedSetting(GPU_ADVICE, "own"),
    "max_sampler_difference_nats": RemovedSetting(GPU_ADVICE, None),
    "optimizer_in_backward": RemovedSetting("to save memory, lower microbatch_prompts or take a smaller optimizer"),
    "train_new_tokens": RemovedSetting("grow the base first, by Transformers' resize_token_embeddings", False),
    "lexical_buckets": RemovedSetting(LEXICAL_ADVICE),
    "lexical_penalty": RemovedSetting(LEXICAL_ADVICE),
    "max_post_characters": RemovedSetting(NO_EVIDENCE, 200_000),
    "max_post_tags": RemovedSetting(NO_EVIDENCE, 5_000),
    "max_post_depth": RemovedSetting(NO_EVIDENCE, 100),
    "max_post_blanks": RemovedSetting(NO_EVIDENCE, 1_000),
    "initializer_range": RemovedSetting(NO_EVIDENCE, 0.05),
    "warmup_share": RemovedSetting(NO_EVIDENCE, 0.05),
    "two_q_heads": RemovedSetting(NO_EVIDENCE, True),
    "surface_pairs": RemovedSetting(NO_EVIDENCE, 5_000),
    "figure_width_inches": RemovedSetting(NO_EVIDENCE, 7.0),
    "keep_checkpoints": RemovedSetting(NO_EVIDENCE, 2),
}


def drop_removed(values: dict) -> dict:
    """Return the settings of an earlier version without the removed ones that have their fixed value."""
    return {name: drop_removed(value) if isinstance(value, dict) else value for name, value in values.items()
            if name not in REMOVED_SETTINGS or value != REMOVED_SETTINGS[name].fixed_value}
