"""The PPO benchmark: its floor counted by hand, its fits, its turns, its JSON; nothing is timed."""

import json
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.ppo import flop_floor, ours, processes, profile, run, scaling, workload
from benchmarks.ppo.flop_floor import Rates
from benchmarks.ppo.processes import LEGACY, OURS, Contender, RunSettings
from benchmarks.ppo.workload import Shape

TINY = Shape(width=64, layers=2, vocabulary=50, prompts=(2, 5), response=3, batch=4, minibatch=2, epochs=2)
RATES = Rates(flops=1e9, bytes=1e9, route="mm, 2048", precision="fp32")


def layer(shape: Shape) -> list[tuple[int, int]]:
    """Weights of one layer: q, k, v, o, gate, up, down."""
    d, i = shape.width, shape.intermediate
    return [(d, d)] * 4 + [(d, i)] * 2 + [(i, d)]


def by_hand(shape: Shape, start: int, stop: int, logits: int, lora: bool = False) -> dict[str, int]:
    """Forward FLOPs of one row's positions start ... stop - 1, one multiply-add at a time."""
    actual = {"products": 0, "attention": 0, "lora": 0}
    for position in range(start, stop):
        for _ in range(shape.layers):
            actual["products"] += sum(2 * prod(weight) for weight in layer(shape))
            for _ in range(position + 1):
                actual["attention"] += 2 * 2 * shape.width
            actual["lora"] += 2 * (2 * shape.width * 16 + 2 * 16 * shape.width) * lora
    actual["products"] += logits * 2 * shape.width * shape.vocabulary
    return actual


def test_flops_are_those_counted_token_by_token():
    expected = dict.fromkeys(flop_floor.PHASES, 0)
    lengths, response = [2, 5, 3], TINY.response
    for length in lengths:
        whole = length + response
        expected["prefill"] += sum(by_hand(TINY, 0, length, 1).values())
        expected["decode"] += sum(by_hand(TINY, length, whole - 1, response - 1).values())
        expected["reference"] += sum(by_hand(TINY, 0, whole, response).values())
        expected["reward"] += sum(by_hand(TINY, 0, whole, 0).values())
        one = by_hand(TINY, 0, whole, response, lora=True)
        expected["optimise"] += TINY.epochs * (2 * one["products"] + 3 * one["attention"] + 3 * one["lora"])
    assert flop_floor.flops(TINY, lengths) == expected


def test_matrix_products_are_those_that_torch_counts():
    model = workload.language_model(TINY)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(7)[None], logits_to_keep=3)
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    shape = replace(TINY, response=3)
    assert counted == flop_floor.flops(shape, [4])["reference"] - flop_floor.attention_flops(shape, 0, 7)


def test_the_published_workload_needs_what_was_published():
    """PEERS.md counts whole responses in every pass and prompts of the mean length."""
    actual = {name: round(count / 1e9) for name, count in flop_floor.flops(Shape(), [72] * 32).items()}
    assert actual == {"prefill": 22, "decode": 25, "reference": 47, "reward": 43, "optimise": 397}


def test_decoding_reads_weights_and_keys_and_values():
    read, lengths = 0, [2, 5]
    for step in range(1, TINY.response):
        read += TINY.layers * sum(prod(weight) for weight in layer(TINY)) + TINY.width * TINY.vocabulary
        for length in lengths:
            read += TINY.layers * 2 * TINY.width * (length + step)
    assert flop_floor.decode_bytes(TINY, lengths, 4) == 4 * read
    assert flop_floor.decode_bytes(TINY, lengths, 2) == 2 * read


