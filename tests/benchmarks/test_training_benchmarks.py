"""The benchmarks of reward training and SFT: tiny runs of ours and TRL's that read the same; figures and ratios.

Contenders run in this process: the figures mean nothing here.
"""

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common.tables import ROOT
from benchmarks.ppo import processes
from benchmarks.ppo.flop_floor import Rates
from benchmarks.ppo.processes import OURS, RunSettings
from benchmarks.training import dpo, floor, ours, reward, sft
from benchmarks.training import processes as training_processes
from benchmarks.training.ours import train_reward as train_reward
from benchmarks.training.processes import TRL, TUNED
from benchmarks.training.reward import BY_PAIR
from benchmarks.training.workload import Meter, Work
from stages.modeling.load import load_causal
from stages.modeling.lora import add_lora
from stages.reward_modeling.dataset import Example
from tests.helpers.tiny_models import save_base, save_pairs


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    return save_pairs(folder / "pairs"), save_base(folder / "base")


@pytest.fixture(autouse=True)
def known_rates(monkeypatch):
    """Rates of the machine, which take ten seconds to measure (tests/benchmarks/test_ppo_benchmark.py does)."""
    monkeypatch.setattr(floor, "measure_machine", lambda precision, setting: Rates(1e9, 1e9, "linear", precision))


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Runs of contenders in this process."""
    def once(contender, work, setting):
        out = tmp_path / "run.json"
        for name in training_processes.SWITCHES:
            monkeypatch.delenv(name, raising=False)
        if contender.environment:
            monkeypatch.setenv("PEER_ATTN", contender.environment["PEER_ATTN"])
        monkeypatch.setattr(sys, "argv", [contender.module, "--shape", work.to_json(), "--out", str(out),
                                          *contender.arguments])
        importlib.import_module(contender.module).main()
        return json.loads(out.read_text())

    for module in (processes, reward):
        monkeypatch.setattr(module, "run_once", once)


def written(monkeypatch, tmp_path, program, *arguments: object) -> dict:
    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", [program.__name__, "--json", str(file), "--rounds", "1", *map(str, arguments)])
    program.main()
    return json.loads(file.read_text())


def test_reward_training_beside_trl(here, monkeypatch, tmp_path, made, capsys):
    pairs, base = made
    actual = written(monkeypatch, tmp_path, reward, "--pairs", pairs, "--base", base, "--steps", 5, "--batch", 3,
                    "--questions", 2, "--length", 128, "--held-out", 0.5, "--accuracy", "--learning-rate", 1e-2)
    sums, runs = actual["contenders"], actual["runs"]
    assert list(sums) == [TRL, OURS, BY_PAIR, TUNED] and actual["missing"] == {}
    assert {one["items"] for one in sums.values()} == {15} and len({one["tokens"] for one in sums.values()}) == 1
    assert len({of[0]["digest"] for of in runs.values()}) == 1
    assert [sums[name]["steps"] for name in (TRL, BY_PAIR, TUNED)] == [5, 5, 5] and 2 < sums[OURS]["steps"] <= 8
    assert [sums[name]["computed_tokens"] for name in (TRL, TUNED)] == [sums[TRL]["computed_tokens"]] * 2
    assert sums[OURS]["computed_tokens"] < sums[BY_PAIR]["computed_tokens"] < sums[TRL]["tokens"]
    assert sums[TRL]["tokens"] < sums[TRL]["computed_tokens"]
    for key, one, other in (("ratio_to_trl", OURS, TRL), ("ratio_to_tuned_trl", OURS, TUNED),
                            ("pair_by_pair_ratio_to_trl", BY_PAIR, TRL)):
        assert actual[key] == pytest.approx(sums[other]["cpu"] / sums[one]["cpu"])
    assert sums[TRL]["a_cpu_second"] == pytest.approx(15 / sum(step["cpu"] for step in runs[TRL][0]["steps"]))
    judged = actual["accuracy"]
    assert list(judged["found"]) == ["untrained", TRL, OURS, BY_PAIR]
    means = {name: one["mean"] for name, one in judged["found"].items()}
    assert min(means[TRL], means[OURS], means[BY_PAIR]) > means["untrained"] + 0.2
    assert judged["passes"][TRL]["items"] == judged["passes"][OURS]["items"] > 15
    gained = judged["differences"][f"{OURS} - {TRL}"]
    assert gained["mean"] == pytest.approx(judged["found"][OURS]["mean"] - judged["found"][TRL]["mean"])
    assert gained["groups"] == 20 and gained["low"] <= gained["mean"] <= gained["high"]
    assert [goal["at_least"] for goal in actual["goals"]] == [2.5, None, 0.0, None, 0.0]
    assert "pairs a second, ours / TRL" in capsys.readouterr().out


def test_sft_beside_trl_on_a_model_made_for_it(here, monkeypatch, tmp_path, made):
    actual = written(monkeypatch, tmp_path, sft, "--pairs", made[0], "--steps", 2, "--batch", 2, "--length", 64)
    sums = actual["contenders"]
    assert set(sums) == {f"{TRL}, wrapped", f"{OURS}, wrapped", f"{TRL}, bfd", f"{OURS}, bfd", f"{TUNED}, wrapped"}
    wrapped = [sums[name] for name in sums if name.endswith("wrapped")]
    assert [(one["items"], one["tokens"], one["steps"]) for one in wrapped] == [(2 * 2 * 63, 2 * 2 * 64, 2)] * 3
    assert len({actual["runs"][name][0]["digest"] for name in sums if name.endswith("wrapped")}) == 1
    assert sums[f"{OURS}, bfd"]["tokens"] == 256 >= sums[f"{TRL}, bfd"]["tokens"]
    assert sums[f"{OURS}, bfd"]["items"] < 256 - 4
    for packing in sft.PACKINGS:
        ours, trl = sums[f"{OURS}, {packing}"], sums[f"{TRL}, {packing}"]
        assert actual[f"{packing}_ratio_to_trl"] == pytest.approx(ours["a_cpu_second"] / trl["a_cpu_second"])
        assert actual[f"{packing}_memory_ratio_to_trl"] == pytest.approx(ours["peak_mb"] / trl["peak_mb"])
    assert [(goal["value"], goal["at_least"]) for goal in actual["goals"]] == [(actual["wrapped_ratio_to_trl"], 1.2)]


def test_dpo_beside_trl(here, monkeypatch, tmp_path, made):
    actual = written(monkeypatch, tmp_path, dpo, "--pairs", made[0], "--base", made[1], "--steps", 2, "--batch", 3)
    sums = actual["contenders"]
    assert list(sums) == [TRL, OURS, TUNED] and actual["missing"] == {}
    assert [(one["items"], one["steps"]) for one in sums.values()] == [(6, 2)] * 3
    assert len({runs[0]["digest"] for runs in actual["runs"].values()}) == 1
    assert sums[OURS]["computed_tokens"] < sums[OURS]["tokens"] == sums[TRL]["tokens"] < sums[TRL]["computed_tokens"]
    assert actual["ratio_to_trl"] == pytest.approx(sums[TRL]["cpu"] / sums[OURS]["cpu"])


def test_no_more_tokens_than_the_split_has(monkeypatch, tmp_path, made):
    with pytest.raises(SystemExit, match=r"tokens, but 51,200,000 are needed: --steps [0-9]+ is the maximum"):
        written(monkeypatch, tmp_path, sft, "--pairs", made[0], "--base", made[1], "--steps", 100, "--batch", 1000)


def test_those_who_read_other_texts_are_found_out(monkeypatch, tmp_path, made):
    def in_turns(contenders, work, setting):
        step = {"cpu": 1.0, "wall": 1.0, "foreign_cores": 0.0}
        runs = {one.name: [{"items": 3, "tokens": 10, "computed_tokens": 12, "attended": 9, "digest": place // 3,
                            "steps": [step], "peak_mb": 1.0, "versions": {}}] for place, one in enumerate(contenders)}
        return runs, {}

    monkeypatch.setattr(training_processes, "run_in_turns", in_turns)
    with pytest.raises(SystemExit, match=f"{TUNED} did not read what others read"):
        written(monkeypatch, tmp_path, reward, "--pairs", made[0], "--base", made[1])
    actual = written(monkeypatch, tmp_path, reward, "--pairs", made[0], "--base", made[1], "--only", OURS, TUNED)
    assert actual["ratio_to_trl"] is None and actual["ratio_to_tuned_trl"] == 1 and actual["goals"] == []


def test_the_digest_is_of_texts_in_any_order():
    def read(*losses):
        meter = Meter()
        meter.record_loss(1, [[9]], 1)  # of the warm-up: not counted
        meter.timing = True
        for texts in losses:
            meter.record_loss(len(texts), texts, 7)
        return meter.read

    one, other = read([[1, 2], [3]], [[4]]), read([[4], [3]], [torch.tensor([1, 2], dtype=torch.int32)])
    assert one == other and (one["items"], one["tokens"], one["computed_tokens"]) == (3, 4, 14)
    assert one["attended"] == 3 + 1 + 1
    assert read([[1, 2], [3], [5]])["digest"] != one["digest"] != read([[1], [2, 3], [4]])["digest"]


def test_a_question_is_attended_to_once_for_all_its_answers():
    items = [Example(("site", 1), [5] * 3, [[6] * 2, [6] * 4], [(0, 1)], [1])]
    inside, seen = [3 * 4 // 2], [(3 + 1, 3 + 2), (3 + 1, 3 + 2, 3 + 3, 3 + 4)]
    assert ours._attended(items) == sum(inside) + sum(map(sum, seen))


def test_the_warm_up_learns_nothing(monkeypatch, tmp_path, made):
    work = Work(str(tmp_path), length=128, learning_rate=1.0)
    reward.prepare(work, made[1], made[0], set(), 20)
    learnt = {}
    for name, passes in (("warm-up", 1), ("whole", 2)):
        def time(self, train, few, whole, learning_rate, passes=passes):
            for data, rate in ((few, 0.0), (whole, learning_rate))[:passes]:
                train(data, rate)

        monkeypatch.setattr(Meter, "time", time)
        model = train_reward(work, Meter(), "pair")
        learnt[name] = [p for key, p in model.named_parameters() if "lora_B" in key]
    assert all(p.eq(0).all() for p in learnt["warm-up"]) and not any(p.eq(0).all() for p in learnt["whole"])


def test_trl_runs_without_our_switches():
    """torch_setup.prepare would set the matrix products' precision for the peer, too."""
    code = ("import sys, torch, benchmarks.training.trl\n"
            "assert not [name for name in sys.modules if name.startswith('stages')]\n"
            "assert torch.get_float32_matmul_precision() == 'highest'")
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=True,
                   env=os.environ | RunSettings().environment())


