"""Own prompts and an own reward: formats, templates, all three algorithms without pairs, and every refusal."""

import json
import shutil
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from stages import grpo, merge, ppo, rloo
from stages.command_line.command import make
from stages.evaluation.heldout_prompts import OwnEvaluationPrompts
from stages.recipe.sections.models import Lora, Merge
from stages.recipe.sections.policy_gradient import Grpo, Rloo
from stages.recipe.sections.ppo import Ppo
from stages.recipe.sections.rewards import RewardSource
from stages.rl.inputs import Inputs
from stages.stackexchange.prompt import encode_prompt, parse_question, prompt_ids
from stages.stackexchange.prompt_file import hold_out_prompts, read_own_prompts
from tests.helpers import tiny_models

PROMPTS = [f"use the flag port file {number}" for number in range(20)]
COMMON = {
    "lora": Lora(r=2, dropout=0.0), "precision": "fp32", "log_to": ("jsonl",), "iterations": 2, "rollout_prompts": 4,
    "minibatch_prompts": 4, "microbatch_prompts": 2, "epochs": 1, "max_prompt_tokens": 100, "max_response_tokens": 4,
    "validation_prompts": 4, "evaluate_every_iterations": 1,
    "rewards": (RewardSource("data.demo.short_answers:score"),)}
CHATML = ("{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
          "{% if add_generation_prompt %}<s>assistant\n{% endif %}")
PROGRAMS = {"ppo": (ppo, Ppo), "rloo": (rloo, Rloo), "grpo": (grpo, Grpo)}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_models.save_base(tmp_path_factory.mktemp("own") / "base")


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return file


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_model_prompts_and_a_function_are_enough(name, base, prompts, tmp_path):
    program, section = PROGRAMS[name]
    out = tmp_path / name
    make(program.run, section(**COMMON), out, {"policy": base, "prompts": prompts})
    manifest = json.loads((out / "manifest.json").read_text())
    assert set(manifest["inputs"]) == {"policy", "prompts"} and manifest["metrics"]["prompts"] == 12
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert {row["question"] for row in samples} <= set(PROMPTS)
    merged = tmp_path / "merged"
    make(merge.run, Merge(dtype="fp32"), merged, {"base": base, "adapter": [str(out)], "prompts": prompts})
    card = (merged / "README.md").read_text()
    assert "prompts of its maker's own" in card and "stack-exchange" not in card


def test_template_none_gives_the_text_as_it_is_and_keeps_the_chat_template(base, prompts, tmp_path, monkeypatch):
    seen = set()
    monkeypatch.setattr("data.demo.short_answers.score", lambda questions, answers: seen.update(questions) or [
        0.0 for _ in answers])
    out = tmp_path / "ppo"
    make(ppo.run, Ppo(prompt_template="none", **COMMON), out, {"policy": base, "prompts": prompts})
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    questions = {row["question"] for row in rows}
    assert questions and questions <= seen & set(PROMPTS)  # the memory plan's made-up prompts are seen as well
    assert AutoTokenizer.from_pretrained(out).chat_template == AutoTokenizer.from_pretrained(base).chat_template


def test_template_chat_trains_in_the_tokenizers_own_template_which_the_merged_model_keeps(base, prompts, tmp_path):
    instruct = tmp_path / "instruct"
    tok = AutoTokenizer.from_pretrained(shutil.copytree(base, instruct))
    tok.chat_template = CHATML
    tok.save_pretrained(instruct)
    make(grpo.run, Grpo(prompt_template="chat", **COMMON), tmp_path / "grpo", {"policy": instruct, "prompts": prompts})
    rows = [json.loads(line) for line in (tmp_path / "grpo/samples.jsonl").read_text().splitlines()]
    assert rows and {row["question"] for row in rows} <= set(PROMPTS)
    merged = tmp_path / "merged"
    make(merge.run, Merge(dtype="fp32"), merged,
         {"base": instruct, "adapter": [str(tmp_path / "grpo")], "prompts": prompts})
    assert AutoTokenizer.from_pretrained(merged).chat_template == CHATML
    assert "tokenizer.apply_chat_template" in (merged / "README.md").read_text()


