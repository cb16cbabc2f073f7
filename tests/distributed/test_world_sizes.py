"""The same run in 1, 2 and 4 processes: the same tokens, weights within rounding, flags that are agreed.

One program runs every check in each number of processes (worker.py); a test compares the results.
"""

import pytest

from tests.distributed.forked_ranks import start_worker

SEVERAL = (2, 4)
DIGITS = {"rel": 2e-5, "abs": 2e-5}


@pytest.fixture(scope="module")
def results(tmp_path_factory, library_forks):
    """Facts and weights of the first and the last process, by the number of processes."""
    folders = {count: tmp_path_factory.mktemp(f"world-{count}") for count in (1, *SEVERAL)}
    return start_worker(library_forks, "tests.distributed.worker", folders)


@pytest.mark.parametrize("count", SEVERAL)
def test_sampled_token_ids_are_equal(results, count):
    expected = results[1][0][0]["sampling"]
    for facts, _ in results[count]:
        actual = facts["sampling"]
        assert actual["one"] == expected["one"]
        for name in ("plain", "limits"):
            assert actual[name][:2] == expected[name][:2], name
            for rows, expected_rows in zip(actual[name][2:], expected[name][2:], strict=True):
                assert rows == [pytest.approx(row, **DIGITS) for row in expected_rows]
        assert actual["logprobs"] == [pytest.approx(row, **DIGITS) for row in expected["logprobs"]]


@pytest.mark.parametrize("trained", ["ppo", "rloo", "grpo", "sft", "muon", "reward", "dpo", "ilql"])
@pytest.mark.parametrize("count", SEVERAL)
def test_weights_are_equal_up_to_rounding(results, count, trained):
    (_, expected), *_ = results[1]
    (_, first), (_, last) = results[count]
    names = [name for name in expected if name.startswith(f"{trained}.")]
    limit = 1e-3 if trained == "muon" else 1e-5  # torch's Muon makes its momentum orthogonal in bf16
    assert names and first.keys() == expected.keys()
    for name in names:
        assert (first[name] - expected[name]).norm() <= limit * expected[name].norm() + 1e-9, name
        assert first[name].equal(last[name]), f"{name} differs between the processes"


@pytest.mark.parametrize("trained", ["sft", "muon", "reward", "dpo", "ilql"])
@pytest.mark.parametrize("count", SEVERAL)
def test_histories_are_equal_to_the_digits_shown(results, count, trained):
    expected = results[1][0][0][trained]["history"]
    for facts, _ in results[count]:
        assert facts[trained]["history"] == [pytest.approx(row, rel=1e-4) for row in expected]
    assert len([row for row in expected if "loss" in row]) > 0


@pytest.mark.parametrize("count", SEVERAL)
def test_ilql_measures_the_same_on_held_out_answers(results, count):
    expected = results[1][0][0]["ilql"]["validation"]
    for facts, _ in results[count]:
        assert facts["ilql"]["validation"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("trained", ["ppo", "rloo", "grpo"])
@pytest.mark.parametrize("count", SEVERAL)
def test_policy_gradient_methods_have_the_same_history_and_state(results, count, trained):
    """Rewards, KL controller and running scale are those of the whole batch, a user's function is called once; so are
    the advantages of a prompt's responses, which are not all in one process.
    """
    expected = results[1][0][0][trained]
    for facts, _ in results[count]:
        assert facts[trained].get("tokens") == expected.get("tokens")
        for row, expected_row in zip(facts[trained]["rows"], expected["rows"], strict=True):
            assert row == pytest.approx(expected_row, rel=1e-3, abs=1e-5)
        assert facts[trained]["state"]["kl_controller"] == pytest.approx(expected["state"]["kl_controller"])
        assert facts[trained]["state"]["reward_shaper"] == pytest.approx(expected["state"]["reward_shaper"], rel=1e-5)


@pytest.mark.parametrize("count", SEVERAL)
def test_dpo_has_the_same_reference_and_log_probabilities(results, count):
    expected = results[1][0][0]["dpo"]
    for facts, _ in results[count]:
        assert facts["dpo"]["reference"] == [pytest.approx(row, **DIGITS) for row in expected["reference"]]
        assert facts["dpo"]["after"] == pytest.approx(expected["after"], rel=1e-4)
        assert facts["dpo"]["start"] == pytest.approx(expected["start"], rel=1e-5)


@pytest.mark.parametrize("count", SEVERAL)
def test_flags_of_one_process_are_agreed(results, count):
    expected = results[1][0][0]["updates"]
    assert expected["flags"] == [True, False, True]
    assert expected["memory"] == [2, 2] and expected["limited"][0] == 1 and expected["not finite"][1] > 0
    for facts, _ in results[count]:
        assert facts["updates"] == expected