def test_the_work_is_that_which_is_counted(made):
    """Of forward and backward passes on one text, by torch's counter, without attention."""
    model = load_causal(made[1])
    model = add_lora(model, r=4, alpha=8, dropout=0.0, target_modules=("q_proj", "up_proj"), precision="fp32")
    ids = torch.arange(2, 9)[None]
    with FlopCounterMode(display=False) as counter:
        hidden = model.get_base_model().model(inputs_embeds=model.get_input_embeddings()(ids).requires_grad_())
        model.get_output_embeddings()(hidden.last_hidden_state[0, :5]).square().sum().backward()
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    config = model.config.to_dict()
    assert counted == floor.training_flops(config, 4, ("q_proj", "up_proj"), tokens=7, labels=5, attended=0)
    attention = floor.training_flops(config, 4, (), tokens=0, labels=0, attended=28)
    assert attention == 3 * config["num_hidden_layers"] * 4 * config["hidden_size"] * 28


def test_only_the_shape_of_smollm2_has_its_goals():
    figures = {"contenders": {OURS: {"share": 0.61, "peak_mb": 6001.0}}}
    assert floor.smollm2_goals(figures, "small", OURS) == [] == floor.smollm2_goals(figures, "smollm2", TRL)
    assert [goal.met for goal in floor.smollm2_goals(figures, "smollm2", OURS)] == [True, False]


def test_reward_training_of_a_random_model_in_bf16(here, monkeypatch, tmp_path, made):
    actual = written(monkeypatch, tmp_path, reward, "--pairs", made[0], "--steps", 1, "--batch", 2, "--length", 128,
                     "--precision", "bf16", "--targets", "q_proj", "o_proj", "--dropout", 0.05, "--only", OURS)
    one = actual["contenders"][OURS]
    assert one["share"] == pytest.approx(one["gflop"] * 1e9 / actual["rates"]["flops"] / one["cpu"])
    assert actual["work"]["targets"] == ["q_proj", "o_proj"] and actual["work"]["precision"] == "bf16"
