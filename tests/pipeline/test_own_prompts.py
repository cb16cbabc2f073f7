"""Snakemake on the user's own prompts: what is planned, and one real tiny run."""

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from tests.helpers import tiny_models
from tests.helpers.snakemake_runs import list_planned_jobs

ROOT = Path(__file__).parents[2]
LINKS = ("Snakefile", "environment.yml", "workflow", "profiles", "configs", "stages", "data")
PPO = {"rewards": [{"source": "data.demo.short_answers:score"}], "lora": {"r": 2}, "precision": "fp32",
       "iterations": 1, "rollout_prompts": 4, "minibatch_prompts": 4, "microbatch_prompts": 4, "epochs": 1,
       "max_prompt_tokens": 100, "max_response_tokens": 4, "validation_prompts": 4}
EVALUATE = {"max_prompt_tokens": 100, "max_response_tokens": 4, "best_of": [2], "temperatures": [1.0, 0.0],
            "bootstrap_samples": 50}


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    for name in LINKS:
        (folder / name).symlink_to(ROOT / name)
    tiny_models.save_base(folder / "model")
    (folder / "p.txt").write_text("".join(f"use the flag port {number}\n" for number in range(20)))
    (folder / "r.yaml").write_text(yaml.safe_dump({
        "merge": {"dtype": "fp32"}, "ppo": PPO, "rloo": PPO, "evaluate": EVALUATE, "report": {"side_by_side": 2}}))
    return folder


@pytest.fixture(scope="module")
def snakemake(project, snakemake_forks):
    return lambda *words: snakemake_forks.run(
        [*words, "--cores", "1", "--config", "recipe=r.yaml", "base=model", "prompts=p.txt", "name=x"], project)


def test_plans(snakemake):
    for name, end in (("ppo", ""), ("rloo", "_rloo")):
        assert list_planned_jobs(snakemake("-n", name).text) == {
            "base", f"{name}_train", f"merge {name}", f"evaluate{end}", f"report{end}", name}
    outcome = snakemake("-n", "reward")
    assert outcome.code and re.search("'reward' needs pairs of answers", outcome.text)
    assert "Traceback" not in outcome.text


def test_a_tiny_run(snakemake, project):
    outcome = snakemake("ppo")
    assert outcome.code == 0, outcome.text
    table = outcome.text[outcome.text.index("\n  the reward"):]
    assert "reward at best temperature, base (T " in table and "Report: results/x/report/report.html" in table
    run = project / "results/x"
    assert (run / "ppo-merged/model.safetensors").exists()
    metrics = json.loads((run / "evaluate/metrics.json").read_text())
    samples = pq.read_table(run / "evaluate/samples.parquet").to_pylist()
    assert metrics["held_out_prompts"] == 5 and len(samples) == metrics["prompts"] == 4
    page = (run / "report/report.html").read_text()
    assert "The policy was trained on it, so it cannot say" in page and "PPO on your own prompts and reward" in page
    assert "KL to base" in (run / "report/cards/ppo-merged/README.md").read_text()
    assert "Nothing to be done" in snakemake("ppo").text
