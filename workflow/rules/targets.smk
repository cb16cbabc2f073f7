# Everything of an algorithm: ppo, dpo, ... are the merged policy, its evaluation and the report; of several seeds, a report on all.
for ALGORITHM in ALGORITHMS.values():

    rule:
        name:
            ALGORITHM.name
        localrule: True
        input:
            SEEDS.every(f"{RUN}/{ALGORITHM.result}/manifest.json", *getattr(rules, ALGORITHM.rule_name("report")).output),
            POOLED[ALGORITHM.name],
