"""Load the prompts that a policy is trained on, and those that select the best policy."""

from pathlib import Path

import torch

from stages.recipe.sections.policy_gradient import PolicyGradient
from stages.stackexchange.pairs.table import read_best_rows
from stages.stackexchange.prompt import prompt_ids


def load_prompts(
    config: PolicyGradient, tokenizer, pairs: Path, stage: str = "ppo"
) -> tuple[list[list[int]], list[list[int]], int]:
    """Load the questions of the rl split, each once, as training and validation prompts; count the too long ones."""
    prompts = [prompt_ids(tokenizer, row["question"]) for row in read_best_rows(pairs, "rl")]
    fitting = [prompt for prompt in prompts if len(prompt) <= config.max_prompt_tokens]
    too_long = len(prompts) - len(fitting)
    validation = min(config.validation_prompts, len(fitting) // 4)  # a small site trains on most of its prompts
    if not validation:
        raise ValueError(f"{pairs} has {len(fitting)} prompts of at most {config.max_prompt_tokens} tokens in its rl "
                         f"split ({too_long} are longer): {stage} needs at least 4")
    order = torch.randperm(len(fitting), generator=torch.Generator().manual_seed(config.seed)).tolist()
    shuffled = [fitting[i] for i in order]
    return shuffled[validation:], shuffled[:validation], too_long
