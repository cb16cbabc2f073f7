# Held-out questions: the reward model beside cheap baselines, PPO beside base, SFT and best-of-n.
rule evaluate:
    input:
        posts=rules.posts.output,
        base=rules.base.output,
        sft=rules.sft_merged.output,
        ppo=rules.ppo_merged.output,
        reward=rules.reward_merged.output,
        pairs=rules.pairs.output,
    output:
        f"{RUN}/evaluate/manifest.json",
    log:
        f"{RUN}/logs/evaluate.log",
    params:
        recipe=RECIPE_FILE,
        config=recipes.section(RECIPE, "evaluate"),
    threads: workflow.cores
    conda:
        "../../environment.yml"
    shell:
        "python -m stages.evaluate --recipe {params.recipe:q} --posts {input.posts:q} --pairs {input.pairs:q}"
        " --base {input.base:q} --sft {input.sft:q} --ppo {input.ppo:q} --reward {input.reward:q} --out {output:q}"
        " 2>&1 | tee -a {log:q}"


# One page for people, and the short table in numbers.
rule report:
    input:
        posts=rules.posts.output,
        pairs=rules.pairs.output,
        base=rules.base.output,
        sft=rules.sft.output,
        reward=rules.reward.output,
        ppo=rules.ppo_train.output,
        merged=[rules.sft_merged.output, rules.reward_merged.output, rules.ppo_merged.output],
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
        config=recipes.section(RECIPE, "report"),
    conda:
        "../../environment.yml"
    shell:
        "python -m stages.report --recipe {params.recipe:q} --posts {input.posts:q} --pairs {input.pairs:q}"
        " --base {input.base:q} --sft {input.sft:q} --reward {input.reward:q} --ppo {input.ppo:q}"
        " --merged {input.merged:q} --evaluate {input.evaluate:q} --out {output.manifest:q}"
        " 2>&1 | tee -a {log:q}"
