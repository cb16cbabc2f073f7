"""With the setting cuda_graphs, stages sample by static steps where graphs can be captured."""

import pytest

from stages.generation import cuda_graphs
from stages.generation.static_decoding import StaticDecodeState
from tests.helpers.tiny_stages import run_stage, save_policy_inputs


@pytest.mark.parametrize("stage", ["ppo", "best_of_n", "expert_iteration"])
def test_stages_sample_by_static_steps(stage, tmp_path, monkeypatch):
    steps, decode = [], StaticDecodeState._decode
    monkeypatch.setattr(StaticDecodeState, "_decode", lambda decoder: steps.append(decoder) or decode(decoder))
    monkeypatch.setattr(cuda_graphs, "_obstacle", lambda model: None)  # as on a GPU
    few = {"iterations": 1} if stage == "ppo" else {"n": 2} if stage == "best_of_n" else {"rounds": 1}
    run_stage(stage, few | {"cuda_graphs": True, "cpu_kernels": "off"}, tmp_path / "out",
              {stage: save_policy_inputs(tmp_path)})
    assert steps
