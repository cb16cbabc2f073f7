"""The same run in 1, 2, 4 and 8 processes: the same bits of tokens, weights and histories, flags that are agreed.

One program runs every check in each number of processes (worker.py), but 8 processes, which have less than a unit each,
train only OF_MOST; a test compares the results.
"""

import pytest

from tests.distributed.forked_ranks import start_worker
from tests.distributed.worker import MOST_PROCESSES, OF_MOST

SEVERAL = (2, 4, MOST_PROCESSES)
TRAINED = ("ppo", "critic", "ppo groups", "rloo", "grpo", "sft", "dropout", "muon", "reward", "dpo", "ilql")
CASES = [(count, name) for count in SEVERAL for name in (OF_MOST if count == MOST_PROCESSES else TRAINED)]


@pytest.fixture(scope="module")
def results(tmp_path_factory, library_forks):
    """Facts and weights of the first and the last process, by the number of processes."""
    folders = {count: tmp_path_factory.mktemp(f"world-{count}") for count in (1, *SEVERAL)}
    return start_worker(library_forks, "tests.distributed.worker", folders)


@pytest.mark.parametrize("count", SEVERAL)
def test_sampling_is_equal_to_the_bit(results, count):
    for facts, _ in results[count]:
        assert facts["sampling"] == results[1][0][0]["sampling"]


@pytest.mark.parametrize(("count", "trained"), CASES)
def test_weights_are_equal_to_the_bit(results, count, trained):
    (_, expected), *_ = results[1]
    names = {name for name in expected if name.startswith(f"{trained}.")}
    assert names
    for _, weights in results[count]:
        assert {name for name in weights if name.startswith(f"{trained}.")} == names
        assert [name for name in names if not weights[name].equal(expected[name])] == []


@pytest.mark.parametrize(("count", "trained"), CASES)
def test_histories_and_states_are_equal_to_the_bit(results, count, trained):
    """Losses, validation, references, rewards, KL controller and running scale; a user's function is called once."""
    expected = results[1][0][0][trained]
    assert [row for row in expected.get("history", expected.get("rows")) if "loss" in row or "policy_loss" in row]
    for facts, _ in results[count]:
        assert facts[trained] == expected


@pytest.mark.parametrize("count", SEVERAL)
def test_flags_of_one_process_are_agreed(results, count):
    expected = results[1][0][0]["updates"]
    assert expected["flags"] == [True, False, True]
    assert expected["memory"] == [2, 2] and expected["limited"][0] == 1 and expected["not finite"][1] > 0
    for facts, _ in results[count]:
        assert facts["updates"] == expected
