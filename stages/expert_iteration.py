"""Expert iteration: sample responses from the policy, fine-tune on the best of them, and repeat.

    python -m stages.expert_iteration --recipe configs/demo.yaml --policy results/demo/sft-merged \\
        --reward results/demo/reward-merged --pairs results/demo/pairs --out results/demo/expert_iteration

The rounds are in rejection_sampling/rounds.py; packing, loss and optimization are SFT's. The artifact is the policy of
the round with the best score on held-out prompts. A resumed run equals the uninterrupted one bit for bit.
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from stages.artifacts.artifact import RunContext
from stages.cards.adapter_card import write_adapter_cards
from stages.evaluation.reward_model_check import check_reward_models
from stages.generation.prompts import Prompts, draw_prompts, split_prompts
from stages.modeling.adapters import active_adapter
from stages.modeling.load import load_causal
from stages.modeling.pretrained import save_adapter, save_model
from stages.modeling.tokenizer import prepare_tokenizer
from stages.modeling.trainable import TrainableSettings, load_trainable_causal
from stages.recipe.recipe import select_settings
from stages.recipe.sections.rejection_sampling import ExpertIteration
from stages.rejection_sampling.candidates import CandidateSettings, build_sampler
from stages.rejection_sampling.rounds import RoundLoop, RoundSettings
from stages.rewards import checked_models
from stages.rewards.shaping import ShapingSettings
from stages.runtime.stage_lines import print_line
from stages.stackexchange.pairs.table import read_best_rows
from stages.training import checkpoint
from stages.training.checkpoint_plan import check_training_space
from stages.training.loggers import open_logger
from stages.training.trainer import TrainerSettings

SPLIT = "rl"


def run(config: ExpertIteration, out: Path, *, policy: Path, reward: Path, pairs: Path,
        context: RunContext | None = None) -> dict[str, float | str]:
    """Fill `out` with the policy (a PEFT adapter or a whole model), the tokenizer and the series history and samples
    .jsonl; return the metrics of the manifest.

    policy: the SFT model, merged. reward: the merged reward model.
    """
    tokenizer = prepare_tokenizer(policy)
    measured = checked_models.load_held_out_accuracies([entry.source for entry in config.rewards], reward)
    shortfalls = check_reward_models(measured, config.require_reward, _say, "expert_iteration")
    prompts, validation = load_prompts(config, pairs, tokenizer)
    longest_tokens = config.max_prompt_tokens + config.max_response_tokens
    model = load_trainable_causal(
        TrainableSettings(**select_settings(TrainableSettings, config)), policy, tokenizer,
        max_length_tokens=max(config.sequence_length_tokens, longest_tokens), stage="expert_iteration")
    sampler = build_sampler(
        CandidateSettings(**select_settings(CandidateSettings, config)),
        ShapingSettings(**select_settings(ShapingSettings, config)), map(asdict, config.rewards), tokenizer,
        policy=policy, reward=reward, pairs=pairs, longest_tokens=longest_tokens,
        min_correlation=config.min_reward_correlation, cpu_kernels=config.cpu_kernels, say=_say)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    check_training_space(out, trained, optimizer="adamw", saves=2, keep_checkpoints=1, keeps_best=True, checkpoints=out)
    sampler.check_space(out, min(config.round_prompts or len(prompts.ids), len(prompts.ids)))
    sizes = {"batch": config.batch_sequences, "microbatch": config.microbatch_sequences}
    with open_logger(config.log_to, out, "expert_iteration", context, asdict(config), step_name="round") as logger:
        loop = RoundLoop(
            model, lambda: _open_reference(config, policy, model), sampler,
            RoundSettings(**select_settings(RoundSettings, config)),
            TrainerSettings.from_section(config, **sizes, schedule="cosine"), prompts=prompts, validation=validation,
            tokenizer=tokenizer, logger=logger, out=out, say=_say)
        loop.run()
    (save_adapter if config.tune == "lora" else save_model)(model, tokenizer, out)
    write_adapter_cards(out, policy, pairs)
    checkpoint.delete_checkpoints(out)
    return {
        "best_round": loop.best["round"], "rounds": loop.round, "stopped_early": loop.stopped_early,
        "validation_reward": loop.best["reward"], "validation_kl": loop.best["kl"],
        "validation_eos_rate": loop.best["eos_rate"], "prompts": len(prompts.ids),
        "prompts_over_length": prompts.over_length,
        **({"reward_model_shortfall": "; ".join(shortfalls)} if shortfalls else {})}


def load_prompts(config: ExpertIteration, pairs: Path, tokenizer) -> tuple[Prompts, Prompts]:
    """Load the questions of the rl split as training and validation prompts: the same held-out ones as PPO's."""
    limit = config.max_prompt_tokens
    prompts = draw_prompts(read_best_rows(pairs, SPLIT), tokenizer, max_prompt_tokens=limit, seed=config.seed)
    training, validation = split_prompts(prompts, config.validation_prompts, max_prompt_tokens=limit,
                                         origin=f"the {SPLIT} split of {pairs}", stage="expert_iteration")
    count = len(training.ids)
    _say(f"{count} prompts, {len(validation.ids)} more for validation; at most {config.rounds} rounds of {config.n} "
         f"responses each to {min(config.round_prompts or count, count)} prompts")
    return training, validation


@contextmanager
def _open_reference(config: ExpertIteration, policy: Path, model) -> Iterator:
    """Yield the SFT model: the policy without its adapter or, where all weights are trained, loaded for the block."""
    if config.tune == "full":
        yield load_causal(policy, config.precision, config.cpu_kernels)
        return
    with active_adapter(model, None):
        yield model


def _say(text: str) -> None:
    print_line(f"expert_iteration: {text}")
