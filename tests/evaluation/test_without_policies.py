"""An evaluation of SFT and its best-of-n alone, and the report on it: no policy was trained."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from stages import evaluate
from stages.cards.evaluated_card import _policy_rows
from stages.command_line.command import build_parser
from stages.command_line.option_parser import read_signature
from stages.evaluation import summary
from tests.helpers import finished_run
from tests.helpers.tiny_evaluation import CONFIG, make_tokenizer, save_inputs

ROOT = Path(__file__).parents[2]


def score(questions: list[str], responses: list[str]) -> dict[str, list[float]]:
    """Gold of this test: more words are better."""
    return {"gold": [float(len(response.split())) for response in responses]}


@pytest.mark.parametrize("gold", [None, f"{__name__}:score"])
def test_sft_and_best_of_n_are_evaluated_and_reported(gold, tmp_path):
    (tmp_path / "inputs").mkdir()
    inputs = save_inputs(tmp_path / "inputs", make_tokenizer())
    del inputs["policy"]
    (tmp_path / "evaluation").mkdir()
    returned = evaluate.run(replace(CONFIG, gold=gold), tmp_path / "evaluation", **inputs)
    metrics = json.loads((tmp_path / "evaluation/metrics.json").read_text())
    assert metrics["comparisons"] == metrics["hacking"] == metrics["at_best"] == {} and returned["prompts"] == 6
    assert {"sft", "best_of_2", "best_of_3", "sft_best", "best_of_3_best"} <= set(metrics["policies"])
    labels = [label for label, _ in metrics["table"]]
    assert "reward, best-of-3 of SFT at temperature 1" in labels
    assert ("gold, best-of-3 of SFT at temperature 1" in labels) == bool(gold) == summary.knows_gold(metrics)
    samples = pq.read_table(tmp_path / "evaluation/samples.parquet").to_pylist()
    assert ("gold_sft" in samples[0]) == bool(gold)
    assert _policy_rows(metrics, "sft")[0][0] == ("gold" if gold else "reward")
    (tmp_path / "run").mkdir()
    artifacts = finished_run.artifacts(tmp_path / "run")
    del artifacts["policy"]
    finished_run.write(artifacts, metrics, samples)
    page = finished_run.page_of(artifacts, tmp_path)
    assert "trained a policy" not in page and "best-of-3 of SFT at temperature 1" in page
    assert ("No gold score applies" in page) == (gold is None)


@pytest.mark.parametrize("name", ["evaluate", "report"])
def test_the_command_line_takes_any_number_of_policies(name):
    signature = read_signature(ROOT / f"stages/{name}.py")
    required = [name for name in signature.inputs if name not in ("policy", "judge")]
    words = [word for name in (*required, "out") for word in (f"--{name}", "x")]
    parser = build_parser(signature)
    assert parser.parse_args(words).policy is None
    assert parser.parse_args([*words, "--policy", "a=b", "--policy", "c=d"]).policy == ["a=b", "c=d"]
