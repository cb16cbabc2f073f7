# The user's own prompts in place of a dump: base -> ppo, rloo or grpo -> merged, in place of data.smk and train.smk. There are no pairs.


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
        f"{LOGGED}"


# ppo_train, rloo_train, grpo_train: from the base, with no reward model.
for ALGORITHM in ALGORITHMS.values():

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
            **PLACEMENT.params,
        threads: THREADS
        resources:
            **PLACEMENT.resources,
        conda:
            "../../environment.yml"
        shell:
            "{params.launcher} python -m stages.{params.program} --recipe {params.recipe:q} --policy {input.policy:q} --prompts {input.prompts:q} --out {output:q}"
            " {params.processes}"
            f"{LOGGED}"


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
        stage="|".join(ALGORITHMS),
    threads: THREADS
    conda:
        "../../environment.yml"
    shell:
        "python -m stages.merge --recipe {params.recipe:q} --base {input.base:q} --adapter {input.adapter:q} --prompts {input.prompts:q} --out {output:q}"
        f"{LOGGED}"
