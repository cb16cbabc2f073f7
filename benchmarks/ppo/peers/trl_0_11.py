"""Time legacy TRL's PPOTrainer (0.11.4), used as in StackLLaMA's rl_training.py, in its own environment.

Generation batch: 4 is PPOTrainer.generate's default, as in the published script; the whole batch is faster.
PEER_F32=medium and PEER_ATTN=eager tune it for a CPU. --precision bf16 gives it bf16 weights, as on an accelerator, and
mixed gives it fp32 weights with accelerate's mixed precision.
"""

import os
import tempfile
import warnings

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import logging, pipeline
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

from benchmarks.ppo import workload

PACKAGES = ("trl", "transformers", "peft", "torch", "accelerate", "datasets")
ACCELERATED = torch.cuda.is_available()


def load(shape: workload.Shape, tokenizer, precision: str):
    """Load the policy with its value head, and the reward model as a pipeline on text."""
    dtype = torch.bfloat16 if ACCELERATED or precision == "bf16" else torch.float32
    options = {"attn_implementation": os.environ["PEER_ATTN"]} if "PEER_ATTN" in os.environ else {}
    with tempfile.TemporaryDirectory() as folder:
        workload.language_model(shape).to(dtype).save_pretrained(f"{folder}/lm")
        workload.reward_model(shape).to(dtype).save_pretrained(f"{folder}/rm")
        model = AutoModelForCausalLMWithValueHead.from_pretrained(
            f"{folder}/lm", torch_dtype=dtype, peft_config=LoraConfig(task_type="CAUSAL_LM", **workload.LORA),
            **options)
        scorer = pipeline("sentiment-analysis", model=f"{folder}/rm", tokenizer=tokenizer, torch_dtype=dtype,
                          device=0 if ACCELERATED else "cpu")
    return model, scorer


def build_trainer(shape: workload.Shape, steps: int, model, tokenizer, precision: str) -> PPOTrainer:
    rows = [prompt for step in workload.prompts(shape, 1 + steps) for prompt in step]
    data = Dataset.from_dict({"input_ids": rows, "query": tokenizer.batch_decode(rows)}).with_format("torch")
    config = PPOConfig(model_name="x", learning_rate=workload.LEARNING_RATE, batch_size=shape.batch,
                       mini_batch_size=shape.minibatch, gradient_accumulation_steps=1, ppo_epochs=shape.epochs, seed=0,
                       init_kl_coef=workload.KL_COEFFICIENT, adap_kl_ctrl=True, optimize_cuda_cache=True,
                       accelerator_kwargs={"mixed_precision": "bf16"} if precision == "mixed" else {})
    return PPOTrainer(config, model, ref_model=None, tokenizer=tokenizer, dataset=data,
                      data_collator=lambda rows: {name: [row[name] for row in rows] for name in rows[0]})


def main() -> None:
    arguments = workload.parse_worker_arguments(__doc__, generation_batch=(int, 4), precision=(str, "fp32"))
    shape, tokenizer = arguments.shape, workload.word_tokenizer(arguments.shape)
    model, scorer = load(shape, tokenizer, arguments.precision)
    clock = workload.Clock()
    trainer = build_trainer(shape, arguments.steps, model, tokenizer, arguments.precision)
    trainer.batched_forward_pass = clock.wrap(
        trainer.batched_forward_pass, lambda _: "optimise" if torch.is_grad_enabled() else "old and reference")
    trainer.train_minibatch = clock.wrap(trainer.train_minibatch, lambda _: "optimise")
    generation = {"top_k": 0.0, "top_p": 1.0, "do_sample": True, "pad_token_id": workload.PAD,
                  "eos_token_id": workload.NO_EOS, "max_new_tokens": shape.response, "remove_padding": False}
    scoring = {"return_all_scores": True, "function_to_apply": "none", "batch_size": 16, "truncation": True}
    clock.start_step()
    for batch in trainer.dataloader:
        queries = batch["input_ids"]
        with clock.phase("generate"):
            responses = trainer.generate(
                queries, return_prompt=False, batch_size=arguments.generation_batch, **generation)
        assert all(len(response) == shape.response for response in responses)
        with clock.phase("reward"):
            answers = tokenizer.batch_decode(responses, skip_special_tokens=True)
            texts = [f"{query} {answer}" for query, answer in zip(batch["query"], answers, strict=True)]
            rewards = [torch.tensor(scores[0]["score"]) for scores in scorer(texts, **scoring)]
        trainer.step(queries, responses, rewards)
        clock.end_step()
    workload.write_results(arguments.out, clock, PACKAGES)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    workload.set_threads()
    main()
