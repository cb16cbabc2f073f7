# Ways to align, compared at equal KL: further trainings of some algorithms, one evaluation of all, one page.
# The control that PPO may have in its own evaluation is trained and merged here, too.
VARIANTS = variants.list_variants(RECIPE.frontier)
OWN_TRAININGS = variants.list_own_trainings(RECIPE, VARIANTS + CONTROLS)
TRAINED = {variant.key: f"{RUN}/{variant.folder(RECIPE)}/manifest.json" for variant in VARIANTS}
TRAINED_MERGED = {variant.key: f"{RUN}/{variant.folder(RECIPE)}-merged/manifest.json" for variant in VARIANTS}

# A variant with other settings than the run's own training: frontier_ppo_kl_0_03, ... A shell command is made when its job
# runs, after the loop: what differs by rule must be in params.
for VARIANT in OWN_TRAININGS:

    rule:
        name:
            f"frontier_{VARIANT.key}"
        input:
            **dict(getattr(rules, f"{VARIANT.section}_train").input.items()),
            **VARIANT.further_inputs(RUN),
        output:
            f"{RUN}/{VARIANT.folder(RECIPE)}/manifest.json",
        log:
            f"{RUN}/logs/frontier-{VARIANT.name}.log",
        params:
            recipe=RECIPE_FILE,
            config=variants.variant_settings(RECIPE, VARIANT.section, VARIANT.overrides),
            program=VARIANT.section,
            inputs=variants.format_inputs,
            options=variants.format_options(VARIANT.overrides),
            **PLACEMENT.params,
        threads: POLICY_THREADS
        resources:
            **PLACEMENT.resources,
        conda:
            "../../environment.yml"
        shell:
            "{params.launcher} python -m stages.{params.program} --recipe {params.recipe:q} {params.inputs:q} --out {output:q}"
            " {params.options:q} {params.processes}"
            f"{LOGGED}"


# The adapter of a variant, merged.
rule frontier_merge:
    input:
        base=MERGED["sft"],
        adapter=f"{RUN}/frontier/{{variant}}/manifest.json",
        pairs=rules.pairs.output,
    output:
        f"{RUN}/frontier/{{variant}}-merged/manifest.json",
    log:
        f"{RUN}/logs/frontier-{{variant}}-merged.log",
    params:
        recipe=RECIPE_FILE,
        config=recipes.section_settings(RECIPE, "merge"),
    wildcard_constraints:
        variant="|".join(variant.name for variant in [*VARIANTS, *OWN_TRAININGS]),
    threads: THREADS
    conda:
        "../../environment.yml"
    shell:
        "python -m stages.merge --recipe {params.recipe:q} --base {input.base:q} --adapter {input.adapter:q} --pairs {input.pairs:q} --out {output:q}"
        f"{LOGGED}"


# All policies on the same held-out questions.
rule frontier_evaluate:
    input:
        posts=rules.posts.output,
        base=rules.base.output,
        sft=MERGED["sft"],
        reward=MERGED["reward"],
        judge=JUDGE_MERGED,
        pairs=rules.pairs.output,
        **TRAINED_MERGED,
    output:
        f"{RUN}/frontier/evaluate/manifest.json",
    log:
        f"{RUN}/logs/frontier-evaluate.log",
    params:
        recipe=RECIPE_FILE,
        config=variants.variant_settings(RECIPE, "evaluate", variants.evaluation_overrides(RECIPE.frontier)),
        options=variants.format_options(variants.evaluation_overrides(RECIPE.frontier)),
        **PLACEMENT.params,
    threads: THREADS
    resources:
        **PLACEMENT.resources,
    conda:
        "../../environment.yml"
    shell:
        "{params.launcher} python -m stages.evaluate --recipe {params.recipe:q} --posts {input.posts:q} --pairs {input.pairs:q}"
        " --base {input.base:q} --sft {input.sft:q} --reward {input.reward:q} --judge {input.judge:q}"
        f" {' '.join(variant.policy_flag for variant in VARIANTS)}"
        " --out {output:q} {params.options:q} {params.processes}"
        f"{LOGGED}"


# The page, of one seed or of all.
rule frontier_page:
    input:
        evaluate=SEEDS.every(f"{RUN}/frontier/evaluate/manifest.json"),
        trained=SEEDS.every(*TRAINED.values(), *TRAINED_MERGED.values(), *(f"{RUN}/{stage}{end}/manifest.json" for stage in ("sft", "reward") for end in ("", "-merged"))),
    output:
        f"{ROOT}/frontier/page/manifest.json",
    log:
        f"{ROOT}/logs/frontier-page.log",
    params:
        recipe=f"{ROOT}/recipe.yaml",
        config=recipes.section_settings(RECIPE, "frontier"),
    conda:
        "../../environment.yml"
    shell:
        "python -m stages.frontier --recipe {params.recipe:q} --evaluate {input.evaluate:q} --trained {input.trained:q} --out {output:q}"
        f"{LOGGED}"


rule frontier:
    localrule: True
    input:
        rules.frontier_page.output,
