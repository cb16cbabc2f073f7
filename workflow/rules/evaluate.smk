# Of each algorithm: its evaluation and its report. Those of PPO are called evaluate and report; of dpo, evaluate_dpo and report_dpo.
# A control is one more policy of both: frontier.smk trains it. A run on own prompts has no posts, pairs, SFT and reward model.
DUMP_MERGED = dict.fromkeys(("posts", "pairs", "sft", "reward"), [])
DUMP_TRAINED, DUMP_STAGES = DUMP_MERGED, ()
if not RECIPE.prompts:
    DUMP_MERGED = {"posts": rules.posts.output, "pairs": rules.pairs.output, "sft": MERGED["sft"], "reward": MERGED["reward"]}
    DUMP_TRAINED = DUMP_MERGED | {"sft": rules.sft.output, "reward": rules.reward.output}
    DUMP_STAGES = ("sft", "reward")

for ALGORITHM in ALGORITHMS.values():

    CONTROL_FOLDERS = [f"{RUN}/{control.folder(RECIPE)}" for control in CONTROLS if control.section == ALGORITHM.name]

    # On held-out questions: compare the reward model with cheap baselines, and the policy with base, SFT and best-of-n.
    rule:
        name:
            ALGORITHM.rule_name("evaluate")
        input:
            **DUMP_MERGED,
            base=rules.base.output,
            policy=ALGORITHM.policy_inputs(f"{RUN}/{ALGORITHM.result}/manifest.json"),
            control=[f"{folder}-merged/manifest.json" for folder in CONTROL_FOLDERS],
            judge=JUDGE_MERGED,
            prompts=RECIPE.prompts or [],
        output:
            f"{RUN}/{ALGORITHM.folder('evaluate')}/manifest.json",
        log:
            f"{RUN}/logs/{ALGORITHM.folder('evaluate')}.log",
        params:
            recipe=RECIPE_FILE,
            config=recipes.section_settings(RECIPE, "evaluate"),
            policy=ALGORITHM.format_policy,
            **PLACEMENT.params,
        threads: THREADS
        resources:
            **PLACEMENT.resources,
        conda:
            "../../environment.yml"
        shell:
            "{params.launcher} python -m stages.evaluate --recipe {params.recipe:q} --posts {input.posts:q} --pairs {input.pairs:q}"
            " --base {input.base:q} --sft {input.sft:q} {params.policy:q}"
            " --reward {input.reward:q} --judge {input.judge:q} --file {input.prompts:q}"
            " --out {output:q}"
            " {params.processes}"
            f"{LOGGED}"

    # The report page, with its figures and metrics.
    rule:
        name:
            ALGORITHM.rule_name("report")
        input:
            **DUMP_TRAINED,
            base=rules.base.output,
            judge=JUDGE,
            policy=ALGORITHM.policy_inputs(f"{RUN}/{ALGORITHM.name}/manifest.json"),
            control=[f"{folder}/manifest.json" for folder in CONTROL_FOLDERS],
            merged=[MERGED[stage] for stage in (*DUMP_STAGES, ALGORITHM.name) if stage in MERGED] + [f"{folder}-merged/manifest.json" for folder in CONTROL_FOLDERS] + JUDGE_MERGED,
            evaluate=f"{RUN}/{ALGORITHM.folder('evaluate')}/manifest.json",
        output:
            manifest=f"{RUN}/{ALGORITHM.folder('report')}/manifest.json",
            page=report(f"{RUN}/{ALGORITHM.folder('report')}/report.html", caption="../report/page.rst", category="Report", labels={"run": RUN_LABEL, "policy": ALGORITHM.name, "shows": "the whole page"}),
            stages=report(f"{RUN}/{ALGORITHM.folder('report')}/figures/pipeline.png", caption="../report/stages.rst", category="Figures", labels={"run": RUN_LABEL, "policy": ALGORITHM.name, "shows": "stages, time, memory"}),
            frontier=report(f"{RUN}/{ALGORITHM.folder('report')}/figures/evaluate-frontier.png", caption="../report/frontier.rst", category="Figures", labels={"run": RUN_LABEL, "policy": ALGORITHM.name, "shows": "reward against KL"}),
            rewards=report(f"{RUN}/{ALGORITHM.folder('report')}/figures/evaluate-rewards.png", caption="../report/rewards.rst", category="Figures", labels={"run": RUN_LABEL, "policy": ALGORITHM.name, "shows": "rewards of the answers"}),
        log:
            f"{RUN}/logs/{ALGORITHM.folder('report')}.log",
        params:
            recipe=RECIPE_FILE,
            config=recipes.section_settings(RECIPE, "report"),
            policy=ALGORITHM.format_policy,
        conda:
            "../../environment.yml"
        shell:
            "python -m stages.report --recipe {params.recipe:q} --posts {input.posts:q} --pairs {input.pairs:q}"
            " --base {input.base:q} --sft {input.sft:q} --reward {input.reward:q} --judge {input.judge:q}"
            " {params.policy:q} --merged {input.merged:q} --evaluate {input.evaluate:q} --out {output.manifest:q}"
            f"{LOGGED}"


# Of several seeds: a report on all of them, with the evaluation of each.
POOLED = {name: [] for name in ALGORITHMS}
if SEEDS.recipes and not RECIPE.prompts:

    for ALGORITHM in ALGORITHMS.values():

        rule:
            name:
                ALGORITHM.rule_name("seeds")
            input:
                evaluate=SEEDS.every(f"{RUN}/{ALGORITHM.folder('evaluate')}/manifest.json"),
            output:
                f"{ROOT}/{ALGORITHM.folder('seeds')}/manifest.json",
            log:
                f"{ROOT}/logs/{ALGORITHM.folder('seeds')}.log",
            params:
                recipe=f"{ROOT}/recipe.yaml",
                config=recipes.section_settings(RECIPE, "evaluate"),
            conda:
                "../../environment.yml"
            shell:
                "python -m stages.pool_seeds --recipe {params.recipe:q} --evaluate {input.evaluate:q} --out {output:q}"
                f"{LOGGED}"

        POOLED[ALGORITHM.name] = [f"{ROOT}/{ALGORITHM.folder('seeds')}/manifest.json"]
