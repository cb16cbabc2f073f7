"""A Stack Exchange dump to an aligned answer model: snakemake --cores all ppo

Which folder feeds which. What a stage does is in stages/<stage>.py, how much of it in configs/<recipe>.yaml.
"""

import os
import sys
from operator import attrgetter
from pathlib import Path

from snakemake.utils import min_version

from stages.artifacts import staleness
from stages.recipe import algorithms, variants
from stages.recipe import recipe as recipes
from stages.recipe.checks import check_stage_needs
from stages.runs import console, dump_paths, placement, run_folder, signals, snakemake_words

min_version("9.0")

# Recipes, dumps and results are looked up in the working directory, and stages are started in it.
if not os.path.isdir("stages"):
    sys.exit(f"snakemake: error: there are no recipes here: run it from {workflow.basedir}, or with --directory {workflow.basedir}")

# The terminal shows the lines of the stages; a dry run and --verbose show Snakemake's.
IS_QUIET = workflow.is_main_process and not (workflow.output_settings.dryrun or workflow.output_settings.verbose)
CONSOLE = console.quieten_snakemake() if IS_QUIET else None

# Values of --config alone: `config` has those of --configfile too, which is another way to name the recipe.
SETTINGS = dict(workflow.config_settings.config)

# `snakemake plan` alone needs no dump, no cores and no folder; its options are in --config, too.
PLANS = snakemake_words.plans_only(sys.argv[1:])
PLAN_OPTIONS = snakemake_words.take_options(SETTINGS) if PLANS else []

COMPUTE = workflow.resource_settings
if COMPUTE.cores is None and COMPUTE.nodes is None and workflow.is_main_process:
    sys.exit("snakemake: error: say how many cores to use: snakemake --cores all ppo")

# --jobs, which a cluster's profile gives: other machines do the work.
RUNS_HERE = workflow.is_main_process and COMPUTE.nodes is None

try:
    RECIPE = run_folder.resolve_recipe(SETTINGS, workflow.config_settings.configfiles, RUNS_HERE, PLANS)
    SEEDS = run_folder.resolve_seeds(RECIPE, SETTINGS, workflow.config_settings.configfiles, RUNS_HERE, PLANS)
    SHARES = placement.parse_shares(SETTINGS)
    PLACEMENT = placement.parse_placement(SETTINGS, RUNS_HERE)
    DUMP_FILES = dump_paths.list_dump_files(RECIPE.dump)
    INTRODUCTION = run_folder.introduce_default_recipe(SETTINGS, workflow.config_settings.configfiles, RECIPE)
except run_folder.SettingsError as error:
    sys.exit(f"snakemake: error: {error}")

if INTRODUCTION and workflow.is_main_process:
    print(INTRODUCTION, file=sys.stderr)

# ROOT has what all seeds share, RUN what each has of its own: with `seeds`, a folder for each, named by a wildcard.
ROOT, RUN = SEEDS.root, SEEDS.folder
RECIPE_FILE = f"{RUN}/recipe.yaml"
RUN_LABEL = RUN.removeprefix("results/")
THREADS = SEEDS.share_cores(workflow.cores, PLACEMENT.processes, RUNS_HERE)

# The trainings of the target `frontier` do not depend on each other: each takes one core for each of its processes, so
# that several run at once.
THREADS_SIDE_BY_SIDE = min(THREADS, PLACEMENT.processes or 1) if RUNS_HERE and THREADS else THREADS or 1
POLICY_THREADS = lambda wildcards: THREADS_SIDE_BY_SIDE if "frontier" in workflow.dag_settings.targets else THREADS or 1

# Before Snakemake compares times: give them to the manifests by content.
STALE = staleness.align_times(Path(ROOT), RECIPE, SEEDS.list_runs()) if workflow.is_main_process and not PLANS else []
DUMP_FILES = staleness.dated_inputs(DUMP_FILES, STALE, os.path.relpath(workflow.main_snakefile))
for reason in STALE:
    print(f"stale: {reason}", file=sys.stderr)

# Merged models, and the model that each stage starts from: its adapter is merged into that one.
BASE = f"{RUN}/base/manifest.json"
ALGORITHMS = snakemake_words.PROMPT_ALGORITHMS if RECIPE.prompts else algorithms.ALGORITHMS
POLICIES = [name for name, algorithm in ALGORITHMS.items() if algorithm.trains_model]
MERGED = {stage: f"{RUN}/{stage}-merged/manifest.json" for stage in ("sft", "reward", *POLICIES)}
START = {name: BASE for name in POLICIES}
if not RECIPE.prompts:
    START = {"sft": BASE, "reward": MERGED["sft"] if RECIPE.reward.start_from == "sft" else BASE}
    START |= {name: MERGED["sft"] for name in POLICIES} | {"judge": START["reward"]}