@pytest.mark.parametrize("memory, bound", [(1e3, "bytes"), (1e15, "flops")])
def test_decoding_takes_the_longer_of_the_two(memory, bound):
    actual = flop_floor.floor_seconds(TINY, [2, 5], replace(RATES, bytes=memory))
    needs = {"bytes": flop_floor.decode_bytes(TINY, [2, 5], 4) / memory,
             "flops": flop_floor.flops(TINY, [2, 5])["decode"] / 1e9}
    assert actual["decode"] == needs[bound]
    assert actual["reward"] == flop_floor.flops(TINY, [2, 5])["reward"] / 1e9


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_rates_are_work_by_time(monkeypatch, capsys, precision):
    """Of products of 64 x 64 that take half a second each, and of a sum and a copy that do."""
    monkeypatch.setattr(flop_floor, "SIDES", dict.fromkeys(flop_floor.SIDES, (32, 64)))
    monkeypatch.setattr(flop_floor, "best_seconds", lambda work: (work(), 0.5)[1])
    monkeypatch.setattr(sys, "argv", ["flop_floor", "--precision", precision])
    flop_floor.main()
    rates = Rates(**json.loads(capsys.readouterr().out))
    assert rates.flops == 2 * 64**3 / 0.5 and rates.route.endswith(", 64") and rates.precision == precision
    assert rates.bytes == 2 * 4 * (1 << 26) / 0.5


def test_the_fastest_call_after_a_warm_up_counts(monkeypatch):
    now, seconds = [0.0], iter([0.01, 0.5, 0.1, 0.5, 0.5])

    def work():
        now[0] += next(seconds)

    monkeypatch.setattr(flop_floor, "time", SimpleNamespace(process_time=lambda: now[0], perf_counter=lambda: now[0]))
    assert flop_floor.best_seconds(work) == pytest.approx(0.1) and next(seconds, None) is None


def test_half_the_bytes_in_bf16():
    assert [replace(RATES, precision=name).itemsize for name in ("fp32", "bf16", "mixed")] == [4, 2, 2]


def test_routes_are_products():
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    for precision in ("fp32", "bf16"):
        for route in flop_floor.matmul_routes(precision).values():
            assert torch.allclose(route(x, w), x.double().matmul(w.double().T).float(), atol=1e-5)


def test_floor_is_of_the_steps_after_the_warm_up():
    lengths = [len(prompt) for prompt in workload.prompts(TINY, 2)[1]]
    actual = processes.median_floor(TINY, RATES, steps=1)
    assert actual["seconds"] == pytest.approx(sum(flop_floor.floor_seconds(TINY, lengths, RATES).values()))
    assert actual["gflop"]["reward"] == flop_floor.flops(TINY, lengths)["reward"] / 1e9


def test_prompts_keep_to_the_shape():
    steps = workload.prompts(TINY, 20)
    assert steps == workload.prompts(TINY, 20) and steps[0] != steps[1]
    assert {len(step) for step in steps} == {TINY.batch}
    rows = [prompt for step in steps for prompt in step]
    assert {len(row) for row in rows} == {2, 3, 4, 5}
    assert {token for row in rows for token in row} == set(range(3, TINY.vocabulary))


def test_a_shape_survives_the_way_to_a_worker():
    assert Shape.from_json(TINY.to_json()) == TINY


@pytest.mark.parametrize("wrong", [{"minibatch": 3}, {"width": 100}, {"prompts": (9, 4)}, {"prompts": (0, 4)}])
def test_shapes_that_cannot_run_are_refused(wrong):
    with pytest.raises(ValueError, match="minibatch is to divide the batch"):
        replace(TINY, **wrong)


def test_llama_sizes():
    assert [Shape(width=width).intermediate for width in (256, 2048, 4096)] == [688, 5632, 11008]
    assert (Shape().heads, run.GPU_SHAPES["7B"].heads) == (8, 32)
    billions = [flop_floor.body_weights(shape) / 1e9 for shape in run.GPU_SHAPES.values()]
    assert billions == pytest.approx([1.13, 6.48], abs=0.01)


def test_corners_reach_every_end_of_the_ranges():
    shapes = scaling.CORNERS.values()
    for name, ends in {"width": (128, 512), "layers": (2, 12), "vocabulary": (2048, 32768), "response": (16, 256),
                       "batch": (8, 128)}.items():
        assert {min(getattr(s, name) for s in shapes), max(getattr(s, name) for s in shapes)} == set(ends)
    assert (min(s.prompts[0] for s in shapes), max(s.prompts[1] for s in shapes)) == (16, 512)


def test_decoded_ids_come_back():
    tokenizer = workload.word_tokenizer(TINY)
    for row in workload.prompts(TINY, 1)[0]:
        assert tokenizer(tokenizer.decode(row))["input_ids"] == row


