"""The target `frontier`: which trainings Snakemake plans for it, with which settings and inputs."""

import re
from pathlib import Path

import pytest

from tests.helpers.snakemake_runs import list_planned_jobs

ROOT = Path(__file__).parents[2]
UP_TO_REWARD = {"posts", "pairs", "base", "sft", "merge sft", "reward", "merge reward"}
PAGE = {"frontier_evaluate", "frontier_page", "frontier"}


@pytest.fixture(scope="module")
def plan(tmp_path_factory, snakemake_forks):
    """Return a function that gives the output of a dry run with the commands of the jobs."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("Snakefile", "environment.yml", "workflow", "profiles", "configs", "stages", "data"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "dump").mkdir()
    (folder / "dump/Posts.xml").touch()

    def run(*config: str, target: str = "frontier", cores: int = 1) -> str:
        words = ["--cores", str(cores), "-n", "-p", target, "--config", "recipe=configs/tiny.yaml", "dump=dump"]
        outcome = snakemake_forks.run([*words, *config], folder)
        assert outcome.code == 0, outcome.text[-3000:]
        return outcome.text

    return run


def test_each_variant_is_trained_with_its_settings_and_all_are_evaluated_once(plan):
    text = plan("frontier={algorithms: [ppo, rloo], ppo_kl_coefficients: [0.2, 0.03], best_of: [2, 4], prompts: 8}")
    assert list_planned_jobs(text) == UP_TO_REWARD | PAGE | {
        "frontier_ppo_kl_0_03", "frontier_ppo_kl_0_2", "frontier_merge", "rloo_train", "merge rloo"}
    training = next(line for line in text.splitlines() if "--kl-coefficient 0.03 --kl-target-nats null" in line)
    assert re.search(r"stages.ppo .*--policy \S+/sft-merged/\S+ --reward \S+/reward-merged/\S+ --pairs ", training)
    evaluation = next(line for line in text.splitlines() if "stages.evaluate" in line)
    assert re.findall(r"--policy (\S+)=(\S+)/manifest.json", evaluation) == [
        (name, f"results/tiny-dump-{evaluation.split('results/tiny-dump-')[1].split('/')[0]}/{folder}-merged")
        for name, folder in (("ppo-kl-0_2", "frontier/ppo-kl-0_2"), ("ppo-kl-0_03", "frontier/ppo-kl-0_03"),
                             ("rloo", "rloo"))]
    assert "--prompts 8 --best-of 2,4 --temperature-prompts 0" in evaluation


def test_a_variant_with_the_runs_own_settings_is_not_trained_again(plan):
    text = plan("ppo={kl_coefficient: 0.1, kl_target_nats: null}",
                "frontier={algorithms: [ppo], ppo_kl_coefficients: [0.1, 0.3]}")
    assert list_planned_jobs(text) == UP_TO_REWARD | PAGE | {
        "ppo_train", "merge ppo", "frontier_ppo_kl_0_3", "frontier_merge"}


def test_a_control_is_trained_after_ppo_and_is_one_more_policy_of_evaluation_and_report(plan):
    jobs = UP_TO_REWARD | {"ppo_train", "merge ppo", "evaluate", "report", "ppo"}
    assert list_planned_jobs(plan(target="ppo")) == jobs
    text = plan("evaluate={length_control: true}", "name=c", target="ppo")
    assert list_planned_jobs(text) == jobs | {"frontier_ppo_length", "frontier_merge"}
    training, evaluation, report = (
        next(line for line in text.splitlines() if words in line)
        for words in ("--match", "python -m stages.evaluate ", "python -m stages.report "))
    assert "--match results/c/ppo/manifest.json --out results/c/frontier/ppo-length/manifest.json" in training
    assert "--rewards '- source: response_tokens' --reward-scaling start" in training
    policies = "--policy ppo=results/c/ppo{0}/manifest.json --policy ppo-length=results/c/frontier/ppo-length{0}/"
    assert policies.format("-merged") in evaluation and policies.format("") in report
    assert "results/c/ppo-merged/manifest.json results/c/frontier/ppo-length-merged/manifest.json" in report
    for target in ("rloo", "frontier"):
        assert "frontier_ppo_length" not in list_planned_jobs(plan("evaluate={length_control: true}", target=target))


@pytest.mark.parametrize("target, threads", [("frontier", None), ("rloo_train", "4")])
def test_trainings_of_the_frontier_take_a_core_each_and_a_single_one_takes_all(plan, target, threads):
    text = plan("frontier={algorithms: [ppo, rloo], ppo_kl_coefficients: [0.2]}", target=target, cores=4)
    (training,) = re.findall(r"^rule rloo_train:\n((?:    .*\n)*)", text, re.MULTILINE)
    assert re.findall(r"threads: (\d+)", training) == ([threads] if threads else [])  # Snakemake shows no 1


def test_several_seeds_have_one_page(plan):
    text = plan("frontier={algorithms: [ppo], ppo_kl_coefficients: [0.1]}", "seeds=[0, 1]", "name=s")
    assert len(re.findall(r"^rule frontier_evaluate:", text, re.MULTILINE)) == 2
    page = next(line for line in text.splitlines() if "stages.frontier" in line)
    assert "--evaluate results/s/seed-0/frontier/evaluate/manifest.json results/s/seed-1/frontier/" in page
    assert "--out results/s/frontier/page/manifest.json" in page


def test_no_shell_command_reads_the_variable_of_a_loop():
    """Snakemake makes a shell command when its job runs, and a loop's variable then has its last value."""
    text = "\n".join(path.read_text() for path in [ROOT / "Snakefile", *(ROOT / "workflow/rules").glob("*.smk")])
    commands = re.findall(r"^ *shell:\n((?:^ +f?\".*\n)+)", text, re.MULTILINE)
    loops = re.findall(r"^ *for (\w+) in", text, re.MULTILINE)
    assert len(commands) > 12 and {"ALGORITHM", "STAGE", "VARIANT"} <= set(loops)
    assert not [command for command in commands if re.search(rf"\b({'|'.join(loops)})\b", command)]
