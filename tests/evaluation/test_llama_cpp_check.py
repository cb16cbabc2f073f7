"""export_gguf --check: a file that llama.cpp reads or answers otherwise gets no name; the report has the rest."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from stages import export_gguf
from stages.evaluation import llama_cpp
from stages.modeling.gguf import export as export_module
from stages.modeling.tokenizer import load_tokenizer
from stages.reward_modeling.scoring_file import write_no_model
from stages.stackexchange.pairs.table import read_best_rows
from stages.stackexchange.prompt import prompt_ids
from tests.helpers import tiny_models

pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: make extras")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run with pairs, a reward model, no judge and a policy."""
    run = tmp_path_factory.mktemp("run")
    tiny_models.save_pairs(run / "pairs")
    policy = tiny_models.save_base(run / "ppo-merged")
    tiny_models.save_base(run / "reward-merged", seed=1)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(run / "reward-merged", num_labels=1).save_pretrained(
        run / "reward-merged")
    (run / "judge-merged").mkdir()
    write_no_model(run / "judge-merged", "too few pairs")
    assert (policy / "model.safetensors").is_file()
    return run


def export(run: Path, out: Path, capsys, type_name: str = "f32") -> tuple[int, str, str]:
    words = [str(run / "ppo-merged"), "--type", type_name, "--out", str(out / "a.gguf"), "--check", str(run)]
    code = export_gguf.main(words)
    return code, *capsys.readouterr()


def read_report(out: Path) -> dict:
    return json.loads((out / "a.json").read_text())


def score_greedy_answers(run: Path) -> float:
    """Compute the mean reward of the policy's greedy answers by Transformers alone."""
    tokenizer = load_tokenizer(run / "ppo-merged")
    policy = AutoModelForCausalLM.from_pretrained(run / "ppo-merged")
    reward = AutoModelForSequenceClassification.from_pretrained(run / "reward-merged")
    scores = []
    for row in read_best_rows(run / "pairs", "evaluation"):
        ids = torch.tensor([prompt_ids(tokenizer, row["question"])])
        answer = policy.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=64)
        scores.append(reward(input_ids=answer).logits.item())
    return sum(scores) / len(scores)


def test_the_report_says_how_llama_cpp_agrees_and_what_its_answers_are_worth(run, tmp_path, capsys):
    code, lines, _ = export(run, tmp_path, capsys)
    report = read_report(tmp_path)
    assert code == 0 and report["type"] == "F32" and report["tensors"]["F32"]["largest_error"] == 0
    numbers = report["llama_cpp"]
    assert (numbers["other_tokens"], numbers["answers"], numbers["other_answers"]) == (0, 40, 0)
    assert numbers["posts"] > 300 and 0 < numbers["mean_nats"] <= numbers["most_nats"] < 0.02
    assert numbers["judge"] == "reward-merged"
    assert numbers["reward_of_folder"] == pytest.approx(score_greedy_answers(run), abs=1e-4)
    assert numbers["reward"] == pytest.approx(numbers["reward_of_folder"], abs=0.05)
    assert "greedy answers that differ 0 of 40 (0 %)" in lines and "mean reward (reward-merged) " in lines


def test_a_coarse_type_is_published_with_the_answers_that_differ(run, tmp_path, capsys):
    code, lines, _ = export(run, tmp_path, capsys, "q4_1")
    numbers = read_report(tmp_path)["llama_cpp"]
    assert code == 0 and numbers["other_tokens"] == 0 and 0 < numbers["other_answers"] <= 40
    assert f"greedy answers that differ {numbers['other_answers']} of 40" in lines
    assert numbers["reward"] != numbers["reward_of_folder"]


def read_rows(page: Path) -> list[list[str]]:
    rows = re.findall("<tr>(.*?)</tr>", page.read_text(), re.DOTALL)
    return [re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def test_the_page_has_a_row_for_each_file_of_the_folder(run, tmp_path, capsys):
    export(run, tmp_path, capsys, "q4_1")
    numbers = read_report(tmp_path)["llama_cpp"]
    assert export_gguf.main([str(run / "ppo-merged"), "--out", str(tmp_path / "b.gguf")]) == 0
    head, first, second = read_rows(tmp_path / "gguf.html")
    first, second = dict(zip(head, first, strict=True)), dict(zip(head, second, strict=True))
    differing = numbers["other_answers"]
    assert (first["file"], first["type"], second["file"], second["type"]) == ("a.gguf", "Q4_1", "b.gguf", "F16")
    assert first["greedy answers that differ"] == f"{differing} of 40 ({100 * differing / 40:.0f} %)"
    assert first["mean reward (reward-merged)"] == f"{numbers['reward']:.3f}"
    assert first["the folder&#x27;s"] == f"{numbers['reward_of_folder']:.3f}"
    assert second["greedy answers that differ"] == second["mean reward (reward-merged)"] == "–"
    (tmp_path / "a.gguf").write_bytes(b"another file than its report is on")
    assert export_gguf.main([str(run / "ppo-merged"), "--out", str(tmp_path / "b.gguf")]) == 0
    assert [row[0] for row in read_rows(tmp_path / "gguf.html")] == ["file", "b.gguf"]


@pytest.mark.parametrize("broken", ["rotary pairs", "merges"])
def test_a_file_that_llama_cpp_reads_otherwise_gets_no_name(broken, run, tmp_path, capsys, monkeypatch):
    read_vocabulary, list_tensors = export_module.read_vocabulary, export_module.list_tensors
    if broken == "merges":
        monkeypatch.setattr(export_module, "read_vocabulary", lambda *args: (
            lambda vocabulary: vocabulary._replace(merges=vocabulary.merges[9:]))(read_vocabulary(*args)))
    else:
        monkeypatch.setattr(export_module, "list_tensors", lambda *args: [
            tensor._replace(heads=None) for tensor in list_tensors(*args)])
    code, lines, errors = export(run, tmp_path, capsys)
    said = [line for line in errors.splitlines() if line.startswith("export_gguf: error: ")]
    assert code == 1 and not lines and not list(tmp_path.iterdir())
    assert len(said) == 1 and "nothing is published" in said[0]
    assert ("other tokens for 0 of" in said[0]) == (broken == "rotary pairs")


def test_a_run_without_a_reward_model_has_no_mean_reward(run, tmp_path, capsys):
    other = tmp_path / "other"
    for name in ("pairs", "ppo-merged"):
        shutil.copytree(run / name, other / name)
    code, lines, _ = export(other, tmp_path, capsys)
    assert code == 0 and read_report(tmp_path)["llama_cpp"]["judge"] is None and "mean reward none: " in lines


def test_what_the_check_lacks_is_one_line(run, tmp_path, capsys, monkeypatch):
    words = [str(run / "ppo-merged"), "--out", str(tmp_path / "a.gguf"), "--check"]
    assert export_gguf.main([*words, str(tmp_path / "none")]) == 1
    errors = capsys.readouterr().err
    assert "is it a pairs artifact?" in errors and errors.count("\n") == 1 and not list(tmp_path.iterdir())
    monkeypatch.setattr(llama_cpp.importlib.util, "find_spec", lambda _: None)
    assert export_gguf.main([*words, str(run)]) == 1
    errors = capsys.readouterr().err
    assert "(the package xllamacpp) is not installed: make extras" in errors and errors.count("\n") == 1
