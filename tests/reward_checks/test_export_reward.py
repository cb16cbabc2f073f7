"""Exported reward models: TRL scores as we do; what OpenRLHF and verl read is there; what cannot be exported."""

import json
import shutil

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from stages import export_reward
from stages.modeling.tokenizer import load_tokenizer
from stages.recipe.sections.models import Merge
from stages.reward_checks.export import encode_texts
from stages.reward_modeling.load import load_reward_models
from stages.reward_modeling.scoring_file import Scoring
from stages.stackexchange.prompt import answer_ids, prompt_ids
from tests.helpers import tiny_models
from tests.helpers.untrained_reward import TEXTS, save_untrained_reward

FP32 = Merge(dtype="fp32")


def our_ids(tokenizer, texts=TEXTS) -> tuple[list[list[int]], list[list[int]]]:
    return tuple(map(list, zip(*((prompt_ids(tokenizer, q), answer_ids(tokenizer, a)) for q, a in texts), strict=True)))


def chat(question: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def export(reward, out, config=FP32) -> dict:
    out.mkdir()
    return export_reward.run(config, out, reward=reward)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder with base (a policy), reward, and its export."""
    folder = tmp_path_factory.mktemp("export")
    tiny_models.save_base(folder / "base")
    save_untrained_reward(folder / "base", load_tokenizer(folder / "base"), folder / "reward")
    assert export(folder / "reward", folder / "out")["same_ids_share"] == 1
    return folder


@pytest.fixture(scope="module")
def rewards(exported) -> torch.Tensor:
    """Rewards of TEXTS as this project computes them."""
    scorer, = load_reward_models(exported / "reward", "fp32")
    return scorer(*our_ids(load_tokenizer(exported / "reward")))


@pytest.fixture(scope="module")
def mean(exported) -> float:
    return json.loads((exported / "reward/scoring.json").read_text())["mean"]


def test_trl_computes_the_same_rewards(exported, rewards, mean, tmp_path):
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    tokenizer = AutoTokenizer.from_pretrained(exported / "base")
    tokenizer.chat_template = AutoTokenizer.from_pretrained(exported / "out").chat_template
    prompts = [[{"role": "user", "content": question}] for question, _ in TEXTS]
    trainer = RLOOTrainer(
        model=str(exported / "base"), reward_funcs=str(exported / "out"), processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}), args=RLOOConfig(
            str(tmp_path), report_to=[], per_device_train_batch_size=2, num_generations=2, max_completion_length=4,
            max_steps=1, bf16=False, use_cpu=True, gradient_checkpointing=False, save_strategy="no",
            disable_tqdm=True))
    completions = [[{"role": "assistant", "content": answer}] for _, answer in TEXTS]
    computed = trainer._calculate_rewards([{"prompt": prompt} for prompt in prompts], prompts, completions, [])
    assert computed[:, 0] - mean == pytest.approx(rewards, abs=1e-5)
    trainer.train()  # it samples, scores and updates from these files
    assert any("rewards/out/mean" in row for row in trainer.state.log_history)


def test_openrlhf_finds_what_it_loads(exported, rewards, mean):
    """Its reward model (openrlhf/models/model.py, 0.11.0): the backbone by its prefix, a head named by the config."""
    config = AutoConfig.from_pretrained(exported / "out")
    backbone = AutoModel._model_mapping[type(config)]

    class RewardModel(backbone.__base__):
        def __init__(self, config):
            super().__init__(config)
            setattr(self, self.base_model_prefix, backbone(config))
            setattr(self, config.value_head_prefix, nn.Linear(config.hidden_size, 1, bias=False))
            self.post_init()

    model, info = RewardModel.from_pretrained(exported / "out", output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tokenizer = AutoTokenizer.from_pretrained(exported / "out")
    rows = [prompt + answer for prompt, answer in zip(*our_ids(load_tokenizer(exported / "reward")), strict=True)]
    batch = tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt")  # the policy's own ids
    positions = (batch.attention_mask.cumsum(-1) - 1).masked_fill(batch.attention_mask == 0, 1)
    with torch.no_grad():
        states = getattr(model, model.base_model_prefix)(**batch, position_ids=positions).last_hidden_state
        values = getattr(model, config.value_head_prefix)(states[:, -1]).squeeze(-1)
    assert (values - config.mean) / config.std == pytest.approx(rewards, abs=1e-5)
    assert config.mean == mean and config.std == 1


def test_verl_sends_text_that_is_encoded_as_in_training(exported):
    """Its reward loop (verl/experimental/reward_loop, 0.10.0.dev): the chat template without BOS, which vLLM adds."""
    tokenizer = AutoTokenizer.from_pretrained(exported / "out")
    for (question, answer), prompt, response in zip(TEXTS, *our_ids(load_tokenizer(exported / "reward")), strict=True):
        text = tokenizer.apply_chat_template(chat(question, answer), add_generation_prompt=False, tokenize=False)
        assert tokenizer(text.removeprefix(tokenizer.bos_token)).input_ids == prompt + response
    assert AutoConfig.from_pretrained(exported / "out").architectures == ["LlamaForSequenceClassification"]
    assert AutoConfig.from_pretrained(exported / "out").num_labels == 1


def test_without_the_rule_at_the_end_of_the_prompt_ids_differ(exported):
    """The rule is needed: byte-level BPE joins the space before the answer with its first word."""
    plain, joint = (AutoTokenizer.from_pretrained(exported / name) for name in ("reward", "out"))
    texts = [chat(*TEXTS[0])]
    assert encode_texts(plain, texts) != encode_texts(joint, texts)


def test_a_special_token_that_a_text_spells_out_stays_text(exported):
    tokenizer = AutoTokenizer.from_pretrained(exported / "out")
    ids, = encode_texts(tokenizer, [chat("</s> <s> <pad>?", "so </s>")])
    assert ids.count(tokenizer.eos_token_id) == ids.count(tokenizer.bos_token_id) == 1
    assert ids[-1] == tokenizer.eos_token_id and tokenizer.pad_token_id not in ids


def test_a_padding_id_without_an_embedding_gets_one(tmp_path, monkeypatch):
    """A base without a padding token (LLaMA, GPT-2): ours pads with no id, others look its id up."""
    monkeypatch.setattr("stages.modeling.tokenizer.PAD", "[PAD]")  # one that the vocabulary does not have
    base = tmp_path / "base"
    model = tiny_models.gpt2(len(tiny_models.tokenizer()))
    tokenizer = tiny_models.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    ours = load_tokenizer(base)
    reward = save_untrained_reward(base, ours, tmp_path / "reward")
    numbers = export(reward, tmp_path / "out")
    assert numbers["same_ids_share"] == 1 and numbers["max_difference"] < 1e-5
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert classifier.config.pad_token_id == ours.convert_tokens_to_ids("[PAD]") == model.config.vocab_size < (
        classifier.get_input_embeddings().num_embeddings)


def test_the_readme_has_the_constant_and_its_lines_run(exported, mean, capsys, monkeypatch):
    card = (exported / "out/README.md").read_text()
    assert f"minus {mean:.6g}" in card and "100 % are encoded as in training" in card
    lines = card.split("```python\n")[1].split("```")[0]
    exec(compile(lines.replace("THIS_FOLDER", str(exported / "out")), "README", "exec"), {})
    printed = float(capsys.readouterr().out.split("[")[1].split("]")[0])
    scorer, = load_reward_models(exported / "reward", "fp32")
    expected = scorer(*our_ids(load_tokenizer(exported / "reward"), [
        ("How do I stop the server?", "Use the stop command.")]))
    assert printed == pytest.approx(float(expected[0]), abs=1e-3)  # as printed, four decimals


@pytest.mark.parametrize(("scoring", "words"), [
    (Scoring(log_probability_weight=10.0), "adds 10 times the answer's log-probability"),
    (Scoring(pooling="mean"), "reads every token of the answer")])
def test_what_a_plain_classifier_cannot_do_is_refused(exported, tmp_path, scoring, words):
    base = exported / "base"
    reward = save_untrained_reward(base, load_tokenizer(base), tmp_path / "reward", scoring)
    with pytest.raises(ValueError, match=words) as error:
        export(reward, tmp_path / "out")
    assert "\n" not in str(error.value) and not list((tmp_path / "out").iterdir())


def test_several_models_are_refused(exported, tmp_path):
    shutil.copytree(exported / "reward", tmp_path / "reward")
    shutil.copytree(exported / "reward", tmp_path / "reward/member-1")
    with pytest.raises(ValueError, match=r"holds 2 models.*--reward .*member-1"):
        export(tmp_path / "reward", tmp_path / "out")


def test_files_that_score_differently_are_not_published(exported, tmp_path, monkeypatch):
    """As if a layer had been lost in the save."""
    from stages.reward_checks import export as module
    load = module.AutoModelForSequenceClassification.from_pretrained

    def damaged(*arguments, **named):
        model = load(*arguments, **named)
        if not named.get("output_loading_info"):  # the reloaded files, not the model that is exported
            with torch.no_grad():
                model.score.weight[0, 0] += 1
        return model

    monkeypatch.setattr(module.AutoModelForSequenceClassification, "from_pretrained", damaged)
    with pytest.raises(ValueError, match="score differently"):
        export(exported / "reward", tmp_path / "out")
