# The user's own prompts in place of a dump: base -> ppo, rloo or grpo -> merged -> evaluate -> report. There are no pairs.
OWN = {name: algorithms.ALGORITHMS[name] for name in own_prompts.ALGORITHMS}


rule base:
    output:
        f"{RUN}/base/manifest.json",
    log:
        f"{RUN}/logs/base.log",
    params:
        recipe=RECIPE_FILE,
        config=recipes.section_settings(RECIPE, "base"),
    conda:
        "../../environment.yml"
    shell:
        "python -m stages.base --recipe {params.recipe:q} --out {output:q}"
        " 2>&1 | (trap '' INT TERM HUP; tee -a {log:q} || true)"


# ppo_train, rloo_train, grpo_train: from the base, with no reward model.
for ALGORITHM in OWN.values():

    rule:
        name:
            f"{ALGORITHM.name}_train"
        input:
            policy=BASE,
            prompts=RECIPE.prompts,
        output:
            f"{RUN}/{ALGORITHM.name}/manifest.json",
        log:
            f"{RUN}/logs/{ALGORITHM.name}.log",
        params:
            recipe=RECIPE_FILE,
            config=recipes.section_settings(RECIPE, ALGORITHM.name),
            program=ALGORITHM.name,
            launcher=PLACEMENT.launcher,
            processes=PLACEMENT.options,
        threads: THREADS
        resources:
            **PLACEMENT.resources,
        conda:
            "../../environment.yml"
        shell:
            "{params.launcher} python -m stages.{params.program} --recipe {params.recipe:q} --policy {input.policy:q} --prompts {input.prompts:q} --out {output:q}"
            " {params.processes}"
            " 2>&1 | (trap '' INT TERM HUP; tee -a {log:q} || true)"


rule merge:
    input:
        base=BASE,
        adapter=f"{RUN}/{{stage}}/manifest.json",
        prompts=RECIPE.prompts,
    output:
        f"{RUN}/{{stage}}-merged/manifest.json",
    log:
        f"{RUN}/logs/{{stage}}-merged.log",
    params:
        recipe=RECIPE_FILE,
        config=recipes.section_settings(RECIPE, "merge"),
    wildcard_constraints:
        stage="|".join(OWN),
    threads: THREADS
    conda:
        "../../environment.yml"
    shell:
        "python -m stages.merge --recipe {params.recipe:q} --base {input.base:q} --adapter {input.adapter:q} --prompts {input.prompts:q} --out {output:q}"
        " 2>&1 | (trap '' INT TERM HUP; tee -a {log:q} || true)"


# On held-out prompts: compare each policy with the base that it started from, and with best-of-n of it.
for ALGORITHM in OWN.values():

    rule:
        name:
            ALGORITHM.rule_name("evaluate")
        input:
            base=BASE,
            policy=f"{RUN}/{ALGORITHM.result}/manifest.json",
            prompts=RECIPE.prompts,
        output:
            f"{RUN}/{ALGORITHM.folder('evaluate')}/manifest.json",
        log:
            f"{RUN}/logs/{ALGORITHM.folder('evaluate')}.log",
        params:
            recipe=RECIPE_FILE,
            config=recipes.section_settings(RECIPE, "evaluate"),
            policy=ALGORITHM.format_policy,
            launcher=PLACEMENT.launcher,
            processes=PLACEMENT.options,
        threads: THREADS
        resources:
            **PLACEMENT.resources,
        conda:
            "../../environment.yml"
        shell:
            "{params.launcher} python -m stages.evaluate_prompts --recipe {params.recipe:q} --base {input.base:q}"
            " {params.policy:q} --file {input.prompts:q} --out {output:q}"
            " {params.processes}"
            " 2>&1 | (trap '' INT TERM HUP; tee -a {log:q} || true)"

    # The report page, with its figures and metrics.
    rule:
        name:
            ALGORITHM.rule_name("report")
        input:
            base=BASE,
            policy=f"{RUN}/{ALGORITHM.name}/manifest.json",
            merged=f"{RUN}/{ALGORITHM.result}/manifest.json",
            evaluate=f"{RUN}/{ALGORITHM.folder('evaluate')}/manifest.json",
        output:
            manifest=f"{RUN}/{ALGORITHM.folder('report')}/manifest.json",
            page=report(f"{RUN}/{ALGORITHM.folder('report')}/report.html", caption="../report/page.rst", category="Report", labels={"run": RUN_LABEL, "policy": ALGORITHM.name, "shows": "the whole page"}),
        log:
            f"{RUN}/logs/{ALGORITHM.folder('report')}.log",
        params:
            recipe=RECIPE_FILE,
            config=recipes.section_settings(RECIPE, "report"),
            policy=ALGORITHM.format_policy,
        conda:
            "../../environment.yml"
        shell:
            "python -m stages.report --recipe {params.recipe:q} --base {input.base:q} {params.policy:q}"
            " --merged {input.merged:q} --evaluate {input.evaluate:q} --out {output.manifest:q}"
            " 2>&1 | (trap '' INT TERM HUP; tee -a {log:q} || true)"


# Targets: ppo, rloo, grpo.
for ALGORITHM in OWN.values():

    rule:
        name:
            ALGORITHM.name
        localrule: True
        input:
            SEEDS.every(f"{RUN}/{ALGORITHM.result}/manifest.json", *getattr(rules, ALGORITHM.rule_name("report")).output),
