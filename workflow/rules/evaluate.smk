# On held-out questions: compare the reward model with cheap baselines, and PPO with base, SFT and best-of-n.
rule evaluate:
    input:
        posts=rules.posts.output,
        base=rules.base.output,
        sft=MERGED["sft"],
        ppo=MERGED["ppo"],
        reward=MERGED["reward"],
        judge=JUDGE_MERGED,
        pairs=rules.pairs.output,
    output:
        f"{RUN}/evaluate/manifest.json",
    log:
        f"{RUN}/logs/evaluate.log",
    params:
        recipe=RECIPE_FILE,
        config=recipes.section_settings(RECIPE, "evaluate"),
        launcher=PLACEMENT.launcher,
        processes=PLACEMENT.options,
    threads: workflow.cores
    resources:
        **PLACEMENT.resources,
    conda:
        "../../environment.yml"
    shell:
        "{params.launcher} python -m stages.evaluate --recipe {params.recipe:q} --posts {input.posts:q} --pairs {input.pairs:q}"
        " --base {input.base:q} --sft {input.sft:q} --policy ppo={input.ppo:q} --reward {input.reward:q} --judge {input.judge:q}"
        " --out {output:q}"
        " {params.processes}"
        " 2>&1 | (trap '' INT TERM; tee -a {log:q} || true)"


# The report page, with its figures and metrics.
rule report:
    input:
        posts=rules.posts.output,
        pairs=rules.pairs.output,
        base=rules.base.output,
        sft=rules.sft.output,
        reward=rules.reward.output,
        judge=JUDGE,
        ppo=rules.ppo_train.output,
        merged=[*MERGED.values(), *JUDGE_MERGED],
        evaluate=rules.evaluate.output,
    output:
        manifest=f"{RUN}/report/manifest.json",
        page=report(f"{RUN}/report/report.html", caption="../report/page.rst", category="Report", labels={"run": RECIPE.name, "shows": "the whole page"}),
        stages=report(f"{RUN}/report/figures/pipeline.png", caption="../report/stages.rst", category="Figures", labels={"run": RECIPE.name, "shows": "stages, time, memory"}),
        frontier=report(f"{RUN}/report/figures/evaluate-frontier.png", caption="../report/frontier.rst", category="Figures", labels={"run": RECIPE.name, "shows": "reward against KL"}),
        rewards=report(f"{RUN}/report/figures/evaluate-rewards.png", caption="../report/rewards.rst", category="Figures", labels={"run": RECIPE.name, "shows": "rewards of the answers"}),
    log:
        f"{RUN}/logs/report.log",
    params:
        recipe=RECIPE_FILE,
        config=recipes.section_settings(RECIPE, "report"),
    conda:
        "../../environment.yml"
    shell:
        "python -m stages.report --recipe {params.recipe:q} --posts {input.posts:q} --pairs {input.pairs:q}"
        " --base {input.base:q} --sft {input.sft:q} --reward {input.reward:q} --judge {input.judge:q}"
        " --policy ppo={input.ppo:q} --merged {input.merged:q} --evaluate {input.evaluate:q} --out {output.manifest:q}"
        " 2>&1 | (trap '' INT TERM; tee -a {log:q} || true)"
