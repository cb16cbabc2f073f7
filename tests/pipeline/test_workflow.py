"""The real thing, very small: a snakemake run on a generated site, then what reruns when, and a kill in the middle."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from stages.recipe.algorithms import ALGORITHMS
from stages.recipe.sections.evaluate import Frontier
from stages.runs import placement, snakemake_words
from stages.runtime.processes import has_gpu
from tests.helpers.library_forks import IMPORT_VARIABLES
from tests.helpers.snakemake_runs import SnakemakeForks, list_planned_jobs

ROOT = Path(__file__).parents[2]
RULES = "\n".join(path.read_text() for path in sorted((ROOT / "workflow/rules").glob("*.smk")))
VARIANTS = Frontier().algorithms  # each has variants
# Of configs/tiny.yaml, which trains no judge.
MERGES = ["merge sft", "merge reward", "merge ppo"]
JOBS = ["posts", "pairs", "base", "sft", "reward", "ppo_train", *MERGES, "evaluate", "report"]
FROM_REWARD = {"reward", "merge reward", "ppo_train", "merge ppo", "evaluate", "report", "ppo"}
JUDGE = {"judge", "merge judge"}
CONTROL = {"frontier_ppo_length", "frontier_merge"}
FROM_SFT = FROM_REWARD | {"sft", "merge sft"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the project beside a tiny dump, so that no run touches the working tree."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("workflow", "profiles", "configs", "stages", "data"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.7z", "models"))
    for name in ("Snakefile", "environment.yml"):
        shutil.copy(ROOT / name, folder)
    subprocess.run([sys.executable, "data/demo/generate.py", "--questions", "120", "--seed", "1", "--out", "a dump's"],
                   cwd=folder, check=True)
    return folder


def words(*arguments: str, config: tuple[str, ...] = ()) -> list[str]:
    tiny = ["recipe=configs/tiny.yaml", "dump=a dump's", "name=tiny"]
    return ["--cores", "1", *arguments, "--config", *tiny, *config]


def command(*arguments: str, config: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, "-m", "snakemake", *words(*arguments, config=config)]


def environment() -> dict[str, str]:
    return os.environ | IMPORT_VARIABLES | {"HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def forks(checkout, library_forks):
    with SnakemakeForks(checkout, environment(), library_forks.shims) as forks:
        yield forks


@pytest.fixture(scope="module")
def run_forked(forks):
    """Return a function that runs Snakemake, and its jobs, in forks, and returns what it says."""
    def run(folder: Path, *arguments: str, config: tuple[str, ...] = ()) -> str:
        outcome = forks.run(words(*arguments, config=config), folder)
        assert outcome.code == 0, outcome.text[-3000:]
        return outcome.text
    return run


@pytest.fixture(scope="module")
def dry_run(run_forked):
    """Return a function that makes a dry run and returns what it says."""
    return lambda folder, *arguments, config=(): run_forked(folder, "-n", *arguments, config=config)


@pytest.fixture(scope="module")
def plan(dry_run):
    """Return a function that lists the jobs of a dry run."""
    def run(folder: Path, *arguments: str, config: tuple[str, ...] = ()) -> set[str]:
        text = dry_run(folder, *arguments, config=config)
        return set() if "Nothing to be done" in text else list_planned_jobs(text)
    return run


def manifest(folder: Path, stage: str) -> dict:
    return json.loads((folder / "results/tiny" / stage / "manifest.json").read_text())


# --- what can be said without running ------------------------------------------------------------------------------


def inputs_of_trainings(prompts: str | None) -> list[tuple[str, list[str]]]:
    """List (program, names of its inputs) of the trainings and of the merge in train.smk, which computes them."""
    recipe = SimpleNamespace(prompts=prompts, ppo=SimpleNamespace(value_model="head"))
    algorithms = snakemake_words.PROMPT_ALGORITHMS if prompts else ALGORITHMS
    names = {"RECIPE": recipe, "ALGORITHMS": algorithms, "BASE": "PATH", "RUN": "RUN",
             "START": dict.fromkeys(("sft", "reward", "judge"), "PATH"), "MERGED": {"sft": "PATH", "reward": "PATH"},
             "rules": SimpleNamespace(pairs=SimpleNamespace(output="PATH"))}
    exec((ROOT / "workflow/rules/train.smk").read_text().partition("\nfor STAGE")[0], names)
    trainings = [(program, list(inputs)) for program, inputs in names["TRAININGS"].items()]
    return [*trainings, ("merge", ["base", "adapter", *names["TEXTS"]])]


def shells_of_rules() -> list[tuple[str, str]]:
    """List (program, shell) of every rule, with the flags that its params give written out."""
    shells, trainings = [], [*inputs_of_trainings(None), *inputs_of_trainings("FILE")]
    for shell in re.findall(r"^ *shell:\n(.*?)(?:\n\n|\Z)", RULES, re.DOTALL | re.MULTILINE):
        if "stages.plan" in shell or "stages.export_gguf" in shell:  # no stages: command lines of their own
            continue
        of_rule = [("", [])]
        if "params.inputs" in shell:
            is_merge = "stages.merge" in shell
            of_rule = [(name, ALGORITHMS[name].inputs) for name in VARIANTS] if "params.options" in shell else [
                (name, inputs) for name, inputs in trainings if (name == "merge") == is_merge]
        for name, inputs in of_rule:
            text = shell.replace("{params.program}", name)
            text = text.replace("{params.inputs:q}", " ".join(f"--{name} PATH" for name in inputs))
            text = text.replace("{params.policy:q}", "--policy NAME=PATH")
            shells.append((re.search(r"python -m stages\.(\w+)", text)[1], text))
    return shells


@pytest.mark.parametrize(("program", "shell"), shells_of_rules(), ids=lambda text: text.split(" ")[0])
def test_a_rule_gives_a_stage_just_the_inputs_it_names(program, shell):
    tree = ast.parse((ROOT / "stages" / f"{program}.py").read_text())
    run = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run")
    flags = set(re.findall(r" --(\w+)", shell)) - {"recipe", "out"}
    inputs = {a.arg for a, default in zip(run.args.kwonlyargs, run.args.kw_defaults, strict=True) if not default}
    assert inputs <= flags <= {argument.arg for argument in run.args.kwonlyargs}


def test_every_program_of_a_rule_was_checked():
    programs = [program for program, _ in shells_of_rules()]
    assert sorted(programs) == sorted([
        "posts", "pairs", "pairs", "gather", "base", "sft", "reward", "judge", "merge", "evaluate", "report",
        "pool_seeds", "merge", "evaluate", "frontier", *ALGORITHMS, *VARIANTS,
        "base", *snakemake_words.PROMPT_ALGORITHMS, "merge"])


@pytest.mark.parametrize(("command", "status"), [("echo made", 0), ("exit 3", 3)])
def test_a_log_that_cannot_be_written_decides_nothing(command, status):
    """/dev/full: no space left on the device. Snakemake runs shells with pipefail."""
    (end,) = re.findall(r'^LOGGED = (" 2>&1 \| .*")$', (ROOT / "Snakefile").read_text(), re.MULTILINE)
    logged, shells = (re.findall(end, RULES, re.MULTILINE) for end in (r'^ *f"{LOGGED}"$', r"^ *shell:$"))
    assert len(logged) == len(shells) - 1  # all but the plan's
    line = f"({command}) {end.strip(chr(34))}".replace("{log:q}", "/dev/full")
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", line], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "made\n" if status == 0 else "")


def test_nothing_made_yet_plans_everything_and_writes_nothing(plan, tmp_path, checkout):
    for name in ("Snakefile", "environment.yml", "workflow", "profiles", "configs", "stages", "a dump's"):
        (tmp_path / name).symlink_to(checkout / name)
    assert plan(tmp_path) == {*JOBS, "ppo"}
    assert plan(tmp_path, "pairs") == {"posts", "pairs"}
    assert plan(tmp_path, "reward") == {"posts", "pairs", "base", "sft", "merge sft", "reward"}
    assert plan(tmp_path, "report") == set(JOBS)
    assert plan(tmp_path, "sft_merged") == {"posts", "pairs", "base", "sft", "merge sft", "sft_merged"}
    assert plan(tmp_path, "ppo_merged") - plan(tmp_path, "reward_merged") == {"ppo_train", "merge ppo", "ppo_merged"}
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(("settings", "has_judge"), [
    ("train_judge: auto", True), ("train_judge: auto, gold: data.demo.gold:score", False),
    ("train_judge: always, gold: data.demo.gold:score", True), ("train_judge: none", False)])
def test_a_judge_is_trained_where_the_recipe_wants_one(dry_run, checkout, settings, has_judge):
    config = ("name=judged", f"evaluate={{{settings}}}")
    text = dry_run(checkout, "-p", config=config)
    assert list_planned_jobs(text) == {*JOBS, "ppo"} | (JUDGE if has_judge else set())
    paths = {stage: re.findall(rf"python -m stages\.{stage} .*? --judge (results/\S+)?", text)
             for stage in ("evaluate", "report")}
    assert paths == {"evaluate": ["results/judged/judge-merged/manifest.json" * has_judge],
                     "report": ["results/judged/judge/manifest.json" * has_judge]}
    assert ("results/judged/judge-merged/manifest.json --evaluate" in text) == has_judge


def test_reward_model_and_judge_train_side_by_side_on_half_of_the_cores_each(dry_run, checkout):
    judged = ("name=judged", "evaluate={train_judge: always}")

    def threads(*arguments):
        jobs = re.findall(r"^rule (reward|judge|ppo_train):\n(?:    .*\n)*?    threads: (\d+)$",
                          dry_run(checkout, *arguments, "--cores", "4", config=judged), re.MULTILINE)
        return {stage: int(count) for stage, count in jobs}

    share = 4 if placement.DRIVER.exists() else 2
    assert threads("ppo") == {"reward": share, "judge": share, "ppo_train": 4}
    assert threads("reward") == {"reward": 4}


@pytest.mark.parametrize(("recipe", "has_judge"), [("demo", False), ("sites", True), ("stackllama", True)])
def test_a_recipe_with_a_gold_scorer_trains_no_judge(plan, checkout, recipe, has_judge):
    config = (f"recipe=configs/{recipe}.yaml", "name=judged")
    assert plan(checkout, config=config) == {*JOBS, "ppo"} | (JUDGE if has_judge else set())


def user_seconds(folder):
    """CPU seconds of `snakemake --list-rules`."""
    before = os.times().children_user
    subprocess.run(command("--list-rules"), cwd=folder, check=True, capture_output=True)
    return os.times().children_user - before


def test_parsing_takes_less_than_snakemake_itself_and_no_torch(checkout, tmp_path):
    """Snakemake alone, on an empty file, is the measure: 1.1 s here, more on a slower machine.

    The first of two attempts may compile Python's files.
    """
    (tmp_path / "Snakefile").write_text("rule nothing:\n")
    assert any(user_seconds(checkout) < 1.9 * user_seconds(tmp_path) for _ in range(2))
    imports = subprocess.run([sys.executable, "-X", "importtime", *command("--list-rules")[1:]], cwd=checkout,
                             capture_output=True, text=True).stderr
    assert "stages.recipe.recipe" in imports
    assert not re.search(r"\b(torch|transformers|datasets)$", imports, re.MULTILINE)


@pytest.mark.parametrize(("config", "says"), [
    ("ppo={lerning_rate: 1}", "snakemake: error: --config: ppo: unknown key 'lerning_rate'; did you mean"),
    ("dump=nowhere.7z", "snakemake: error: dump: there is no 'nowhere.7z'"),
    ("name=../up", "snakemake: error: name '../up' cannot name a folder"),
    ("shares=0", "snakemake: error: --config: shares must be a whole number from 1 to 9999, not '0'"),
])
def test_a_users_mistake_is_one_line(forks, checkout, config, says):
    outcome = forks.run(words("-n", config=(config,)), checkout)
    assert outcome.code == 1
    assert len(outcome.lines) == 1 and outcome.lines[0].startswith(says)


def test_the_plan_is_printed_without_cores_and_leaves_no_folder(forks, checkout):
    """--config has the recipe's settings, and the options of the plan. A mistake is one line."""
    config = ["recipe=configs/tiny.yaml", "dump=a dump's", "name=planned", "sft={microbatch_sequences: 1}"]
    outcome = forks.run(["plan", "--config", *config, "device_memory_gib=8"], checkout)
    assert outcome.code == 0 and "plan of planned, base scratch" in outcome.lines[0], outcome.text
    assert any(line.split()[:1] == ["evaluate"] for line in outcome.lines)
    assert not (checkout / "results/planned").exists()
    own = forks.run(["plan", "--config", *config], checkout)
    assert has_gpu() or f"({len(os.sched_getaffinity(0))} cores, " in own.text, own.text
    mistaken = forks.run(["plan", "--config", *config, "device_memory_gib=-8"], checkout)
    assert mistaken.code == 1 and "--device-memory-gib must be above 0, not -8" in mistaken.lines[-1], mistaken.text