def test_a_step_is_its_phases_and_the_rest():
    clock = workload.Clock()
    with clock.phase("generate"):
        sum(range(100_000))
    double = clock.wrap(lambda x: 2 * x, lambda given: "even" if given[0] % 2 == 0 else None)
    assert [double(1), double(2)] == [2, 4]
    clock.end_step()
    clock.end_step()
    first, second = clock.steps
    assert set(first["phases"]) == {"generate", "even", "other"} and set(second["phases"]) == {"other"}
    for kind in ("wall", "cpu"):
        assert sum(phase[kind] for phase in first["phases"].values()) == pytest.approx(first[kind])


def test_the_most_that_this_process_held():
    before = workload.peak_mb()
    block = b"x" * 300_000_000
    peak_mb = workload.peak_mb()
    assert len(block) / 1e6 < peak_mb < before + 310
    del block
    assert workload.peak_mb() == pytest.approx(peak_mb, rel=0.01)


def test_exponents():
    sizes = [8, 16, 64, 100]
    assert scaling.exponent(sizes, [3 * size ** 1.7 for size in sizes]) == pytest.approx(1.7)
    noisy = [2.0, 3.5, 12.0, 20.0]
    assert scaling.exponent(sizes, noisy) == pytest.approx(np.polyfit(np.log(sizes), np.log(noisy), 1)[0])


def run_of(cpu: float, peak_mb: float = 100.0) -> dict:
    phases = {"generate": {"cpu": cpu / 4, "wall": cpu}, "other": {"cpu": cpu * 3 / 4, "wall": cpu}}
    step = {"cpu": cpu, "wall": 2 * cpu, "foreign_cores": 0.5, "phases": phases}
    return {"steps": [step], "warm_up": step, "peak_mb": peak_mb, "versions": {"torch": "2"},
            "prefill": {"cpu": 0.1, "wall": 0.1}}


def test_growth_measures_a_shape_once(monkeypatch):
    asked = []

    def measured(contenders, shape, setting):
        asked.append(shape)
        return {OURS: [run_of(0.5 * shape.batch * shape.response ** 2)]}, {}

    monkeypatch.setattr(scaling, "run_in_turns", measured)
    actual = {one["axis"]: one for one in scaling.measure_growth(Shape(), "fp32", RunSettings())}
    assert len(asked) == len(set(asked)) == sum(map(len, scaling.AXES.values())) - 3
    assert [actual[axis]["exponent"] for axis in scaling.AXES] == pytest.approx([1, 2, 0, 0])
    assert actual["batch"]["exponent_of_needed_flops"] == pytest.approx(1, abs=0.02)
    assert 0 < actual["vocabulary"]["exponent_of_needed_flops"] < 1 < actual["width"]["exponent_of_needed_flops"] < 2
    assert len(scaling.growth_rows(list(actual.values()))) == 4


def test_in_turns_and_what_is_missing(monkeypatch, capsys):
    order = []

    def once(contender, shape, setting):
        order.append(contender.name)
        if contender.name == "b":
            raise processes.ContenderFailedError("failed with 1: no such thing")
        return run_of(1.0)

    monkeypatch.setattr(processes, "run_once", once)
    three = [Contender(name, Path(sys.executable), "none") for name in ("a", "b", OURS)]
    runs, missing = processes.run_in_turns(three, TINY, RunSettings(rounds=2))
    assert order == ["a", "b", OURS, "a", OURS]
    assert {name: len(actual) for name, actual in runs.items()} == {"a": 2, OURS: 2}
    assert missing == {"b": "failed with 1: no such thing"} and "no such thing" in capsys.readouterr().err


@pytest.mark.parametrize("python, reason", [("/no/bin/python", "not installed: there is no /no/bin/python"),
                                            (sys.executable, "failed with 1: .*No module named benchmarks.nothing")])
def test_a_peer_that_does_not_run_says_why(python, reason):
    with pytest.raises(processes.ContenderFailedError, match=reason):
        processes.run_once(Contender("a", Path(python), "benchmarks.nothing"), TINY, RunSettings())


def test_ours_may_not_fail():
    with pytest.raises(SystemExit, match="not installed"):
        processes.run_in_turns([Contender(OURS, Path("/no/python"), "none")], TINY, RunSettings())


