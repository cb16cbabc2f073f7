"""Load the prompts that a policy is trained on, and those that select the best policy.

Of a user's own prompts, those that are held out for the evaluation are neither.
"""

from pathlib import Path

from stages.generation.prompts import draw_prompts, split_prompts
from stages.recipe.sections.policy_gradient import PolicyGradient
from stages.runtime.stage_lines import print_line
from stages.stackexchange.pairs.table import read_best_rows
from stages.stackexchange.prompt_file import hold_out_prompts, read_own_prompts


def load_prompts(
    config: PolicyGradient, tokenizer, pairs: Path | None, stage: str = "ppo", *, own: Path | None = None
) -> tuple[list[list[int]], list[list[int]], int]:
    """Load the questions of the rl split, each once, as training and validation prompts; count the too long ones.

    own: a file or folder of the user's prompts in place of pairs.
    """
    rows = _read_own_rows(config, own, stage) if own else read_best_rows(pairs, "rl")
    limit = config.max_prompt_tokens
    prompts = draw_prompts(
        rows, tokenizer, max_prompt_tokens=limit, seed=config.seed, template=config.prompt_template)
    training, validation = split_prompts(
        prompts, config.validation_prompts, max_prompt_tokens=limit,
        origin=str(own) if own else f"the rl split of {pairs}", stage=stage)
    return training.ids, validation.ids, prompts.over_length


def _read_own_rows(config: PolicyGradient, own: Path, stage: str) -> list[dict]:
    """Read the user's own prompts, without those that are held out for the evaluation."""
    prompts, held_out = hold_out_prompts(
        read_own_prompts(own, config.prompt_column), config.evaluation_prompts, config.seed)
    print_line(f"{stage}: {len(held_out)} of the {len(held_out) + len(prompts)} prompts are held out for the "
               f"evaluation")
    return [{"question": text} for text in prompts]
