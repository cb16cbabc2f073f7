"""Both ends of every numeric range of the recipe: a tiny run of the stage finishes, or is refused in one line.

Values that leave the others their meaning run together: all lower ends of a stage, then all upper ends. What is
refused, or may make training diverge, runs alone. `name-` is the lower end of a setting, `name+` the upper one.
"""

import math

import pytest

from stages.command_line.failures import describe_failure
from stages.recipe.sections.evaluate import Report
from tests.helpers import finished_run, tiny_stages
from tests.helpers.ranges import list_ranges

SMALL = 1e-12  # stands for an end that is excluded
ALONE = {
    "posts": "min_answers+ max_row_bytes- max_question_bytes-",
    "pairs": "min_score_gap+ min_question_length+ min_answer_length+ max_question_length- max_answer_length- "
             "evaluation_share-",
    "base": "scratch.hidden_size- scratch.heads+ scratch.max_position_tokens- scratch.learning_rate+",
    "sft": "lora.alpha+ lora.dropout+ learning_rate+ max_answer_tokens-",
    "reward": "layers- layers+ head_penalty- head_penalty+ lora.alpha+ lora.dropout+ learning_rate+ "
              "log_probability_weight- log_probability_weight+ centring_weight+ language_model_weight+ "
              "max_length_tokens- train_pairs- validation_share+",
    "merge": "max_logit_difference- max_perplexity_change- max_accuracy_change-",
    "ppo": "lora.alpha+ lora.dropout+ max_prompt_tokens- min_response_tokens+ stop_ids+ temperature- "
           "learning_rate+ critic_learning_rate+ value_coefficient+ kl_coefficient+ responses_per_prompt+ "
           "evaluation_prompts- evaluation_prompts+",
    "dpo": "lora.alpha+ lora.dropout+ learning_rate+ beta- beta+ max_length_tokens- train_pairs- validation_share+",
    "best_of_n": "max_prompt_tokens- temperature-",
    "expert_iteration": "lora.alpha+ lora.dropout+ max_prompt_tokens- temperature- learning_rate+ keep_above- "
                        "keep_above+ keep_share- keep_share+ keep_draws-",
    "ilql": "lora.alpha+ lora.dropout+ cql_scale+ awac_scale+ awac_beta+ sampling_beta+ max_length_tokens- "
            "learning_rate+",
    "evaluate": "max_prompt_tokens- temperature-",
}
# Lengths of a run, and sizes of a model or a batch: hours, or more memory than there is, which is one line.
NOT_RUN = {
    "base": "scratch.hidden_size+ scratch.intermediate_size+ scratch.layers+",
    "sft": "lora.r+ max_steps+ epochs+",
    "reward": "lora.r+ members+ epochs+ max_sampled_tokens+",
    "ppo": "lora.r+ iterations+ rollout_prompts+ minibatch_prompts+ microbatch_prompts+ epochs+ max_response_tokens+",
    "dpo": "lora.r+ max_steps+ epochs+",
    "best_of_n": "n+ max_response_tokens+ bootstrap_samples+",
    "expert_iteration": "rounds+ n+ keep_draws+ max_response_tokens+ lora.r+ epochs+",
    "ilql": "lora.r+ max_steps+ epochs+",
    "evaluate": "best_of+ max_response_tokens+ bootstrap_samples+",
}
# What the others need beside them.
BESIDE = {
    "base-": {"scratch.epochs": 1e6},
    "base+": {"scratch.epochs": SMALL},
    "sft-": {"epochs": SMALL},
    "sft+": {"max_steps": 1},
    "dpo+": {"max_steps": 1},
    "ilql-": {"epochs": SMALL},
    "ilql+": {"max_steps": 1},
    "reward-": {"sampled_questions": 1},
    "reward+": {"max_sampled_tokens": 4},
    **{f"reward {name}": {"tune": "head", "pooling": "mean"}
       for name in ("layers-", "layers+", "head_penalty-", "head_penalty+")},
    **{f"expert_iteration keep_{name}{end}": {"keep": keep}
       for name, keep in (("above", "above"), ("share", "share"), ("draws", "tilted")) for end in "-+"},
    "best_of_n+": {"reward_combine": "mean_minus_std"},
    "expert_iteration+": {"reward_combine": "mean_minus_std"},
    "ppo+": {"reward_combine": "mean_minus_std"},
    "ppo responses_per_prompt+": {"max_response_tokens": 1},
}
REPORTS = {"-": Report(side_by_side=0), "+": Report(side_by_side=10**12)}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return tiny_stages.save_inputs(tmp_path_factory.mktemp("inputs"))


def value_at(stage: str, name: str, end: str) -> object:
    """Return the value at an end of a range, or the nearest one that is in it; a list where the setting is one."""
    within = list_ranges(tiny_stages.TINY[stage])[name]
    value = within.low if end == "-" else within.high
    if within.above and end == "-":
        value = SMALL
    if within.below and end == "+":
        value = math.nextafter(within.high, 0)
    return [value] if name in ("temperatures", "final_temperatures", "best_of", "stop_ids") else value


def ends_together(stage: str, end: str) -> dict[str, object]:
    """Return the settings of a run of all lower or all upper ends."""
    apart = {*ALONE.get(stage, "").split(), *NOT_RUN.get(stage, "").split()}
    names = [name for name in list_ranges(tiny_stages.TINY[stage]) if f"{name}{end}" not in apart]
    return {name: value_at(stage, name, end) for name in names} | BESIDE.get(stage + end, {})


@pytest.mark.parametrize("end", ["-", "+"])
@pytest.mark.parametrize("stage", tiny_stages.TINY)
def test_a_run_at_the_ends_of_its_ranges_finishes(stage, end, inputs, tmp_path):
    tiny_stages.run_stage(stage, ends_together(stage, end), tmp_path / "out", inputs)


@pytest.mark.parametrize("stage", ALONE)
def test_a_run_at_a_wild_end_finishes_or_is_refused_in_one_line(stage, inputs, tmp_path):
    crashes = {}
    for item in ALONE[stage].split():
        try:
            settings = {item[:-1]: value_at(stage, item[:-1], item[-1])} | BESIDE.get(f"{stage} {item}", {})
            tiny_stages.run_stage(stage, settings, tmp_path / item, inputs)
        except Exception as error:
            message = describe_failure(error, tmp_path / item)
            if message is None or "\n" in message or len(message) > 600:
                crashes[item] = f"{type(error).__name__}: {error}"
    assert not crashes


@pytest.mark.parametrize("end", REPORTS)
def test_a_report_at_the_ends_of_its_ranges_is_drawn(end, tmp_path):
    artifacts = finished_run.artifacts(tmp_path)
    finished_run.write(artifacts, finished_run.metrics(), [finished_run.sample(number) for number in range(3)])
    assert finished_run.page_of(artifacts, tmp_path, REPORTS[end])


def test_every_end_is_listed_once_and_exists():
    for stage, words in [*ALONE.items(), *NOT_RUN.items()]:
        assert {word[:-1] for word in words.split()} <= set(list_ranges(tiny_stages.TINY[stage])), stage
    assert all(not {*ALONE[stage].split()} & {*NOT_RUN.get(stage, "").split()} for stage in ALONE)
    assert set(list_ranges(REPORTS["-"])) == {"side_by_side"}
