import pytest

from stages.recipe.recipe import load_recipe
from stages.recipe.sections.shared import UNLIMITED, count_units

# What processes can share of a step in the shipped recipes: 1 leaves all but one core of a CPU to threads.
EXPECTED = {
    "demo": {"base": 2, "sft": 2, "reward": 2, "ppo": 4, "rloo": 2, "grpo": 2, "dpo": 2, "ilql": 2,
             "expert_iteration": 2, "best_of_n": UNLIMITED, "evaluate": UNLIMITED},
    "smollm2": {"base": 1, "sft": 1, "reward": UNLIMITED, "ppo": 2, "evaluate": UNLIMITED},
    "stackllama_8x24gb": {"sft": 32, "reward": 32, "ppo": 64},
}


@pytest.mark.parametrize("name, section, expected", [
    (name, section, units) for name, sections in EXPECTED.items() for section, units in sections.items()])
def test_steps_of_the_shipped_recipes_have_so_many_units(name, section, expected):
    assert count_units(getattr(load_recipe(f"configs/{name}.yaml"), section)) == expected
