"""The program: a table of all stages, what does not fit, errors in one line"""

import json
import os
import subprocess
import sys

import pytest

from stages import plan
from stages.planning import hardware, shapes
from stages.runtime.processes import stage_threads

TINY = ["--recipe", "configs/tiny.yaml"]


def run(capsys, *words: str) -> tuple[int, str, str]:
    status = plan.main(list(words))
    return status, *capsys.readouterr()


def test_the_table_has_every_stage(capsys, tmp_path):
    status, out, _ = run(capsys, *TINY, "--device-memory-gib", "8", "--algorithm", "grpo", "--out", str(tmp_path))
    facts = json.loads((tmp_path / "plan.json").read_text())
    names = ["base", "sft", "sft-merged", "reward", "reward-merged", "grpo", "grpo-merged", "evaluate"]
    assert status == 0 and list(facts["stages"]) == names
    assert all(any(line.split()[:1] == [name] for line in out.splitlines()) for name in names)
    assert "NO" not in out and "does not fit" not in out


def test_what_does_not_fit_comes_with_a_change(capsys, monkeypatch):
    monkeypatch.setattr(shapes, "_download", None)  # no network
    stages = plan._list_stages
    monkeypatch.setattr(plan, "_list_stages", lambda *words: [stage for stage in stages(*words) if stage[0] == "sft"])
    status, out, _ = run(capsys, "--recipe", "configs/stackllama.yaml", "--device-memory-gib", "24", "--devices", "8")
    assert status == 0 and "NO" in out and "\n  sft: sft={microbatch_sequences: 1} needs 16.4 GiB\n" in out


def test_without_a_card_this_machines_processor_is_measured(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "list_cards", list)
    status, out, _ = run(capsys, *TINY, "--out", str(tmp_path))
    facts = json.loads((tmp_path / "plan.json").read_text())
    cores = stage_threads()
    assert status == 0 and f"({cores} cores, " in out and "; fp32: " in out
    assert 0 < facts["share"] <= 1 and facts["share"] != hardware.PUBLISHED_SHARE
    assert all(0.001 * cores < facts["device"][rate] < 10 * cores for rate in ("tflops", "fp32_tflops"))
    assert 1 < facts["device"]["bandwidth_gb_s"] < 2000 and facts["stages"]["ppo"]["seconds"] > 0


def test_the_threads_of_a_stage_are_planned(capsys, monkeypatch):
    monkeypatch.setattr(hardware, "list_cards", list)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(hardware, "SECONDS", 0.01)
    for threads in ("1", "3", "99"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        _, out, _ = run(capsys, *TINY)
        assert f"({min(int(threads), 8)} cores, " in out


@pytest.mark.parametrize(("words", "reason"), [
    ([*TINY, "--device", "TPU"], "--device TPU: unknown"),
    ([*TINY, "--device-memory-gib", "8", "--pairs", "/nowhere"], "/nowhere"),
    (["--recipe", "none.yaml", "--device-memory-gib", "8"], "none.yaml")])
def test_a_mistake_is_one_line(capsys, words, reason):
    status, out, error = run(capsys, *words)
    assert status == 1 and not out and error.count("\n") == 1 and reason in error


def test_a_run_that_starts_gets_one_line(capsys, monkeypatch):
    monkeypatch.setattr(hardware, "list_cards", list)
    status, out, error = run(capsys, *TINY, "--stages", "posts", "base", "ppo", "report")
    assert status == 0 and not out and error.count("\n") == 1
    assert error.startswith("the plan: about ") and " of memory, if nothing else runs on this machine (" in error


def test_a_run_goes_on_without_a_plan(capsys):
    assert run(capsys, "--recipe", "none.yaml", "--stages", "ppo") == (0, "", "")


def test_a_named_card_is_planned_in_three_seconds_without_torch():
    code = ("import sys; from stages import plan; assert not plan.main(sys.argv[1:]); "
            "import resource; own = resource.getrusage(resource.RUSAGE_SELF); "
            "assert 'torch' not in sys.modules and own.ru_utime + own.ru_stime < 3, own")
    subprocess.run([sys.executable, "-c", code, "--recipe", "configs/stackllama.yaml", "--device", "4090"], check=True,
                   capture_output=True)


def test_on_a_card_the_hours_are_a_lower_end(capsys, monkeypatch):
    monkeypatch.setattr(hardware, "list_cards", lambda: [("NVIDIA H200", 140.0)])
    _, _, error = run(capsys, *TINY, "--stages", "base", "ppo")
    assert error.startswith("the plan: at least ") and "(NVIDIA H200)" in error
