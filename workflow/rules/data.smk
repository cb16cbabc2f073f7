# Dump(s) to questions with scored answers.
rule posts:
    input:
        DUMP_FILES,
    output:
        f"{ROOT}/posts/manifest.json",
    log:
        f"{ROOT}/logs/posts.log",
    params:
        recipe=f"{ROOT}/recipe.yaml",
        config=recipes.section_settings(RECIPE, "posts"),
        dump=RECIPE.dump,
    threads: workflow.cores
    conda:
        "../../environment.yml"
    shell:
        "python -m stages.posts --recipe {params.recipe:q} --dump {params.dump:q} --out {output:q}"
        " --processes {threads}"
        f"{LOGGED}"


# Questions to preference pairs, split by question: in one job, or scattered over SHARES jobs and gathered.
if SHARES == 1:

    rule pairs:
        input:
            posts=rules.posts.output,
        output:
            f"{RUN}/pairs/manifest.json",
        log:
            f"{RUN}/logs/pairs.log",
        params:
            recipe=RECIPE_FILE,
            config=recipes.section_settings(RECIPE, "pairs"),
        threads: THREADS
        conda:
            "../../environment.yml"
        shell:
            "python -m stages.pairs --recipe {params.recipe:q} --posts {input.posts:q} --out {output:q}"
            " --processes {threads}"
            f"{LOGGED}"

else:

    rule pairs_share:
        input:
            posts=rules.posts.output,
        output:
            f"{RUN}/pairs-shares/{{share}}-of-{SHARES}/manifest.json",
        log:
            f"{RUN}/logs/pairs-share-{{share}}-of-{SHARES}.log",
        params:
            recipe=RECIPE_FILE,
            config=recipes.section_settings(RECIPE, "pairs"),
            shares=SHARES,
        wildcard_constraints:
            share=r"\d+",
        conda:
            "../../environment.yml"
        shell:
            "python -m stages.pairs --recipe {params.recipe:q} --posts {input.posts:q} --out {output:q}"
            " --share {wildcards.share}/{params.shares} --processes {threads}"
            f"{LOGGED}"

    rule pairs:
        input:
            shares=expand(rules.pairs_share.output, share=range(1, SHARES + 1), allow_missing=True),
        output:
            f"{RUN}/pairs/manifest.json",
        log:
            f"{RUN}/logs/pairs.log",
        params:
            recipe=RECIPE_FILE,
            config=recipes.section_settings(RECIPE, "pairs"),
        conda:
            "../../environment.yml"
        shell:
            "python -m stages.gather --recipe {params.recipe:q} --shares {input.shares:q} --out {output:q}"
            f"{LOGGED}"
