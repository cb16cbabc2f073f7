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
        config=recipes.section(RECIPE, "base"),
    threads: workflow.cores
    conda:
        "../../environment.yml"
    shell:
        "python -m stages.base --recipe {params.recipe:q} --pairs {input.pairs:q} --out {output:q}"
        " 2>&1 | tee -a {log:q}"


# Supervised fine-tuning on the better answers.
rule sft:
    input:
        base=rules.base.output,
        pairs=rules.pairs.output,
    output:
        f"{RUN}/sft/manifest.json",
    log:
        f"{RUN}/logs/sft.log",
    params:
        recipe=RECIPE_FILE,
        config=recipes.section(RECIPE, "sft"),
    threads: workflow.cores
    conda:
        "../../environment.yml"
    shell:
        "python -m stages.sft --recipe {params.recipe:q} --base {input.base:q} --pairs {input.pairs:q} --out {output:q}"
        " 2>&1 | tee -a {log:q}"


# The sft adapter into the weights it was trained on.
rule sft_merged:
    input:
        base=rules.base.output,
        adapter=rules.sft.output,
        pairs=rules.pairs.output,
    output:
        f"{RUN}/sft-merged/manifest.json",
    log:
        f"{RUN}/logs/sft-merged.log",
    params:
        recipe=RECIPE_FILE,
        config=recipes.section(RECIPE, "merge"),
    threads: workflow.cores
    conda:
        "../../environment.yml"
    shell:
        "python -m stages.merge --recipe {params.recipe:q} --base {input.base:q} --adapter {input.adapter:q} --pairs {input.pairs:q} --out {output:q}"
        " 2>&1 | tee -a {log:q}"


# Reward model on pairs of answers.
rule reward:
    input:
        base=rules.sft_merged.output if RECIPE.reward.start_from == "sft" else rules.base.output,
        pairs=rules.pairs.output,
    output:
        f"{RUN}/reward/manifest.json",
    log:
        f"{RUN}/logs/reward.log",
    params:
        recipe=RECIPE_FILE,
        config=recipes.section(RECIPE, "reward"),
    threads: workflow.cores
    conda:
        "../../environment.yml"
    shell:
        "python -m stages.reward --recipe {params.recipe:q} --base {input.base:q} --pairs {input.pairs:q} --out {output:q}"
        " 2>&1 | tee -a {log:q}"


# The reward adapter into the weights it was trained on.
rule reward_merged:
    input:
        base=rules.reward.input.base,
        adapter=rules.reward.output,
        pairs=rules.pairs.output,
    output:
        f"{RUN}/reward-merged/manifest.json",
    log:
        f"{RUN}/logs/reward-merged.log",
    params:
        recipe=RECIPE_FILE,
        config=recipes.section(RECIPE, "merge"),
    threads: workflow.cores
    conda:
        "../../environment.yml"
    shell:
        "python -m stages.merge --recipe {params.recipe:q} --base {input.base:q} --adapter {input.adapter:q} --pairs {input.pairs:q} --out {output:q}"
        " 2>&1 | tee -a {log:q}"


# Policy optimisation. (The rule that is called ppo is the whole thing, up to the report.)
rule ppo_train:
    input:
        policy=rules.sft_merged.output,
        reward=rules.reward.output if RECIPE.ppo.value_model == "adapter" else rules.reward_merged.output,
        pairs=rules.pairs.output,
    output:
        f"{RUN}/ppo/manifest.json",
    log:
        f"{RUN}/logs/ppo.log",
    params:
        recipe=RECIPE_FILE,
        config=recipes.section(RECIPE, "ppo"),
    threads: workflow.cores
    conda:
        "../../environment.yml"
    shell:
        "python -m stages.ppo --recipe {params.recipe:q} --policy {input.policy:q} --reward {input.reward:q} --pairs {input.pairs:q} --out {output:q}"
        " 2>&1 | tee -a {log:q}"


# The ppo adapter into the weights it was trained on.
rule ppo_merged:
    input:
        base=rules.sft_merged.output,
        adapter=rules.ppo_train.output,
        pairs=rules.pairs.output,
    output:
        f"{RUN}/ppo-merged/manifest.json",
    log:
        f"{RUN}/logs/ppo-merged.log",
    params:
        recipe=RECIPE_FILE,
        config=recipes.section(RECIPE, "merge"),
    threads: workflow.cores
    conda:
        "../../environment.yml"
    shell:
        "python -m stages.merge --recipe {params.recipe:q} --base {input.base:q} --adapter {input.adapter:q} --pairs {input.pairs:q} --out {output:q}"
        " 2>&1 | tee -a {log:q}"
