# What each training starts from and reads: inputs of its rule, and flags of its program, of the same names.
if RECIPE.prompts:
    TEXTS = {"prompts": RECIPE.prompts}
    TRAININGS = {"base": {}} | {name: {"policy": BASE} | TEXTS for name in ALGORITHMS}
else:
    TEXTS = {"pairs": rules.pairs.output}
    TRAININGS = {"base": TEXTS} | {stage: {"base": START[stage]} | TEXTS for stage in ("sft", "reward", "judge")}
    GIVEN = {"policy": MERGED["sft"], "reward": MERGED["reward"]} | TEXTS
    TRAININGS |= {name: {key: GIVEN[key] for key in algorithm.inputs} for name, algorithm in ALGORITHMS.items()}
    if RECIPE.ppo.value_model == "adapter":
        TRAININGS["ppo"]["reward"] = f"{RUN}/reward/manifest.json"

# base: the model that everything starts from: downloaded, copied, or trained from scratch on the site. sft: supervised fine-tuning
# on the better answers. reward: a reward model on pairs of answers. judge: another one, on the questions that PPO has only the
# prompts of. ppo_train, dpo_train, ...: alignment by each algorithm (the target ppo is everything, up to the report).
# Each has a program and a section of the recipe of its name; the judge has the reward's section.
for STAGE, INPUTS in TRAININGS.items():

    rule:
        name:
            f"{STAGE}_train" if STAGE in ALGORITHMS else STAGE
        input:
            **INPUTS,
        output:
            f"{RUN}/{STAGE}/manifest.json",
        log:
            f"{RUN}/logs/{STAGE}.log",
        params:
            recipe=RECIPE_FILE,
            config=recipes.section_settings(RECIPE, "reward" if STAGE == "judge" else STAGE),
            program=STAGE,
            inputs=variants.format_inputs,
            **PLACEMENT.params,
        threads: POLICY_THREADS if STAGE in ALGORITHMS else REWARD_THREADS.get(STAGE, THREADS)
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
        base=STARTS,
        adapter=f"{RUN}/{{stage}}/manifest.json",
        **TEXTS,
    output:
        f"{RUN}/{{stage}}-merged/manifest.json",
    log:
        f"{RUN}/logs/{{stage}}-merged.log",
    params:
        recipe=RECIPE_FILE,
        config=recipes.section_settings(RECIPE, "merge"),
        inputs=variants.format_inputs,
    wildcard_constraints:
        stage="|".join(START),
    threads: THREADS
    conda:
        "../../environment.yml"
    shell:
        "python -m stages.merge --recipe {params.recipe:q} {params.inputs:q} --out {output:q}"
        f"{LOGGED}"


# Targets of a run on a dump: sft_merged, reward_merged, judge_merged, and those of the algorithms, as ppo_merged.
for STAGE in () if RECIPE.prompts else START:

    rule:
        name:
            f"{STAGE}_merged"
        localrule: True
        input:
            SEEDS.every(f"{RUN}/{STAGE}-merged/manifest.json"),
