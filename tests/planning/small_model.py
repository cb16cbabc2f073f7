"""A small configuration, and small sections, that the tests of the plan share."""

import transformers as hf

from stages.planning.data_size import DataSize
from stages.planning.hardware import CARDS, Hardware
from stages.planning.other_costs import plan_stage
from stages.planning.shapes import Shape, read_shape
from stages.planning.stage_plan import Run
from stages.recipe.sections.dpo import Dpo
from stages.recipe.sections.ilql import Ilql
from stages.recipe.sections.models import Lora
from stages.recipe.sections.policy_gradient import Grpo
from stages.recipe.sections.ppo import Ppo
from stages.recipe.sections.reward import Reward
from stages.recipe.sections.sft import Sft

HARDWARE = Hardware(CARDS[0], 1, 0.4)
REWARD = Reward(precision="fp32", max_length_tokens=96, microbatch_pairs=2)
LENGTHS = {"max_prompt_tokens": 128, "max_response_tokens": 32, "precision": "fp32"}
SECTIONS = {
    "sft": Sft(precision="fp32", lora=Lora(dropout=0.0), max_steps=10, sequence_length_tokens=96,
               microbatch_sequences=2),
    "reward": REWARD,
    "dpo": Dpo(precision="fp32", max_length_tokens=96, microbatch_pairs=2),
    "ilql": Ilql(precision="fp32", max_length_tokens=96, microbatch_answers=2),
    "ppo": Ppo(**LENGTHS, rollout_prompts=8, minibatch_prompts=8, microbatch_prompts=2),
    "grpo": Grpo(**LENGTHS, rollout_prompts=4, minibatch_prompts=4, microbatch_prompts=1),
}


def small_config(layers: int = 2) -> hf.PretrainedConfig:
    """Return the shape of a small LLaMA."""
    return hf.LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=344, num_hidden_layers=layers,
                          num_attention_heads=4, max_position_embeddings=512, tie_word_embeddings=True)


def small_shape(layers: int = 2) -> Shape:
    """Return the same as the plan reads it."""
    return read_shape(small_config(layers).to_dict())


def plan(stage: str, settings, hardware: Hardware = HARDWARE, layers: int = 2):
    """Plan one training on the small model."""
    return plan_stage(stage, Run(small_shape(layers), hardware, DataSize(), REWARD), settings)
