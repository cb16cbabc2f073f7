"""Results of an earlier evaluation: an added policy costs its own work only, and no number depends on them."""

import os
from dataclasses import replace

import pytest
import torch

from stages import evaluate
from stages.artifacts.artifact import RunContext
from stages.evaluation import answer_sampler, policy_answers
from stages.evaluation.cached_results import CACHE, CachedResults, join_rows, split_rows
from tests.helpers.tiny_evaluation import CONFIG, make_model, make_tokenizer, save_inputs


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Inputs of an evaluation, with two policies."""
    root, tokenizer = tmp_path_factory.mktemp("inputs"), make_tokenizer()
    inputs = save_inputs(root, tokenizer)
    make_model(tokenizer, seed=7).save_pretrained(root / "dpo")
    tokenizer.save_pretrained(root / "dpo")
    return inputs | {"policy": {"ppo": root / "ppo", "dpo": root / "dpo"}}


def run(folders, out, run_folder=None, policies=("ppo",), config=CONFIG):
    """Evaluate these policies; return the bytes of all cached."""
    out.mkdir(parents=True)
    policy = {name: folders["policy"][name] for name in policies}
    context = RunContext(run_folder / "logs", out.name, "0") if run_folder else None
    evaluate.run(config, out, **folders | {"policy": policy}, context=context)
    return {file.name: file.read_bytes() for file in out.iterdir()}


@pytest.fixture(scope="module")
def stored(folders, tmp_path_factory):
    """The folder of a run in which the policy ppo has been evaluated, and the evaluation's cached."""
    folder = tmp_path_factory.mktemp("run")
    return folder, run(folders, folder / "evaluate", folder)


@pytest.fixture
def work(monkeypatch):
    """Record which folders models are loaded from, and what is sampled."""
    record = {"loaded": [], "sampled": []}

    def spy(module, name, kind, entry):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **more: record[kind].append(entry(args, more)) or real(
            *args, **more))

    spy(answer_sampler, "load_causal", "loaded", lambda args, more: args[0].name)
    spy(policy_answers, "load_classifier", "loaded", lambda args, more: args[0].name)
    spy(answer_sampler, "sample_answers", "sampled", lambda args, more: more["label"])
    return record


def test_an_added_policy_costs_its_own_work_and_changes_no_number(folders, stored, work, tmp_path):
    folder, _ = stored
    both = run(folders, tmp_path / "both", folder, ("ppo", "dpo"))
    assert work["loaded"].count("dpo") in (1, 2)  # for its samples, and for those at its best temperature
    assert set(work["loaded"]) == {"dpo", "sft", "reward"}  # SFT's log-probabilities of its answers; their rewards
    assert work["sampled"] and all(label.startswith("evaluate: dpo ") for label in work["sampled"])
    assert both == run(folders, tmp_path / "without", None, ("ppo", "dpo"))


def test_the_same_evaluation_loads_no_model_and_has_the_same_bytes(folders, stored, work, tmp_path, capfd):
    folder, expected = stored
    assert run(folders, tmp_path / "again", folder) == expected
    assert work == {"loaded": [], "sampled": []}
    assert f"results of models were taken from {folder / CACHE}" in capfd.readouterr().err


def test_stored_results_are_not_used_if_the_recipe_says_so(folders, stored, work, tmp_path):
    assert run(folders, tmp_path / "again", stored[0], config=replace(CONFIG, cache=False)) == stored[1]
    assert {"ppo", "sft", "base", "reward"} <= set(work["loaded"])


def test_a_result_is_named_by_all_that_it_depends_on(folders, stored, tmp_path, monkeypatch):
    """What is not among these is the same in all evaluations of a run, or in the environment."""
    names = {}
    real = CachedResults.compute

    def compute(cache, kind, model, function, **depends_on):
        names.setdefault(kind, set()).add((*sorted(depends_on),))
        assert {"code", "environment", "cpu_kernels"} == set(cache.depends_on)
        return real(cache, kind, model, function, **depends_on)

    monkeypatch.setattr(CachedResults, "compute", compute)
    run(folders, tmp_path / "again", stored[0])
    sampling = {"batch_prompts", "max_new_tokens", "precision", "prompts", "seed", "stop_ids", "temperature"}
    assert names == {
        "answers": {(*sorted(sampling),), (*sorted(sampling | {"share_prefixes"}),)},
        "log-probabilities": {("precision", "temperature", "texts")},
        "rewards": {("batch_texts", "precision", "texts")}}