def fake(monkeypatch, missing: tuple[str, ...]) -> None:
    """Every contender takes its place's number of CPU seconds; no process is started."""
    def in_turns(contenders, shape, setting):
        every = {one.name: [run_of(float(1 + place), 100.0 * (1 + place))] for place, one in enumerate(contenders)}
        return ({name: runs for name, runs in every.items() if name not in missing},
                dict.fromkeys(missing, "not installed"))

    for module in (run, scaling):
        monkeypatch.setattr(module, "run_in_turns", in_turns)
    monkeypatch.setattr(run, "measure_machine", lambda precision, setting: replace(RATES, precision=precision))


def written(monkeypatch, tmp_path, *arguments: str) -> dict:
    file = tmp_path / "ppo.json"
    monkeypatch.setattr(sys, "argv", ["ppo", "--json", str(file), "--peers", str(tmp_path), *arguments])
    run.main()
    return json.loads(file.read_text())


def test_figures_in_json(monkeypatch, tmp_path):
    fake(monkeypatch, ("torchtune",))
    actual = written(monkeypatch, tmp_path)
    assert actual["ratio_to_floor"] == pytest.approx(6 / actual["floor"]["seconds"])
    assert [actual[key] for key in run.RATIOS] == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    assert actual["memory_ratio_to_legacy"] == pytest.approx(6)
    assert actual["missing"] == {"torchtune": "not installed"}
    assert actual["setting"]["basis"] == "cpu" and actual["shape"]["prompts"] == [48, 96]
    assert actual["contenders"][OURS]["tokens_a_cpu_second"] == pytest.approx(32 * 64 / 6)
    assert actual["contenders"][OURS]["versions"] and actual["machine"]["cpu"] and actual["runs"][OURS][0]["steps"]
    assert {goal["name"] for goal in actual["goals"]} == {*run.RATIOS, "ratio_to_floor", "memory_ratio_to_legacy"}


def test_wall_seconds_count_with_several_threads(monkeypatch, tmp_path):
    fake(monkeypatch, ())
    actual = written(monkeypatch, tmp_path, "--threads", "2")
    assert actual["setting"]["basis"] == "wall"
    assert actual["ratio_to_floor"] == pytest.approx(2 * 6 / actual["floor"]["seconds"])


def test_no_ratio_to_a_missing_peer(monkeypatch, tmp_path, capsys):
    fake(monkeypatch, (LEGACY,))
    actual = written(monkeypatch, tmp_path, "--only", LEGACY)
    assert [actual[key] for key in (*run.RATIOS, "memory_ratio_to_legacy")] == [None] * 4
    assert f"{LEGACY}: not installed" in capsys.readouterr().out
    assert {goal["name"] for goal in actual["goals"]} == {"ratio_to_floor"}


def test_sweep_in_json(monkeypatch, tmp_path, capsys):
    fake(monkeypatch, ())
    actual = written(monkeypatch, tmp_path, "--sweep")
    assert [one["name"] for one in actual["shapes"]] == list(scaling.CORNERS)
    assert {one["ratio_to_legacy_trl"] for one in actual["shapes"]} == {0.5}
    bounds = {goal["at_most"] for goal in actual["goals"] if goal["name"].endswith("ratio_to_floor")}
    assert bounds == {1.6 * 1.15}
    fake(monkeypatch, (LEGACY,))
    assert {one["ratio_to_legacy_trl"] for one in written(monkeypatch, tmp_path, "--sweep")["shapes"]} == {None}
    assert "missing" in capsys.readouterr().out


def test_without_a_gpu_there_are_no_figures(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["ppo", "--gpu", "--json", str(tmp_path / "gpu.json")])
    run.main()
    assert capsys.readouterr().out == "benchmarks.ppo --gpu needs a CUDA device: nothing was measured.\n"
    assert not (tmp_path / "gpu.json").exists()


