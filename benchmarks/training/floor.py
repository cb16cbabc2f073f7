"""Count the work of a training pass with LoRA, and compare its seconds with the machine's measured rate of products.

Needed: every token once and no padding; logits of labelled tokens only; no gradients of frozen weights. A multiply-add
is two FLOPs. Only the products of matrices and attention are counted.
"""

import json
from pathlib import Path

from benchmarks.common.tables import Goal
from benchmarks.ppo.processes import RunSettings, measure_machine
from benchmarks.training.workload import MODEL, Work


def layer_matrices(config: dict) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of a LLaMA layer's matrices."""
    width, ffn, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_width = config.get("head_dim") or width // heads
    queries, keys = heads * head_width, config["num_key_value_heads"] * head_width
    return {"q_proj": (width, queries), "k_proj": (width, keys), "v_proj": (width, keys), "o_proj": (queries, width),
            "gate_proj": (width, ffn), "up_proj": (width, ffn), "down_proj": (ffn, width)}


def training_flops(config: dict, rank: int, targets: tuple[str, ...], tokens: int, labels: int,
                   attended: int) -> int:
    """Count the FLOPs of forward and backward passes.

    Frozen matrices need two products a token, the layer's own and its input's gradient; those of an adapter three. The
    backward pass of attention is twice its forward pass.

    Args:
        labels: tokens whose logits are needed.
        attended: pairs of a token and one that it attends to, in all texts.
    """
    matrices = layer_matrices(config)
    frozen = sum(inputs * outputs for inputs, outputs in matrices.values())
    adapter = sum(rank * sum(matrices[name]) for name in targets)
    head = config["hidden_size"] * config["vocab_size"]
    layer = tokens * (2 * 2 * frozen + 3 * 2 * adapter) + 3 * 4 * matrices["q_proj"][1] * attended
    return config["num_hidden_layers"] * layer + labels * 2 * 2 * head


def add_shares(figures: dict, work: Work, setting: RunSettings, logits: bool) -> None:
    """Add each contender's share of the machine's rate to its figures, and the rate.

    Tokens are those that it must compute: ours computes no padding, and each text once. logits: items are labels.
    """
    rates = measure_machine(work.precision, setting)
    config = json.loads((Path(work.path(MODEL)) / "config.json").read_text(encoding="utf-8"))
    targets = work.targets or ("q_proj", "v_proj")  # PEFT's choice for a LLaMA
    for one in figures["contenders"].values():
        tokens, labels = min(one["tokens"], one["computed_tokens"]), one["items"] if logits else 0
        one["gflop"] = training_flops(config, work.rank, targets, tokens, labels, one["attended"]) / 1e9
        one["share"] = one["gflop"] * 1e9 / rates.flops / one[setting.basis]
    figures["rates"] = vars(rates)


def smollm2_goals(figures: dict, shape: str, name: str) -> list[Goal]:
    """List the goals of issue 29 for the contender `name`; none for another shape."""
    one = figures["contenders"].get(name)
    if shape != "smollm2" or one is None:
        return []
    return [Goal("share of the measured rate", one["share"], at_least=0.6),
            Goal("peak MB", one["peak_mb"], at_most=6000)]