@pytest.mark.parametrize("change", [
    {"model": "b"}, {"kind": "other"}, {"seed": 1}, {"code": "new"}, {"environment": {"threads": 2}}])
def test_whatever_a_result_depends_on_has_another_file(tmp_path, change):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)

    def compute(kind="answers", model="a", seed=0, code="old", environment=None):
        cache = CachedResults(tmp_path / CACHE, code=code, environment=environment or {"threads": 1})
        cache.compute(kind, tmp_path / model, lambda: {"x": torch.zeros(1)}, seed=seed)
        return cache.computed

    assert (compute(), compute(), compute(**change), compute(**change)) == (1, 0, 1, 0)


def test_changed_weights_at_the_same_path_are_another_model(tmp_path):
    (tmp_path / "model").mkdir()
    for number in range(2):
        (tmp_path / "model/weights").write_text(str(number))
        cache = CachedResults(tmp_path / CACHE)
        x = cache.compute("answers", tmp_path / "model", lambda number=number: {"x": torch.tensor([number])})["x"]
        assert x.tolist() == [number]


@pytest.mark.parametrize("rows", [[[1, 2], [], [3]], [[]], [], [torch.tensor([0.1, float("nan")]), torch.zeros(0)]])
def test_rows_come_back_bit_for_bit(rows):
    back = split_rows(join_rows(rows))
    assert len(back) == len(rows)
    for row, expected in zip(back, rows, strict=True):
        assert torch.equal(row.nan_to_num(7), torch.as_tensor(expected).to(row.dtype).nan_to_num(7))


def test_a_write_that_fails_leaves_no_result(tmp_path, monkeypatch, capfd):
    cached = CachedResults(tmp_path / CACHE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        cached.write("a", b"data")
    assert "not stored" in capfd.readouterr().err and not list((tmp_path / CACHE).iterdir())


def test_a_damaged_result_is_computed_again(tmp_path, capfd):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/weights").write_text("a")

    def compute():
        cached = CachedResults(tmp_path / CACHE)
        x = cached.compute("answers", tmp_path / "model", lambda: {"x": torch.ones(1)})["x"]
        return x.item(), cached.computed

    assert compute() == (1, 1)
    file, = (tmp_path / CACHE).iterdir()
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:7], b""):
        file.write_bytes(damaged)
        assert compute() == (1, 1) and "is damaged" in capfd.readouterr().err
        assert file.read_bytes() == whole and compute() == (1, 0)


def test_the_least_recently_used_files_are_deleted(tmp_path):
    """The draft of a process that was killed while it wrote is among them."""
    cached = CachedResults(tmp_path / CACHE)
    for name in "abc":
        cached.write(name, bytes(100))
    (tmp_path / CACHE / "d.1.tmp").write_bytes(bytes(100))
    for age, name in enumerate(("a", "d.1.tmp", "b", "c")):
        os.utime(tmp_path / CACHE / name, (1000 + age, 1000 + age))
    assert cached.read("a") == bytes(100)  # now it is the newest
    cached.delete_excess(max_bytes=2 * 132)
    assert sorted(file.name for file in (tmp_path / CACHE).iterdir()) == ["a", "c"]


def test_a_folder_that_cannot_be_written_costs_one_line(tmp_path, capfd):
    (tmp_path / CACHE).write_text("a file in the way")
    cached = CachedResults(tmp_path / CACHE)
    cached.write("a", b"data")
    cached.delete_excess()
    assert cached.read("a") is None and capfd.readouterr().err.count("\n") == 1
