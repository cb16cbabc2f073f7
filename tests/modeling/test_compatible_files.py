"""What we save is read alike by Transformers 5 and 4; the chat template is the prompt of training."""

import json
import subprocess
import sys

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from stages.modeling.compatible_files import add_rope_of_transformers_4, save_tokenizer, set_generation_config
from stages.modeling.pretrained import save_model
from stages.modeling.tokenizer import load_tokenizer
from stages.stackexchange.prompt import answer_ids, prompt_ids
from tests.helpers import tiny_models

QUESTIONS = ["How do I stop the server?", "  spaces, {{ braces }} and {% blocks %}\n\nand two paragraphs \n"]
SETTINGS = {"temperature": 0.7, "top_k": 0, "top_p": 0.9, "max_response_tokens": 96, "stop_ids": [2, 9], "seed": 5}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.9, "max_new_tokens": 96,
           "eos_token_id": [2, 9], "bos_token_id": 1, "pad_token_id": 0}
OLDER = ("transformers==4.57.6", "huggingface_hub==0.36.0", "tokenizers==0.22.1")
READ = """
import json, sys
sys.path.insert(0, sys.argv[1])
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = (kind.from_pretrained(sys.argv[2]) for kind in (AutoTokenizer, AutoModelForCausalLM))
messages = [{"role": "user", "content": text} for text in json.loads(sys.argv[3])]
print(json.dumps({
    "version": transformers.__version__, "theta": model.config.rope_theta, "scaling": model.config.rope_scaling,
    "generation": {name: getattr(model.generation_config, name) for name in json.loads(sys.argv[4])},
    "ids": [tokenizer.apply_chat_template([message], add_generation_prompt=True) for message in messages]}))
"""


@pytest.fixture
def saved(tmp_path):
    base = tiny_models.save_base(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    model.config.rope_parameters = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
    set_generation_config(model, load_tokenizer(base), SETTINGS)
    save_model(model, load_tokenizer(base), tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_chat_template_is_the_prompt_of_training(question, saved):
    tokenizer = AutoTokenizer.from_pretrained(saved)
    messages = [{"role": "user", "content": question}]
    prompt = prompt_ids(tokenizer, question)
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == prompt
    answered = [*messages, {"role": "assistant", "content": "Press ctrl-c."}]
    whole = tokenizer.apply_chat_template(answered, return_dict=False)
    assert whole == prompt + answer_ids(tokenizer, "Press ctrl-c.")


def test_transformers_5_reads_what_was_saved(saved):
    assert AutoConfig.from_pretrained(saved).rope_parameters == {
        "rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (saved.parent / "base", saved))
    assert before(QUESTIONS).input_ids == after(QUESTIONS).input_ids
    assert before.special_tokens_map == after.special_tokens_map


def test_generate_samples_as_the_run_did(saved):
    generation = GenerationConfig.from_pretrained(saved)
    assert {name: getattr(generation, name) for name in SAMPLED} == SAMPLED
    assert AutoModelForCausalLM.from_pretrained(saved).generation_config.to_dict() == generation.to_dict()


def test_saving_again_changes_nothing(saved):
    files = {name: (saved / name).read_bytes() for name in ("config.json", "tokenizer_config.json", "tokenizer.json")}
    save_tokenizer(AutoTokenizer.from_pretrained(saved), saved)
    add_rope_of_transformers_4(saved)
    assert {name: (saved / name).read_bytes() for name in files} == files


def test_models_without_rotary_embeddings_get_none(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    add_rope_of_transformers_4(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"model_type": "gpt2"}


def test_transformers_4_reads_the_same_numbers(saved, tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target",
               str(tmp_path / "older")]
    if subprocess.run([*install, *OLDER], capture_output=True, check=False).returncode:
        pytest.skip("pip cannot install Transformers 4 here (no network?)")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", READ, str(tmp_path / "older"), str(saved),
                           json.dumps(QUESTIONS), json.dumps(list(SAMPLED))],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    numbers = json.loads(done.stdout)
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert numbers == {"version": "4.57.6", "theta": 5000.0, "scaling": {"rope_type": "linear", "factor": 2.0},
                       "generation": SAMPLED, "ids": [prompt_ids(tokenizer, question) for question in QUESTIONS]}
