"""A tiny run for the demo page: what `make demo` reads of a finished one."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from stages.modeling import tokenizer
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.reward_model import initialise_head
from stages.runtime.files import write_json
from tests.helpers import tiny_models


def save_run(run: Path, question: str = "", answer: str = "") -> Path:
    """Folders with manifests; question and answer: of one held-out row more."""
    tiny_models.save_base(run / "sft-merged", seed=0)
    tiny_models.save_base(run / "ppo-merged", seed=1)
    tiny_models.save_base(run / "other", seed=2)
    _save_reward(tiny_models.save_base(run / "reward-base", seed=3), run / "reward-merged")
    tiny_models.save_pairs(run / "pairs", questions_per_split=6)
    if question:
        part = run / "pairs/evaluation/part-00000.parquet"
        table = pq.read_table(part)
        more = table.slice(0, 1).to_pylist()[0] | {"qid": 10_000, "question": question, "response_j": answer}
        pq.write_table(pa.concat_tables([table, pa.Table.from_pylist([more], schema=table.schema)]), part)
    for name in ("sft-merged", "ppo-merged", "reward-merged", "pairs"):
        write_json(run / name / "manifest.json", {"stage": name, "files": {}})
    return run


def _save_reward(base: Path, out: Path) -> None:
    model = load_classifier(base, new_head=True)
    initialise_head(model, torch.Generator().manual_seed(0))
    model.config.reward_mean, model.config.reward_log_probability_weight = 0.25, 1.0
    model.save_pretrained(out)
    tokenizer.load_tokenizer(base).save_pretrained(out)
