"""Best-of-n and expert iteration in 1 and 2 processes: the same samples and the same weights, to the bit."""

from tests.distributed.forked_ranks import start_worker


def test_two_processes_agree_with_one(library_forks, tmp_path):
    folders = {count: tmp_path / str(count) for count in (1, 2)}
    for folder in folders.values():
        folder.mkdir()
    results = start_worker(library_forks, "tests.rejection_sampling.worker", folders)
    (expected, weights), _ = results[1]
    for facts, _ in results[2]:
        assert facts == expected
    adapter = results[2][0][1]
    assert adapter.keys() == weights.keys() and len(weights) > 2
    for name, tensor in weights.items():
        assert adapter[name].equal(tensor), name
