"""What the processes of test_processes compute: both stages, on tiny inputs.

    python -m tests.rejection_sampling.worker FOLDER PROCESSES [FOLDER PROCESSES ...]      see forked_ranks.py
"""

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from tests.distributed.forked_ranks import run_in_ranks
from tests.helpers import tiny_stages


def run_stages(folder: Path) -> tuple[dict, dict]:
    """Return what both stages measured and sampled, and the adapter of expert iteration; all processes write."""
    inputs = {name: folder.parent / name for name in ("policy", "reward", "pairs")}
    given = dict.fromkeys(("best_of_n", "expert_iteration"), inputs)
    best, tuned = folder / "best", folder / "tuned"
    facts = {"best": tiny_stages.run_stage("best_of_n", {}, best, given),
             "tuned": tiny_stages.run_stage("expert_iteration", {}, tuned, given)}
    facts["winners"] = pq.read_table(best / "samples.parquet")["winner"].to_pylist()
    facts["history"] = [json.loads(line) for line in (tuned / "history.jsonl").read_text().splitlines()]
    adapter = tuned / "adapter_model.safetensors"  # of the first process alone
    return facts, load_file(adapter) if adapter.exists() else {"none": torch.zeros(1)}


if __name__ == "__main__":
    for place in map(Path, sys.argv[1::2]):
        tiny_stages.save_policy_inputs(place)  # not in the processes: Transformers saves in the first one only
    sys.exit(run_in_ranks(run_stages, sys.argv[1:]))
