"""Best-of-n and expert iteration in 1 and 2 processes: the same samples, weights within rounding."""

import pytest

from tests.distributed.forked_ranks import start_worker


def test_two_processes_agree_with_one(library_forks, tmp_path):
    folders = {count: tmp_path / str(count) for count in (1, 2)}
    for folder in folders.values():
        folder.mkdir()
    results = start_worker(library_forks, "tests.rejection_sampling.worker", folders)
    (expected, weights), _ = results[1]
    for facts, _ in results[2]:
        assert facts["winners"] == expected["winners"] and facts["best"] == pytest.approx(expected["best"])
        assert facts["tuned"] == pytest.approx(expected["tuned"], rel=1e-3, abs=1e-5)
        assert facts["history"] == [pytest.approx(row, rel=1e-3, abs=1e-5) for row in expected["history"]]
    adapter = results[2][0][1]
    assert adapter.keys() == weights.keys() and len(weights) > 2
    for name, tensor in weights.items():
        assert (adapter[name] - tensor).norm() <= 1e-4 * tensor.norm() + 1e-7, name
