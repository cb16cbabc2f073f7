# What the run needs and takes, printed before it starts: nothing is downloaded but the base's config.json.
rule plan:
    localrule: True
    threads: workflow.cores  # the processor is planned with as many
    log:
        ".snakemake/plan/plan.log",
    params:
        recipe=run_folder.write_recipe(Path(".snakemake/plan/recipe.yaml"), RECIPE) if PLANS else f"{ROOT}/recipe.yaml",
        options=PLAN_OPTIONS,
    conda:
        "../../environment.yml"
    shell:
        "python -m stages.plan --recipe {params.recipe:q} {params.options:q} 2>&1 | tee {log:q}"
