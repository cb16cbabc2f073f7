# Everything: the merged policy, its evaluation and the report; of several seeds, a report on all of them.
rule ppo:
    localrule: True
    input:
        SEEDS.every(MERGED["ppo"], *rules.report.output),
        POOLED["ppo"],


# The same for its siblings: dpo, rloo, ...
for ALGORITHM in algorithms.SIBLINGS.values():

    rule:
        name:
            ALGORITHM.name
        localrule: True
        input:
            SEEDS.every(f"{RUN}/{ALGORITHM.result}/manifest.json", *getattr(rules, ALGORITHM.rule_name("report")).output),
            POOLED[ALGORITHM.name],
