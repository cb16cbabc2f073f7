"""Merge: adapters into their base, for sft, reward and ppo alike.

    python -m stages.merge --recipe configs/demo.yaml --base results/demo/base \\
        --adapter results/demo/sft --pairs results/demo/pairs --out results/demo/sft-merged

Several adapters go in one after the other, in the order they were trained: `--adapter results/demo/sft
results/demo/reward`. The result is a plain model folder that `from_pretrained` loads, with merge.json: how much each
matrix changed, how far logits moved, and what became of perplexity (of a reward model: of its pair accuracy) on some
pairs. It is reloaded from disk and compared with the base with its adapters on before it is published; above the
recipe's limits nothing is. It never pushes anywhere.
"""

import json
from itertools import groupby
from pathlib import Path

from stages.modeling import torch_setup
from stages.modeling.adapters import check_base, is_adapter, is_scorer
from stages.modeling.families import max_positions
from stages.modeling.merge import check_order, merge
from stages.modeling.tokenizer import load_tokenizer
from stages.recipe.models import Merge
from stages.reporting.model_card import Made, model_card
from stages.reward_modeling.dataset import Example, examples
from stages.reward_modeling.scoring_file import member_folder, member_folders
from stages.runtime.artifact import MANIFEST, folder_of, read_manifest, write_text
from stages.stackexchange.pairs.table import key_of, rows_of

PAIRS = 64  # at most, that a merge is judged on
TEXT_TOKENS = 2048  # or what the model has positions for; longer texts are passed over


def run(config: Merge, out: Path, *, base: Path, adapter: list[str], pairs: Path) -> dict[str, float]:
    """Fill `out` with the merged model, its tokenizer and merge.json; returns the report's numbers.

    pairs: a causal model is judged on a better answer to each of the finetune split's first questions, a reward model
    on the reward split's first pairs.
    """
    torch_setup.prepare()
    adapters = [folder_of(folder) for folder in adapter]
    check_order(adapters)
    if is_adapter(adapters[0]):
        check_base(adapters[0], base)
    texts = _texts(base, adapters[-1], pairs)
    report, *_ = (
        merge(
            base,
            [*adapters[:-1], last],
            member_folder(out, number),
            texts,
            dtype=config.dtype,
            max_shard_bytes=config.max_shard_bytes,
            max_logit_difference=config.max_logit_difference,
            max_perplexity_change=config.max_perplexity_change,
            max_accuracy_change=config.max_accuracy_change,
        )
        for number, last in enumerate(member_folders(adapters[-1]))  # one, but for an ensemble of reward models
    )
    numbers = {name: value for name, value in report.items() if name != "layers"}
    write_text(out / "README.md", model_card(_made(adapters[-1], base, numbers, pairs)))
    return numbers


def _made(adapter: Path, base: Path, report: dict, pairs: Path) -> Made:
    """What the artifacts say of the model; a folder that is none says little."""
    manifest = read_manifest(adapter) if (adapter / MANIFEST).is_file() else {}
    stage = manifest.get("stage") or ("reward" if is_scorer(adapter) else "sft")
    told = pairs / "metrics.json"
    return Made(stage, manifest.get("config", {}), manifest.get("metrics", {}), _pretrained(base), report,
                json.loads(told.read_text(encoding="utf-8")) if told.is_file() else {})


def _pretrained(base: Path) -> str | None:
    """The model that everything started from, as the recipe names it: what the base's ancestors lead to."""
    while (base / MANIFEST).is_file():
        manifest = read_manifest(base)
        if manifest["stage"] == "base":
            return manifest["config"]["model"]
        base = Path(manifest["inputs"].get("base", {"path": ""})["path"])
    return None


def _texts(base: Path, adapter: Path, pairs: Path) -> list[Example]:
    scorer, limit = is_scorer(adapter), min(max_positions(base), TEXT_TOKENS)
    split = "reward" if scorer else "finetune"
    rows = rows_of(pairs, split)
    if not scorer:
        rows = (next(group) for _, group in groupby(rows, key=key_of))
    tokenizer = load_tokenizer(adapter)
    found, _ = examples(rows, tokenizer, max_length_tokens=limit, by_question=True, max_pairs=PAIRS)
    if not found:
        raise ValueError(f"{pairs} has no pair of at most {limit} tokens in its {split} split: the merged model could "
                         f"not be judged")
    return found


if __name__ == "__main__":
    from stages.runtime.command import main

    main(run)
