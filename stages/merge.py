"""Merge: one adapter into its base, for sft, reward and ppo alike.

    python -m stages.merge --recipe configs/demo.yaml --base results/demo/base \\
        --adapter results/demo/sft --out results/demo/sft-merged

The result is a plain model folder that `from_pretrained` loads. It is reloaded from disk and compared with the base
with its adapter on before it is published; if they differ, nothing is. It never pushes anywhere.
"""

from pathlib import Path

from stages.learning.merging import merge
from stages.recipe import Merge


def run(config: Merge, out: Path, *, base: Path, adapter: Path) -> dict[str, float]:
    """Fill `out` with the merged model and its tokenizer; returns the largest differences found."""
    return merge(base, adapter, out, config.dtype, config.max_logit_difference)


if __name__ == "__main__":
    from stages.plumbing.command import main

    main(run)
