"""Gather: combine shares of the pairs, built separately, into the artifact that a single command would write.

    python -m stages.pairs --recipe configs/demo.yaml --posts results/demo/posts --share 1/2 --out results/mine/1
    python -m stages.pairs --recipe configs/demo.yaml --posts results/demo/posts --share 2/2 --out results/mine/2
    python -m stages.gather --recipe configs/demo.yaml --shares results/mine/1 results/mine/2 --out results/mine/pairs
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

import shutil
from pathlib import Path

from stages.artifacts.artifact import artifact_folder, read_manifest
from stages.cards.dataset_card import render_pairs_card
from stages.recipe.sections.data import Pairs
from stages.runtime.files import check_free_space, is_on_device, link_or_copy, used_bytes, write_json, write_text
from stages.stackexchange.pairs.counts import print_split_sizes, sum_metrics
from stages.stackexchange.pairs.table import SPLITS


def run(config: Pairs, out: Path, *, shares: list[str]) -> dict:
    """Fill `out` with the parts of all shares and return the sum of their counts.

    Raises ValueError if the shares are not complete, differ in settings or inputs, or have no pair.
    """
    folders = [artifact_folder(share) for share in shares]
    manifests = [read_manifest(folder) for folder in folders]
    _check_shares(folders, manifests)
    for split in SPLITS:
        shutil.rmtree(out / split, ignore_errors=True)
    parts = [part for folder in folders for split in SPLITS for part in sorted((folder / split).glob("part-*.parquet"))]
    copied_bytes = used_bytes(*(part for part in parts if not is_on_device(part, out)))  # the others are linked
    check_free_space("the copy of the shares", out, copied_bytes)
    for split in SPLITS:
        (out / split).mkdir()
    for part in parts:
        link_or_copy(part, out / part.parent.name / part.name)
    metrics = sum_metrics([manifest["metrics"] for manifest in manifests])
    if not metrics["pairs"]:
        raise ValueError(f"no pair in {len(shares)} shares; dropped: {metrics['dropped_questions']}")
    write_text(out / "README.md", render_pairs_card(vars(config), metrics))
    write_json(out / "metrics.json", metrics)
    print_split_sizes(vars(config), metrics)
    return metrics


def _check_shares(folders: list[Path], manifests: list[dict]) -> None:
    first = manifests[0]
    required = [f"{number}/{len(folders)}" for number in range(1, len(folders) + 1)]
    shares = [str(manifest.get("share")) for manifest in manifests]
    if sorted(shares) != sorted(required):
        raise ValueError(f"these are the shares {', '.join(shares)}; needed are {', '.join(required)}")
    for folder, manifest in zip(folders, manifests, strict=True):
        for name in ("config", "inputs"):
            if manifest[name] != first[name]:
                raise ValueError(f"{folder} was made with another {name} than {folders[0]}: make its share again")