def test_lint(run_forked, checkout):
    assert "good condition" in run_forked(checkout, "--lint")


def test_pairs_scattered_over_shares_are_the_same_pairs(run_forked, plan, checkout):
    small_parts = "posts={part_bytes: 20000}"
    asked = ("name=scattered", small_parts, "shares=3")
    assert plan(checkout, "pairs", config=asked) == {"posts", "pairs_share", "pairs"}
    run_forked(checkout, "pairs", config=asked)
    run_forked(checkout, "pairs", config=("name=whole", small_parts))
    actual = {name: {str(file.relative_to(checkout / "results" / name)): file.read_bytes()
                    for file in (checkout / "results" / name / "pairs").rglob("*.parquet")}
             for name in ("scattered", "whole")}
    assert actual["scattered"] == actual["whole"] and len(actual["whole"]) >= 12


def test_a_dump_dated_in_the_future_is_read_once(run_forked, dry_run, checkout):
    (dump,) = (checkout / "a dump's").iterdir()
    stat, tomorrow = dump.stat(), time.time() + 86_400
    try:
        os.utime(dump, (tomorrow, tomorrow))
        run_forked(checkout, "posts", config=("name=future",))
        assert "Nothing to be done" in dry_run(checkout, "posts", config=("name=future",))
    finally:
        os.utime(dump, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_failed_run_shows_the_stages_lines_and_ends_with_the_cause(checkout):
    (checkout / "broken").mkdir()
    (checkout / "broken/Posts.xml").write_text('<posts><row Id="1"/></posts>')
    failing = [*command("pairs")[:-2], "dump=broken", "name=broken"]
    failed = subprocess.run(failing, cwd=checkout, capture_output=True, text=True, env=environment())
    first, plan, cause = failed.stderr.splitlines()
    assert failed.returncode == 1 and first.startswith("Using workflow specific profile")
    assert plan == "results/broken: 2 stages to run: posts, pairs; no estimate of the time"
    assert cause.startswith("snakemake: error: posts failed: broken: 1 of 1 rows cannot be read")
    assert cause.endswith(" (log: results/broken/logs/posts.log)")
    assert all(line.startswith("[1/2] ") for line in failed.stdout.splitlines())


# --- one real run --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(checkout, run_forked) -> tuple[Path, str]:
    """The folder of a run, and what Snakemake says of it; `test_killed_in_the_middle...` starts Python's own."""
    return checkout, run_forked(checkout, "ppo")


def test_a_run_makes_every_artifact_and_prints_the_table(finished):
    folder, text = finished
    for job in JOBS:
        stage = re.sub(r"merge (\w+)", r"\1-merged", job.removesuffix("_train"))
        assert manifest(folder, stage)["seconds"] > 0
        assert (folder / "results/tiny/logs" / f"{stage}.log").read_text()
    for label, value in json.loads((folder / "results/tiny/report/metrics.json").read_text())["table"]:
        assert f"{label} " in text and value in text
    assert "results/tiny/report/report.html" in text


@pytest.mark.parametrize("kind", ["html", "zip"])
def test_snakemakes_own_report_holds_the_page_and_figures_with_captions_and_labels(run_forked, finished, tmp_path,
                                                                                   kind):
    """Each under 2 MB: a browser shows nothing of an embedded file that is larger."""
    out = tmp_path / f"run.{kind}"
    run_forked(finished[0], "--report", str(out))
    names = ["report.html", "pipeline.png", "evaluate-frontier.png", "evaluate-rewards.png"]
    if kind == "zip":
        with zipfile.ZipFile(out) as opened:
            sizes = {Path(actual.filename).name: actual.file_size for actual in opened.infolist()
                     if "/data/" in actual.filename}
            text = opened.read("run/report.html").decode()
        assert sorted(sizes) == sorted(names)
        assert max(sizes.values()) * 4 / 3 < 2_000_000
    else:
        text = out.read_text(encoding="utf-8")
    for phrase in (*names, "A Stack Exchange dump to an aligned", "The data, how each model learnt",
                  "The time and the peak memory", "best-of-n of SFT:", "Distribution of the learnt reward",
                  "the whole page", "reward against KL", "stages, time, memory", "rewards of the answers",
                  '"Figures"', '"Report"'):
        assert phrase in text, phrase


def test_a_second_run_does_nothing(run_forked, finished):
    assert "Nothing to be done" in run_forked(finished[0], "ppo")


@pytest.mark.parametrize("config", ["log_to=[jsonl]", "ppo={log_to: [terminal, jsonl]}", "sft={log_to: [jsonl]}"])
def test_another_place_to_log_to_reruns_nothing(plan, finished, config):
    assert plan(finished[0], config=(config,)) == set()


def test_a_changed_reward_value_reruns_reward_and_what_follows_and_nothing_before(plan, finished):
    assert plan(finished[0], config=("reward={learning_rate: 2e-3}",)) == FROM_REWARD


def test_a_changed_report_value_reruns_the_report_alone(plan, finished):
    assert plan(finished[0], config=("report={side_by_side: 2}",)) == {"report", "ppo"}


def test_a_stage_can_be_forced(plan, finished):
    assert plan(finished[0], "--forcerun", "sft") == FROM_SFT


def test_another_dump_makes_everything_anew_and_a_newer_one_nothing(plan, finished):
    (dump,) = (finished[0] / "a dump's").iterdir()
    stat, text = dump.stat(), dump.read_bytes()
    try:
        os.utime(dump)
        assert plan(finished[0]) == set()
        dump.write_bytes(text + b"\n")
        assert plan(finished[0]) == {*JOBS, "ppo"}
    finally:
        dump.write_bytes(text)
        os.utime(dump, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_judge_and_a_control_are_added_to_a_finished_run(run_forked, plan, finished, tmp_path):
    folder = tmp_path / "project"
    shutil.copytree(finished[0], folder)
    config = ("evaluate={train_judge: always, length_control: true}",)
    assert plan(folder, config=config) == JUDGE | CONTROL | {"evaluate", "report", "ppo"}
    text = run_forked(folder, "ppo", config=config)
    inputs = manifest(folder, "evaluate")["inputs"]
    assert inputs["judge"]["path"] == "results/tiny/judge-merged"
    assert inputs["policy"]["ppo-length"]["path"] == "results/tiny/frontier/ppo-length-merged"
    control, ppo = (manifest(folder, name) for name in ("frontier/ppo-length", "ppo"))
    assert control["metrics"]["validation_kl"] <= max(ppo["metrics"]["validation_kl"], 0.1)
    assert {"rewards", "reward_scaling"} <= {name for name in ppo["config"]
                                             if control["config"][name] != ppo["config"][name]}
    for words in ("reward gain at equal length, PPO ", "judge at best temperature, PPO on length alone -> PPO "):
        assert words in text
    assert plan(folder, config=config) == set()
    assert "judge" not in manifest(finished[0], "evaluate")["inputs"]
    page = (folder / "results/tiny/report/report.html").read_text()
    assert "is the control: PPO" in page and page.count("Did the policy cheat?") == 1
    assert "Judge: expected calibration error" in page and ">judge-merged<" in page
    listed = subprocess.run([sys.executable, "-m", "stages.inspect", "results"], cwd=folder, capture_output=True,
                            text=True, check=True).stdout
    stages = listed.split("results/tiny\n")[1].split("\n\n")[0]  # other tests have runs of their own beside it
    assert re.search(r"^ *judge +finished", stages, re.MULTILINE) and not re.search("partial|stale", stages)


def test_an_override_is_in_the_manifest_and_earlier_stages_stay(run_forked, finished):
    folder, _ = finished
    before = manifest(folder, "sft-merged")
    run_forked(folder, "reward", config=("reward={learning_rate: 2e-3}",))
    assert manifest(folder, "reward")["config"]["learning_rate"] == 2e-3
    assert manifest(folder, "sft-merged") == before
    assert "restored from .old/" in run_forked(folder, "reward")
    assert manifest(folder, "reward")["config"]["learning_rate"] == 1e-3


def test_what_snakemake_counts_as_failed_is_taken_up_again(run_forked, plan, finished):
    """Snakemake deletes the manifest then, as after an error of tee, or where an input is dated in the future."""
    folder, _ = finished
    run_forked(folder, "base")
    before = (folder / "results/tiny/base/manifest.json").read_bytes()
    (folder / "results/tiny/base/manifest.json").unlink()
    assert "results/tiny/base is already made" in run_forked(folder, "base")
    assert (folder / "results/tiny/base/manifest.json").read_bytes() == before
    assert not plan(folder, "sft")


@pytest.mark.parametrize("rule", ["ppo_train"])  # test_resume.py kills every stage, test_soak.py any of them
def test_killed_in_the_middle_the_same_command_resumes_and_makes_the_same(run_forked, finished, rule):
    folder, _ = finished
    stage = rule.replace("_train", "")
    run_forked(folder, rule)  # whatever an earlier test left
    uninterrupted = manifest(folder, stage)
    shutil.rmtree(folder / "results/tiny" / stage)
    begun = folder / "results/tiny" / f"{stage}.partial"
    process = subprocess.Popen(command(rule), cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               start_new_session=True, env=environment())
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if list(begun.glob("checkpoint-*/*")) + list(begun.glob("checkpoints/checkpoint-*")):
            break
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert begun.exists(), "it was finished before it could be killed"
    same_folder = begun.stat().st_ino
    run_forked(folder, rule)
    assert (folder / "results/tiny" / stage).stat().st_ino == same_folder, "begun anew, not resumed"
    again = manifest(folder, stage)
    weights = [name for name in again["files"] if name.endswith(".safetensors")]
    assert weights and all(again["files"][name] == uninterrupted["files"][name] for name in weights)


def test_a_snakefile_that_is_named_from_elsewhere_says_where_its_recipes_are(tmp_path, checkout):
    done = subprocess.run([sys.executable, "-m", "snakemake", "-s", checkout / "Snakefile", "-n", "--cores", "1"],
                          cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (f"snakemake: error: there are no recipes here: run it from {checkout}, or "
                                            f"with --directory {checkout}")
