"""Load the prompts that a policy is trained on, and those that select the best policy."""

from pathlib import Path

import torch

from stages.recipe.sections.policy_gradient import PolicyGradient
from stages.stackexchange.pairs.table import read_best_rows
from stages.stackexchange.prompt import encode_prompt
from stages.stackexchange.prompt_file import read_own_prompts


def load_prompts(
    config: PolicyGradient, tokenizer, pairs: Path | None, stage: str = "ppo", *, own: Path | None = None
) -> tuple[list[list[int]], list[list[int]], int]:
    """Load the questions of the rl split, each once, as training and validation prompts; count the too long ones.

    own: a file or folder of the user's prompts in place of pairs.
    """
    texts = read_own_prompts(own, config.prompt_column) if own else [
        row["question"] for row in read_best_rows(pairs, "rl")]
    prompts = [encode_prompt(tokenizer, text, config.prompt_template) for text in texts]
    fitting = [prompt for prompt in prompts if len(prompt) <= config.max_prompt_tokens]
    too_long = len(prompts) - len(fitting)
    validation = min(config.validation_prompts, len(fitting) // 4)  # a small site trains on most of its prompts
    if not validation:
        where = "" if own else " in its rl split"
        raise ValueError(f"{own or pairs} has {len(fitting)} prompts of at most {config.max_prompt_tokens} tokens"
                         f"{where} ({too_long} are longer): {stage} needs at least 4")
    order = torch.randperm(len(fitting), generator=torch.Generator().manual_seed(config.seed)).tolist()
    shuffled = [fitting[i] for i in order]
    return shuffled[validation:], shuffled[:validation], too_long