STARTS = placement.find_start_models(START)

# The judge, trained and merged, if the recipe wants one.
NEEDS_JUDGE = not RECIPE.prompts and {"always": True, "auto": RECIPE.evaluate.gold is None, "none": False}[RECIPE.evaluate.train_judge]
JUDGE = [f"{RUN}/judge/manifest.json"] if NEEDS_JUDGE else []
JUDGE_MERGED = [f"{RUN}/judge-merged/manifest.json"] if NEEDS_JUDGE else []

# The reward model and the judge do not depend on each other: they train side by side where this machine trains both.
REWARD_THREADS = {"reward": THREADS, "judge": THREADS}
if NEEDS_JUDGE and RUNS_HERE:
    REWARD_THREADS = placement.share_cores(RUN, THREADS, PLACEMENT.processes, lambda: workflow.dag_settings.targets)

# Trainings that PPO's policy is compared with in its evaluation, if the recipe wants one.
CONTROLS = [variants.LENGTH_CONTROL] if RECIPE.evaluate.length_control and not RECIPE.prompts else []

# A signal to the whole process group must not end the shell before its stage has saved a checkpoint. A stage that is
# ended from outside (134: C++ had no memory; 137: the system had none) can say nothing itself.
shell.prefix(
    "set -euo pipefail; trap : INT TERM HUP; "
    "trap 'case $? in 134|137) echo \"error: the stage was killed (exit code $?), as happens when memory runs out: take "
    "smaller batches or a machine with more; the same command continues\" >&2;; esac' EXIT; "
)

# The end of a stage's shell command: its lines also go to its log, whatever becomes of the log.
LOGGED = " 2>&1 | (trap '' INT TERM HUP; tee -a {log:q} || true)"

# Stages run with the Python that runs Snakemake.
os.environ.update(PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]))


report: "workflow/report/workflow.rst"


wildcard_constraints:
    seed=SEEDS.pattern,


include: "workflow/rules/plan.smk"


if not RECIPE.prompts:

    include: "workflow/rules/data.smk"


include: "workflow/rules/train.smk"
include: "workflow/rules/evaluate.smk"


if not RECIPE.prompts:

    include: "workflow/rules/frontier.smk"


include: "workflow/rules/targets.smk"
include: "workflow/rules/gguf.smk"


workflow.default_target = algorithms.FIRST  # default_target in an included file is ignored


if not PLANS:

    onstart:
        # By the command line: Snakemake also counts what its marks of unfinished jobs name as forced.
        settings = workflow.dag_settings
        named = {*settings.forcerun, *(settings.targets if settings.forcetargets else ())}
        named |= {os.path.relpath(name) for name in named}  # of a file, as Snakemake knows it
        forced = [job for job in workflow.dag.needrun_jobs() if settings.forceall or named & {job.rule.name, *job.output}]
        folders = [Path(str(file)).parent for job in workflow.dag.needrun_jobs() for file in job.output]
        try:
            check_stage_needs(RECIPE, folders)
            run_folder.start_run(RECIPE, [str(file) for job in forced for file in job.output], SEEDS.list_runs())
        except run_folder.SettingsError as error:
            sys.exit(f"snakemake: error: {error}")
        if CONSOLE:
            CONSOLE.shows_jobs = not workflow.local_exec
        layers = workflow.dag.toposorted(set(workflow.dag.needrun_jobs()))
        ordered = [job for layer in layers for job in sorted(layer, key=attrgetter("rule.lineno", "output"))]
        console.announce_run(RECIPE, ROOT, [str(file) for job in ordered for file in job.output], workflow.local_exec)
        if workflow.local_exec:
            console.start_plan(ROOT, folders, min(THREADS, PLACEMENT.processes or THREADS))
        signals.forward_to_stages()

    onsuccess:
        print(run_folder.format_summary(RECIPE), file=sys.stderr)


onerror:
    for line in CONSOLE.describe_failures() if CONSOLE else ():
        print(line, file=sys.stderr)


# Of a program that calls Snakemake, sys.argv would be another command line.
if workflow.is_main_process and Path(sys.argv[0]).name in ("snakemake", "__main__.py"):
    try:
        targets = [rule.name for rule in workflow.rules if not rule.has_wildcards()]
        seeded = [rule.name for rule in workflow.rules if rule.wildcard_names == {"seed"}]
        if RECIPE.prompts:
            snakemake_words.check_prompt_targets(RECIPE, sys.argv[1:], targets, algorithms.list_targets())
        snakemake_words.check_targets(sys.argv[1:], targets, seeded)
    except run_folder.SettingsError as error:
        sys.exit(f"snakemake: error: {error}")
