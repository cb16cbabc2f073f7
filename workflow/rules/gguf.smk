# A merged model as a GGUF file for llama.cpp and Ollama; the target `gguf` is PPO's: snakemake results/NAME/gguf/dpo.gguf
rule export_gguf:
    input:
        f"{RUN}/{{stage}}-merged/manifest.json",
    output:
        f"{RUN}/gguf/{{stage}}.gguf",
    log:
        f"{RUN}/logs/{{stage}}-gguf.log",
    wildcard_constraints:
        stage="|".join(("sft", *POLICIES)),
    conda:
        "../../environment.yml"
    shell:
        "python -m stages.export_gguf {input:q} --out {output:q}"
        f"{LOGGED}"


rule gguf:
    localrule: True
    input:
        SEEDS.every(f"{RUN}/gguf/ppo.gguf"),
