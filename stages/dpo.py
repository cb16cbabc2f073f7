"""DPO: train the SFT model on preference pairs, without a reward model and without sampling.

    python -m stages.dpo --recipe configs/demo.yaml --policy results/demo/sft-merged \\
        --pairs results/demo/pairs --out results/demo/dpo

It reads the pairs that the reward model is trained on, the reward split without the same held-out questions. The
reference's log-probabilities are computed once, before training, and stored. The artifact is the policy with the lowest
loss on the held-out pairs, which may be the SFT model itself. `loss: ipo` trains IPO.
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

from dataclasses import asdict
from pathlib import Path

from stages.artifacts.artifact import RunContext
from stages.cards.adapter_card import write_adapter_cards
from stages.evaluation.pair_accuracy import HeldOutPairs, draw_held_out_pairs
from stages.modeling.pretrained import save_adapter, save_model
from stages.modeling.tokenizer import prepare_tokenizer
from stages.modeling.trainable import TrainableSettings, load_trainable_causal
from stages.preference.logprobs import collate_rows
from stages.preference.loss import PreferenceLoss
from stages.preference.reference import check_start, compute_reference
from stages.preference.validation import Validation
from stages.recipe.recipe import select_settings
from stages.recipe.sections.dpo import Dpo
from stages.reward_modeling.dataset import Example, PairSplit
from stages.runtime.files import write_json
from stages.runtime.stage_lines import print_line
from stages.training.loggers import TrainingLogger, open_logger
from stages.training.trainer import TrainerSettings, remove_checkpoints, train

SPLIT = "reward"
REFERENCE, VALIDATION_REFERENCE = "reference.parquet", "validation_reference.parquet"
STARTUP = "startup.json"


def run(config: Dpo, out: Path, *, policy: Path, pairs: Path, context: RunContext | None = None
        ) -> dict[str, float]:
    """Fill `out` with a PEFT adapter or the whole model, the tokenizer, startup.json, the reference's log-probabilities
    and the series history and samples .jsonl; return the metrics of the manifest."""
    tokenizer = prepare_tokenizer(policy)
    parts, limit = PairSplit(pairs, SPLIT, config.validation_share), config.max_length_tokens
    training, dropped = parts.training_examples(
        tokenizer, max_length_tokens=limit, max_pairs=config.train_pairs, by_question=config.batching == "question")
    validation = draw_held_out_pairs(
        parts.validation_rows(), tokenizer, max_pairs=config.train_pairs, max_tokens=limit, seed=config.seed)
    model = load_trainable_causal(
        TrainableSettings(**select_settings(TrainableSettings, config)), policy, tokenizer,
        max_length_tokens=limit, stage="dpo")
    with open_logger(config.log_to, out, "dpo", context, asdict(config)) as logger:
        history = train_policy(config, out, model, training, validation, logger)
    (save_adapter if config.tune == "lora" else save_model)(model, tokenizer, out)
    write_adapter_cards(out, policy, pairs)
    remove_checkpoints(out)
    return {"pairs": sum(len(example.pairs) for example in training),
            "answers": sum(len(example.answers) for example in training), "dropped_over_length": dropped,
            "validation_pairs": len(validation.rows), **best_validation(history)}


def train_policy(config: Dpo, out: Path, model, training: list[Example], held_out: HeldOutPairs,
                 logger: TrainingLogger) -> list[dict]:
    """Compute the reference, check the start, and train the model in place; return the history."""
    loss = PreferenceLoss(**select_settings(PreferenceLoss, config))
    rows = compute_reference(model, training, config.precision, out / REFERENCE, "dpo: reference")
    report = check_start(model, rows, loss, config.precision)
    print_line(f"dpo: check  policy equals reference  {report['largest_difference_nats_per_token']:.2g} nats a token, "
               f"loss {report['loss']:.4f} (expected {report['expected_loss']:.4f})  ok")
    write_json(out / STARTUP, report)
    evaluation = None
    if held_out.rows:
        validation = Validation(model, held_out, loss, config.precision, out / VALIDATION_REFERENCE, logger)
        evaluation = validation.evaluation(config.save_every_steps)
    settings = TrainerSettings.from_section(
        config, batch=config.batch_pairs, microbatch=config.microbatch_pairs, schedule="cosine")
    return train(model, rows, collate_rows, lambda items: loss.summed_loss(model, items, config.precision), settings,
                 out, "dpo", evaluation, logger)


def best_validation(history: list[dict]) -> dict[str, float]:
    """Return the validation metrics of the state that is saved, and its step; none if no pair is held out."""
    rows = [row for row in history if "validation_preference_loss" in row]
    if not rows:
        return {}
    best = min(rows, key=lambda row: row["validation_preference_loss"])
    validation = {name: value for name, value in best.items() if name.startswith("validation_")}
    return {"best_step": best["step"], "steps": history[-1]["step"], **validation}
