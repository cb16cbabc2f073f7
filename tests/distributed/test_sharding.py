"""Layers whose weights are split over 2 and 4 processes: the same tokens, losses and weights, in less memory.

One program trains in each number of processes with whole and with sharded weights (sharded_worker.py).
"""

from copy import deepcopy

import pytest
from safetensors.torch import load_file

from tests.distributed.forked_ranks import start_worker

SEVERAL = (2, 4)
ALWAYS, IN_TWO = {"ppo full", "sft full"}, {"ppo lora", "ppo lora bf16", "sft lora", "sft resumed"}


@pytest.fixture(scope="module")
def all_results(tmp_path_factory, library_forks):
    folders = {count: tmp_path_factory.mktemp(f"sharded-{count}") for count in SEVERAL}
    results = start_worker(library_forks, "tests.distributed.sharded_worker", folders)
    return {count: (count, *of_ranks[0], folders[count]) for count, of_ranks in results.items()}


@pytest.fixture(params=SEVERAL)
def results(request, all_results):
    """Number of processes, facts and weights of the first one, and its folder."""
    return deepcopy(all_results[request.param])


def test_sampled_tokens_are_equal_although_processes_end_at_different_steps(results):
    _, facts, *_ = results
    whole, sharded = facts["whole"]["sampling"], facts["sharded"]["sampling"]
    assert [len(response) for response in whole["responses"]] == [1, 1, 2, 20, 20]
    assert sharded["responses"] == whole["responses"] and sharded["one"] == whole["one"]
    assert sharded["logprobs"] == [pytest.approx(row, abs=1e-5) for row in whole["logprobs"]]


def test_trained_weights_are_equal(results):
    count, _, tensors, _ = results
    names = [key for key in tensors if key.startswith("whole.")]
    assert {key.split(".")[1] for key in names} == (ALWAYS | IN_TWO if count == 2 else ALWAYS)
    for key in names:
        other = tensors[key.replace("whole", "sharded", 1)]
        assert (tensors[key] - other).norm() <= 1e-5 * tensors[key].norm() + 1e-9, key


def test_histories_are_equal(results):
    """Losses, gradient norms, rewards and KL; those of the resumed run, too."""
    _, facts, *_ = results
    for name in facts["whole"].keys() - {"sampling"}:
        field = "rows" if name.startswith("ppo") else "history"
        rows = facts["whole"][name][field]
        assert len(rows) >= 2
        for row, other in zip(rows, facts["sharded"][name][field], strict=True):
            assert other == pytest.approx(row, rel=1e-5, abs=1e-6)


def test_a_process_stores_its_share_of_the_layers(results):
    count, facts, *_ = results
    whole, sharded = facts["whole"]["sampling"], facts["sharded"]["sampling"]
    assert sharded["bytes"] == pytest.approx(whole["bytes"] - whole["layer_bytes"] * (1 - 1 / count), rel=0.01)
    for name in facts["whole"].keys() & {"ppo full", "ppo lora", "ppo lora bf16"}:
        assert facts["sharded"][name]["bytes"] < facts["whole"][name]["bytes"], name


def test_the_saved_model_is_whole(results):
    _, _, tensors, folder = results
    saved = load_file(folder / "files-0/sharded/full/saved/model.safetensors")
    names = [key for key in tensors if key.startswith("sharded.sft full.")]
    assert {name.removeprefix("sharded.sft full.") for name in names} == set(saved)
    for name in names:
        assert tensors[name].equal(saved[name.removeprefix("sharded.sft full.")])
