"""Run TRL's RewardTrainer, SFTTrainer or DPOTrainer on the benchmark's work, in one process.

Nothing from stages/ is imported. The token ids are those that our trainer reads; collator, loss, packing and the rest
are TRL's. Gradient checkpointing, on by default in TRL, is off, as in our trainer. PEER_F32=medium and
PEER_ATTN=eager tune it for a CPU. Precision mixed is its bf16=True, by autocast; bf16 has bf16 weights as well.
"""

import os
import tempfile
import warnings
from collections.abc import Callable

import torch
from datasets import Dataset, disable_caching, disable_progress_bars
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, logging
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from benchmarks.ppo.workload import parse_worker_arguments, set_threads, write_results
from benchmarks.training.workload import DOCUMENTS, MODEL, PAIRS, WARM_UP_STEPS, Meter, Work

PACKAGES = ("trl", "transformers", "peft", "torch", "accelerate", "datasets")


def train_reward(work: Work, meter: Meter):
    """Train on all pairs once; return the model."""
    def read(inputs: dict) -> None:
        meter.record_loss(len(inputs["input_ids"]) // 2, _texts(inputs), inputs["input_ids"].numel())

    data = Dataset.from_parquet(str(work.path(PAIRS)), keep_in_memory=True)
    few = data.select(range(min(len(data), WARM_UP_STEPS * work.batch)))
    model = _load(work, AutoModelForSequenceClassification, num_labels=1)
    lora = _lora(work, task_type="SEQ_CLS", modules_to_save=["score"])
    return _time(work, meter, (RewardTrainer, RewardConfig, {}), model, lora, read, few, data)


class TokenizedDPOTrainer(DPOTrainer):
    """TRL's trainer on pairs that are token ids already."""

    def _prepare_dataset(self, dataset, *_, **__):
        return dataset


def train_dpo(work: Work, meter: Meter):
    """Train on all pairs once, with the reference computed in each step; return the model."""
    def read(inputs: dict) -> None:
        meter.record_loss(len(inputs["input_ids"]) // 2, _texts(inputs), inputs["input_ids"].numel())

    data = Dataset.from_parquet(str(work.path(PAIRS)), keep_in_memory=True)
    few = data.select(range(min(len(data), WARM_UP_STEPS * work.batch)))
    model = _load(work, AutoModelForCausalLM)
    kind = (TokenizedDPOTrainer, DPOConfig, {"beta": work.beta})
    return _time(work, meter, kind, model, _lora(work, task_type="CAUSAL_LM"), read, few, data)


def train_sft(work: Work, meter: Meter, packing: str):
    """Train on the packed documents once; return the model."""
    def read(inputs: dict) -> None:
        labels = int((inputs["labels"][:, 1:] != -100).sum())
        meter.record_loss(labels, _texts(inputs), inputs["input_ids"].numel())

    documents = Dataset.from_file(str(work.path(DOCUMENTS)))
    data = Dataset.from_dict({"input_ids": documents["input_ids"][:]})  # TRL cannot pack Arrow's large lists
    few = data.select(range(min(len(data), WARM_UP_STEPS * work.batch)))
    extra = {"packing": True, "packing_strategy": packing}
    model = _load(work, AutoModelForCausalLM)
    lora = _lora(work, task_type="CAUSAL_LM")
    return _time(work, meter, (SFTTrainer, SFTConfig, extra), model, lora, read, few, data)


def _load(work: Work, kind, **more):
    if "PEER_ATTN" in os.environ:
        more["attn_implementation"] = os.environ["PEER_ATTN"]
    torch.manual_seed(work.seed)
    dtype = torch.bfloat16 if work.precision == "bf16" else torch.float32
    return kind.from_pretrained(work.path(MODEL), dtype=dtype, **more)


def _lora(work: Work, **more) -> LoraConfig:
    return LoraConfig(r=work.rank, lora_alpha=work.alpha, lora_dropout=work.dropout, bias="none",
                      target_modules=list(work.targets) or None, **more)


def _texts(inputs: dict) -> list:
    """Return the token ids of each sequence, without padding."""
    ids = inputs["input_ids"]
    if "attention_mask" in inputs:
        return [row[keep.bool()] for row, keep in zip(ids, inputs["attention_mask"], strict=True)]
    return list(torch.tensor_split(ids[0], inputs["cu_seq_lens_q"][1:-1].long()))


def _time(work: Work, meter: Meter, kind: tuple, model, lora: LoraConfig, read: Callable, few, data):
    """Run two trainers on one model, the first for the warm-up. kind: trainer class, config class, extra settings."""
    trainer_kind, config_kind, extra = kind
    tokenizer = AutoTokenizer.from_pretrained(work.path(MODEL))

    def pass_over(items, learning_rate: float) -> None:
        nonlocal model
        if issubclass(trainer_kind, DPOTrainer) and isinstance(model, PeftModel):
            model = model.unload()  # a trained adapter would become the reference, which costs more than none
        with tempfile.TemporaryDirectory() as folder:
            config = config_kind(
                output_dir=folder, per_device_train_batch_size=work.batch, num_train_epochs=1,
                learning_rate=learning_rate, lr_scheduler_type=work.schedule, weight_decay=work.weight_decay,
                max_length=work.length, seed=work.seed, use_cpu=True, bf16=work.precision != "fp32",
                gradient_checkpointing=False, save_strategy="no", report_to=[], disable_tqdm=True,
                dataloader_pin_memory=False, **extra)
            adapter = {} if isinstance(model, PeftModel) else {"peft_config": lora}
            trainer = trainer_kind(model, args=config, train_dataset=items, processing_class=tokenizer, **adapter)
            loss = trainer.compute_loss

            def recorded_loss(model, inputs, *more, **named):
                read(inputs)
                return loss(model, inputs, *more, **named)

            trainer.compute_loss = recorded_loss
            trainer.train()
            model = trainer.model

    meter.time(pass_over, few, data, work.learning_rate)
    return model


def main() -> None:
    """Time one of TRL's trainers, and write its figures."""
    args = parse_worker_arguments(__doc__, Work, form=(str, "pair"), adapter=(str, ""))
    meter = Meter()
    forms = {"pair": train_reward, "dpo": train_dpo}
    model = forms[args.form](args.shape, meter) if args.form in forms else train_sft(args.shape, meter, args.form)
    write_results(args.out, meter.clock, PACKAGES, **meter.read)
    if args.adapter:
        model.save_pretrained(args.adapter)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    disable_caching()
    disable_progress_bars()
    set_threads()
    main()