def test_a_prompt_is_decoded_to_its_text_by_either_template():
    tok = tiny_models.tokenizer()
    for text in (*PROMPTS, "Question: x\n\nAnswer: ", "a  b \n"):
        assert parse_question(tok, encode_prompt(tok, text, "none"), "none") == text
        assert parse_question(tok, encode_prompt(tok, text)) == text
    assert encode_prompt(tok, "x") == prompt_ids(tok, "x") != encode_prompt(tok, "x", "none")


def save_saved(folder, splits=("train",)):
    from datasets import Dataset, DatasetDict
    data = Dataset.from_dict({"text": ["a", "b"]})
    (DatasetDict(dict.fromkeys(splits, data)) if splits else data).save_to_disk(str(folder))


def test_formats(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "q", "prompt": "a"}\n\n{"prompt": "b"}\n{"prompt": "a"}\n')
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\n\n")
    pq.write_table(pa.table({"n": [1, 2], "text": ["a", "b"]}), tmp_path / "a.parquet")
    save_saved(tmp_path / "saved")
    save_saved(tmp_path / "plain", splits=())
    for name in ("a.jsonl", "a.txt", "a.parquet", "saved", "plain"):
        assert read_own_prompts(tmp_path / name, None) == ["a", "b"], name
    (tmp_path / "folder").mkdir()
    for name in ("a.jsonl", "a.parquet"):
        (tmp_path / name).rename(tmp_path / "folder" / name)
    assert read_own_prompts(tmp_path / "folder", None) == ["a", "b"]


@pytest.mark.parametrize(("name", "content", "column", "message"), [
    ("a.jsonl", "", None, "has no prompts"), ("a.jsonl", "{", None, "line 1: is no JSON"),
    ("a.jsonl", "[1]", None, "must be an object"), ("a.jsonl", '{"q": "x"}', None, "no column prompt or .* are: q "),
    ("a.jsonl", '{"q": "x"}', "title", "no column title; there are: q "),
    ("a.jsonl", '{"prompt": [{"role": "user"}]}', None, "must be text, not list"),
    ("a.txt", "x", "title", "plain text and has no column 'title'"), ("a.csv", "x", None, r"read from \.jsonl"),
    ("a.parquet", "x", None, "cannot be read as Parquet")])
