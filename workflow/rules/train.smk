# The model that everything starts from: downloaded, copied, or trained from scratch on the site.
rule base:
    input:
        pairs=rules.pairs.output,
    output:
        f"{RUN}/base/manifest.json",
    log:
        f"{RUN}/logs/base.log",
    params:
        recipe=RECIPE_FILE,
        config=recipes.section_settings(RECIPE, "base"),
        **PLACEMENT.params,
    threads: THREADS
    resources:
        **PLACEMENT.resources,
    conda:
        "../../environment.yml"
    shell:
        "{params.launcher} python -m stages.base --recipe {params.recipe:q} --pairs {input.pairs:q} --out {output:q}"
        " {params.processes}"
        f"{LOGGED}"


# Supervised fine-tuning on the better answers.
rule sft:
    input:
        base=START["sft"],
        pairs=rules.pairs.output,
    output:
        f"{RUN}/sft/manifest.json",
    log:
        f"{RUN}/logs/sft.log",
    params:
        recipe=RECIPE_FILE,
        config=recipes.section_settings(RECIPE, "sft"),
        **PLACEMENT.params,
    threads: THREADS
    resources:
        **PLACEMENT.resources,
    conda:
        "../../environment.yml"
    shell:
        "{params.launcher} python -m stages.sft --recipe {params.recipe:q} --base {input.base:q} --pairs {input.pairs:q} --out {output:q}"
        " {params.processes}"
        f"{LOGGED}"


# Reward model on pairs of answers.
rule reward:
    input:
        base=START["reward"],
        pairs=rules.pairs.output,
    output:
        f"{RUN}/reward/manifest.json",
    log:
        f"{RUN}/logs/reward.log",
    params:
        recipe=RECIPE_FILE,
        config=recipes.section_settings(RECIPE, "reward"),
        **PLACEMENT.params,
    threads: THREADS
    resources:
        **PLACEMENT.resources,
    conda:
        "../../environment.yml"
    shell:
        "{params.launcher} python -m stages.reward --recipe {params.recipe:q} --base {input.base:q} --pairs {input.pairs:q} --out {output:q}"
        " {params.processes}"
        f"{LOGGED}"


# Another reward model, on the questions that PPO has only the prompts of: it judges where no gold score is known.
rule judge:
    input:
        base=START["judge"],
        pairs=rules.pairs.output,
    output:
        f"{RUN}/judge/manifest.json",
    log:
        f"{RUN}/logs/judge.log",
    params:
        recipe=RECIPE_FILE,
        config=recipes.section_settings(RECIPE, "reward"),
        **PLACEMENT.params,
    threads: THREADS
    resources:
        **PLACEMENT.resources,
    conda:
        "../../environment.yml"
    shell:
        "{params.launcher} python -m stages.judge --recipe {params.recipe:q} --base {input.base:q} --pairs {input.pairs:q} --out {output:q}"
        " {params.processes}"
        f"{LOGGED}"


# Policy optimisation by PPO. (The target ppo is everything, up to the report.)
rule ppo_train:
    input:
        policy=START["ppo"],
        reward=rules.reward.output if RECIPE.ppo.value_model == "adapter" else MERGED["reward"],
        pairs=rules.pairs.output,
    output:
        f"{RUN}/ppo/manifest.json",
    log:
        f"{RUN}/logs/ppo.log",
    params:
        recipe=RECIPE_FILE,
        config=recipes.section_settings(RECIPE, "ppo"),
        **PLACEMENT.params,
    threads: POLICY_THREADS
    resources:
        **PLACEMENT.resources,
    conda:
        "../../environment.yml"
    shell:
        "{params.launcher} python -m stages.ppo --recipe {params.recipe:q} --policy {input.policy:q} --reward {input.reward:q} --pairs {input.pairs:q} --out {output:q}"
        " {params.processes}"
        f"{LOGGED}"


# Its siblings: dpo_train, rloo_train, ... Each has a program and a section of the recipe of its name.
for ALGORITHM in algorithms.SIBLINGS.values():

    rule:
        name:
            f"{ALGORITHM.name}_train"
        input:
            **{name: {"policy": MERGED["sft"], "reward": MERGED["reward"], "pairs": rules.pairs.output}[name] for name in ALGORITHM.inputs},
        output:
            f"{RUN}/{ALGORITHM.name}/manifest.json",
        log:
            f"{RUN}/logs/{ALGORITHM.name}.log",
        params:
            recipe=RECIPE_FILE,
            config=recipes.section_settings(RECIPE, ALGORITHM.name),
            program=ALGORITHM.name,
            inputs=variants.format_inputs,
            **PLACEMENT.params,
        threads: POLICY_THREADS
        resources:
            **PLACEMENT.resources,
        conda:
            "../../environment.yml"
        shell:
            "{params.launcher} python -m stages.{params.program} --recipe {params.recipe:q} {params.inputs:q} --out {output:q}"
            " {params.processes}"
            f"{LOGGED}"


# The adapter that a stage has trained, merged into the weights that it was trained on.
rule merge:
    input:
        base=STARTS.find,
        adapter=f"{RUN}/{{stage}}/manifest.json",
        pairs=rules.pairs.output,
    output:
        f"{RUN}/{{stage}}-merged/manifest.json",
    log:
        f"{RUN}/logs/{{stage}}-merged.log",
    params:
        recipe=RECIPE_FILE,
        config=recipes.section_settings(RECIPE, "merge"),
    wildcard_constraints:
        stage="|".join(START),
    threads: THREADS
    conda:
        "../../environment.yml"
    shell:
        "python -m stages.merge --recipe {params.recipe:q} --base {input.base:q} --adapter {input.adapter:q} --pairs {input.pairs:q} --out {output:q}"
        f"{LOGGED}"


# Targets: sft_merged, reward_merged, judge_merged, and those of the algorithms, as ppo_merged.
for STAGE in START:

    rule:
        name:
            f"{STAGE}_merged"
        localrule: True
        input:
            SEEDS.every(f"{RUN}/{STAGE}-merged/manifest.json"),
