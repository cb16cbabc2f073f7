# Dump(s) to questions with scored answers.
rule posts:
    input:
        DUMP_FILES,
    output:
        f"{RUN}/posts/manifest.json",
    log:
        f"{RUN}/logs/posts.log",
    params:
        recipe=RECIPE_FILE,
        config=recipes.section(RECIPE, "posts"),
        dump=RECIPE.dump,
    conda:
        "../../environment.yml"
    shell:
        "python -m stages.posts --recipe {params.recipe:q} --dump {params.dump:q} --out {output:q}"
        " 2>&1 | tee -a {log:q}"


# Questions to preference pairs, split by question.
rule pairs:
    input:
        posts=rules.posts.output,
    output:
        f"{RUN}/pairs/manifest.json",
    log:
        f"{RUN}/logs/pairs.log",
    params:
        recipe=RECIPE_FILE,
        config=recipes.section(RECIPE, "pairs"),
    conda:
        "../../environment.yml"
    shell:
        "python -m stages.pairs --recipe {params.recipe:q} --posts {input.posts:q} --out {output:q}"
        " 2>&1 | tee -a {log:q}"
