"""Entries of --config that Snakemake would refuse with a traceback."""

import re

import pytest

from stages.recipe.schema import SettingsError
from stages.runs.snakemake_words import check_config_words


@pytest.mark.parametrize(("words", "says"), [
    ("ppo --config ppo.learning_rate=1e-5 -n", "ppo.learning_rate: give it as 'ppo={learning_rate: 1e-5}'"),
    ("--config seed=1 reward.lora.r=4", "reward.lora.r: give it as 'reward={lora: {r: 4}}'"),
    ("-C name=x seed", "'seed' has no value: give it as seed=VALUE"),
    ("--config seed=1 ppo", "'ppo' has no value: .*; or, if it is a target, before --config"),
    ("--config=ppo.epochs=2", "give it as 'ppo={epochs: 2}'"), ("--config =1", "'' is no name"),
    ("--config a..b=1", "'a..b' is no name"),
    ("--config seed=1 ppo={learning_rate: 1e-5} -n", "put it in quotes, as 'ppo={learning_rate: 1e-5}'"),
    ("--config reward={lora: {r: 4}} seed=1", "put it in quotes, as 'reward={lora: {r: 4}}'")])
def test_what_snakemake_cannot_parse_is_refused_with_the_form_that_it_takes(words, says):
    with pytest.raises(SettingsError, match=re.escape(says).replace(r"\.\*", ".*")) as refused:
        check_config_words(words.split())
    assert "\n" not in str(refused.value)


def test_a_name_that_stands_twice_in_one_value_is_refused():
    with pytest.raises(SettingsError, match=r"'ppo=\{lora: \{r: 4, r: 8\}\}' has 'r' twice"):
        check_config_words(["--config", "ppo={lora: {r: 4, r: 8}}"])


@pytest.mark.parametrize("words", [
    [], ["ppo", "-n"], ["--config", "seed=1", "name=a.b", "ppo={learning_rate: 1e-5}", "--cores", "all", "ppo"],
    ["--config", "dump=/a/b.c=d.7z", "shares=", "-R", "sft"], ["--configfile", "configs/sites.yaml", "--config", "-n"],
    ["--set-threads", "x.y=2"], ["--config", "dump=a{b", "name=c"], ["--config", "ppo={a", "dump=x: y: {", "name=c"]])
def test_all_else_is_snakemakes_to_parse(words):
    check_config_words(words)