def test_the_comparison_of_phases_runs_on_a_cpu(monkeypatch, tmp_path, capsys):
    """All that --gpu does, in bf16 at a tiny shape; ours is the real worker, in this process."""
    def once(contender, shape, setting):
        if contender.name != OURS:
            raise processes.ContenderFailedError("not installed")
        out = tmp_path / "run.json"
        monkeypatch.setattr(sys, "argv", ["ours", "--shape", shape.to_json(), "--steps", str(setting.steps), "--out",
                                          str(out), *contender.arguments])
        ours.main()
        return json.loads(out.read_text())

    monkeypatch.setattr(processes, "run_once", once)
    monkeypatch.setattr(run, "measure_machine", lambda precision, setting: replace(RATES, precision=precision))
    report = run.compare_phases({"tiny": TINY}, tmp_path, RunSettings(steps=1, rounds=1))
    actual = report["tiny"]
    tokens = {phase: count for _, phase, _, count, _ in actual["phases"]}
    assert tokens == {"generate": 12, "reward": 26, "old and reference": 26, "optimise": 52}
    assert all(rate == pytest.approx(count / seconds) for *_, seconds, count, rate in actual["phases"])
    assert actual["decode_ratio_to_floor"] == pytest.approx(
        actual["decode_seconds"] / actual["floor"]["phases"]["decode"])
    assert actual["ratio_to_legacy_trl"] is None and actual["missing"] == {LEGACY: "not installed"}
    goals = [goal["name"] for goal in actual["goals"]]
    assert goals == ["decode / floor"] and "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("name, group", [
    ("aten::mm", "matrix products"), ("aten::addmm", "matrix products"), ("mkldnn::_linear_pointwise",
                                                                          "matrix products"),
    ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"), ("aten::bmm", "attention"),
    ("aten::copy_", "copies"), ("aten::cat", "copies"), ("aten::silu", "elementwise"), ("aten::mul", "elementwise"),
    ("aten::_log_softmax", "elementwise"), ("Optimizer.step#Adam.step", profile.PYTHON)])
def test_operators_in_groups(name, group):
    assert profile.operator_group(name) == group


def test_shares_of_a_profile_sum_to_one():
    actual = profile.profile_by_group(lambda: torch.randn(64, 64) @ torch.randn(64, 64))
    assert actual["groups"]["matrix products"] > 0
    assert sum(row[2] for row in profile.operator_rows(actual) if not row[0].startswith(" ")) == pytest.approx(1)


def test_phases_beside_their_floors():
    floor = {"prefill": 1.0, "decode": 2.0, "reference": 3.0, "reward": 4.0, "optimise": 5.0}
    rows = profile.phase_rows([run_of(8.0)["steps"][0]], floor, {"cpu": 0.5, "wall": 1.0})
    assert rows[:3] == [["generate", 2.0, 8.0, 3.0, 2 / 3], ["  prefill", 0.5, 1.0, 1.0, 0.5],
                        ["  decode", 1.5, 7.0, 2.0, 0.75]]
    assert rows[-1] == ["other", 6.0, 8.0, 0, "-"]


def test_our_step_runs_and_learns():
    engine, clock = ours.load(TINY, "fp32"), workload.Clock()
    before = {name: p.detach().clone() for name, p in engine[0].trainable_parameters().items()}
    ours.take_step(*engine, workload.prompts(TINY, 1)[0], TINY, clock, torch.Generator().manual_seed(0))
    clock.end_step()
    assert set(clock.steps[0]["phases"]) == {*profile.PARTS}
    assert any(not torch.equal(p, before[name]) for name, p in engine[0].trainable_parameters().items())


def test_the_shape_of_smollm2_is_its():
    shape = workload.SHAPES["smollm2"]
    with torch.device("meta"):
        model = workload.language_model(shape)
    counted = {name: p.numel() for name, p in model.named_parameters()}
    assert sum(counted.values()) == 134_515_008
    assert flop_floor.body_weights(shape) == sum(count for name, count in counted.items() if "proj" in name)
    assert (shape.head_width, shape.key_width, shape.heads) == (64, 192, 9)


def test_the_goals_of_smollm2_are_its_own():
    ratios = {"ratio_to_legacy_trl": 2.9, "memory_ratio_to_legacy": 0.79, "ratio_to_floor": 3.0}
    goals = run.check_goals(ratios, "bf16", named="smollm2")
    assert {goal.name: goal.met for goal in goals} == {"ratio_to_legacy_trl": False, "memory_ratio_to_legacy": True}