def test_what_cannot_be_read_is_refused_with_its_place(name, content, column, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        read_own_prompts(tmp_path / name, column)
    assert str(tmp_path / name) in str(error.value) and "\n" not in str(error.value)


def test_held_out_prompts_are_never_trained_on(prompts):
    tok = tiny_models.tokenizer()
    for name, (_, section) in PROGRAMS.items():
        for seed in (0, 1):
            config = section(seed=seed, evaluation_prompts=3)
            training, validation, _ = ppo.load_training_prompts(config, tok, Inputs(prompts, prompts=prompts), name)
            texts = {parse_question(tok, ids) for ids in (*training, *validation)}
            drawn = OwnEvaluationPrompts(
                prompts, tok, column=None, template="question", held_out=3, training_seed=seed, prompts=9,
                selection_prompts=9, max_prompt_tokens=100, max_response_tokens=4, longest=200, seed=7)
            evaluated = {*drawn.questions, *drawn.selection_questions}
            assert len(evaluated) == 3 and not evaluated & texts and evaluated | texts == set(PROMPTS)


def test_which_prompts_are_held_out_depends_on_texts_and_seed_alone():
    split = hold_out_prompts(PROMPTS, 5, 0)
    assert [set(side) for side in hold_out_prompts(PROMPTS[::-1], 5, 0)] == [set(side) for side in split]
    assert split[1] == [text for text in PROMPTS if text in split[1]]  # in the order of the file
    assert len({tuple(hold_out_prompts(PROMPTS, 5, seed)[1]) for seed in range(5)}) == 5
    training, evaluation = hold_out_prompts([*PROMPTS, *(f" {text}\n" for text in PROMPTS)], 5, 0)
    assert not {text.strip() for text in training} & {text.strip() for text in evaluation} and len(evaluation) == 10
    assert hold_out_prompts(["\ud800", *PROMPTS], 5, 0)  # half of a character, as JSON can have


@pytest.mark.parametrize(("count", "most", "held_out"), [
    (20, 320, 5), (20, 3, 3), (20, 0, 0), (8, 320, 2), (5, 320, 1), (4, 320, 0), (1, 320, 0)])
def test_a_small_file_is_trained_on_first_of_all(count, most, held_out):
    training, evaluation = hold_out_prompts(PROMPTS[:count], most, 0)
    assert (len(training), len(evaluation)) == (count - held_out, held_out)


def test_too_long_prompts_are_counted(prompts):
    tok = tiny_models.tokenizer()
    lengths = sorted(len(prompt_ids(tok, text)) for text in PROMPTS)
    config = Ppo(max_prompt_tokens=lengths[9])
    training, validation, too_long = ppo.load_training_prompts(config, tok, Inputs(prompts, prompts=prompts), "ppo")
    trained_on, _ = hold_out_prompts(PROMPTS, config.evaluation_prompts, config.seed)
    fitting = [text for text in trained_on if len(prompt_ids(tok, text)) <= lengths[9]]
    assert len(trained_on) == 15 and len(training) + len(validation) == len(fitting) == 15 - too_long
    with pytest.raises(ValueError, match=r"has 0 prompts of at most 3 tokens \(15 are longer\): rloo needs at least 4"):
        ppo.load_training_prompts(Ppo(max_prompt_tokens=3), tok, Inputs(prompts, prompts=prompts), "rloo")


def test_what_is_missing_or_given_twice_is_refused_in_a_line(base, prompts, tmp_path):
    own, model = Ppo(**COMMON), tmp_path / "reward"
    lexical = replace(own, rewards=(RewardSource("lexical"),))
    cases = [
        (own, "head", Inputs(base), "by one of --pairs FOLDER"),
        (own, "head", Inputs(base, pairs=tmp_path, prompts=prompts), "not both"),
        (Ppo(), "head", Inputs(base, prompts=prompts), "names 'model', and no reward model is given"),
        (lexical, "head", Inputs(base, prompts=prompts), "'lexical', which learns from pairs"),
        (own, "model", Inputs(base, prompts=prompts), "value_model to 'head'"),
        (own, "adapter", Inputs(base, prompts=prompts), "value_model to 'head'"),
        (replace(own, prompt_template="none"), "head", Inputs(base, model, tmp_path), "no effect with --pairs"),
        (replace(own, prompt_column="x"), "head", Inputs(base, model, tmp_path), "no effect with --pairs"),
        (replace(own, evaluation_prompts=9), "head", Inputs(base, model, tmp_path), "no effect with --pairs"),
        (Ppo(prompt_template="chat"), "head", Inputs(base, model, prompts=prompts), "trained on prompts of"),
        (own, "head", Inputs(tmp_path, prompts=prompts), "cannot be loaded as a causal language model")]
    for config, value_model, sources, message in cases:
        with pytest.raises(ValueError, match=message) as error:
            ppo.check_given(config, value_model, sources)
        assert "\n" not in str(error.value)
    ppo.check_given(own, "head", Inputs(base, prompts=prompts))
    ppo.check_given(Ppo(), "model", Inputs(base, model, tmp_path))


def test_an_encoder_is_refused(prompts, tmp_path):
    BertForMaskedLM(BertConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                               intermediate_size=8)).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="BertForMaskedLM, which is no causal language model"):
        ppo.check_given(Ppo(**COMMON), "head", Inputs(tmp_path / "bert", prompts=prompts))


def test_an_artifact_is_no_file_of_prompts(base, tmp_path):
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs/manifest.json").write_text('{"stage": "pairs"}')
    with pytest.raises(ValueError, match="was made by pairs: give a file of your own prompts"):
        make(ppo.run, Ppo(**COMMON), tmp_path / "out", {"policy": base, "prompts": tmp_path / "pairs"})
