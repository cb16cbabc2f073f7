"""Liger's kernels as an option: which modules of a loaded model they compute, what refuses them, and who says so.

Everywhere by functions of the same interface; the kernels themselves on a GPU, or by Triton's interpreter on the CPU:

    TRITON_INTERPRET=1 pytest tests/modeling/test_liger_kernels.py

in an environment that has liger-kernel and triton.
"""

import os
import sys
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.models.llama import modeling_llama

from stages.modeling import lora
from stages.modeling.load import load_causal
from stages.modeling.packed import forward
from stages.modeling.packed.sequences import pack
from stages.modeling.packed.token_logprobs import selective_log_softmax
from stages.modeling.replaced_layers import liger, liger_package
from stages.modeling.replaced_layers.kernels import TORCH_ONLY, Kernels
from stages.reward_modeling.load import load_classifier
from stages.runtime.environment import describe_environment
from tests.helpers import liger_reference
from tests.helpers.architectures import FAMILIES, GROUPED, POLICIES, save
from tests.helpers.devices import GPU, computing_on

MODELS = FAMILIES | POLICIES | {"phi 3": hf.Phi3Config(**GROUPED), "gemma": hf.GemmaConfig(**GROUPED, head_dim=8)}
IDS = [[5, 17, 3, 99, 42, 8, 8], [11, 2, 64]]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_liger = pytest.mark.skipif(not (find_spec("liger_kernel") and find_spec("triton")),
                                 reason=f"needs liger-kernel and triton: {liger_package.INSTALL}")
INTERPRETER = pytest.param("cpu", marks=pytest.mark.skipif(
    not INTERPRETED, reason="TRITON_INTERPRET=1 pytest runs it on the CPU"))
with_kernels = pytest.mark.parametrize("device", [INTERPRETER, GPU])


@pytest.fixture(autouse=True)
def cpu_as_gpu(monkeypatch):
    """Let the CPU take the way of a GPU, in a process that has loaded no kernels."""
    monkeypatch.setattr(liger_package, "DEVICE", "cpu")
    monkeypatch.setattr(liger_package, "REPLACED", set())
    monkeypatch.setattr(liger, "NARROW_ROWS", 5)
    liger_package._load.cache_clear()
    yield
    liger_package._load.cache_clear()


@pytest.fixture
def package(monkeypatch):
    reference = liger_reference.Liger()
    liger_reference.install(monkeypatch, reference)
    return reference


def load(name, tmp_path, **kwargs):
    return load_causal(save(MODELS[name], tmp_path / "base"), **{"kernels": Kernels(liger_kernels="auto")} | kwargs)


def replaced_classes(model) -> set[str]:
    return {type(module).__name__ for module in model.modules()
            if isinstance(module, (liger.LigerNorm, liger.LigerMLP))}


def loss_and_gradients(model) -> list[torch.Tensor]:
    """The loss of packed rows, and the gradients of all weights that learn."""
    batch = pack(IDS, model.device)
    ends = batch.starts + batch.lengths - 1
    positions = torch.tensor([i for i in range(batch.num_tokens) if i not in ends.tolist()], device=model.device)
    hidden = forward.packed_hidden_states(model, batch, positions)
    layer = model.get_output_embeddings()
    loss = -selective_log_softmax(layer, hidden, batch.input_ids[0, positions + 1], 1.0).sum()
    return [loss.detach(), *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])]


def assert_equal_training(name, tmp_path, tolerance) -> None:
    model, plain = load(name, tmp_path), load_causal(tmp_path / "base")
    for actual, expected in zip(loss_and_gradients(model), loss_and_gradients(plain), strict=True):
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("name", "functions"), [
    ("llama", ["rms_norm", "swiglu"]), ("llama 3", ["rms_norm", "swiglu"]), ("mistral", ["rms_norm", "swiglu"]),
    ("qwen2", ["rms_norm", "swiglu"]), ("qwen3", ["rms_norm", "swiglu"]), ("smollm 3", ["rms_norm", "swiglu"]),
    ("granite", ["rms_norm", "swiglu"]), ("phi 3", ["rms_norm", "swiglu"]), ("olmo 2", ["rms_norm", "swiglu"]),
    ("gemma", ["geglu", "rms_norm"]), ("gemma 2", ["geglu", "rms_norm"]), ("gemma 3", ["geglu", "rms_norm"]),
    ("cohere", ["swiglu"]), ("gpt2", []), ("opt", [])])
def test_a_familys_norms_and_gated_mlps_are_replaced_and_compute_the_same(package, tmp_path, capfd, name, functions):
    model, plain = load(name, tmp_path), load_causal(tmp_path / "base")
    package.called.clear()
    ids = torch.tensor(IDS[:1])
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, atol=1e-5, rtol=1e-5)
    assert sorted(set(package.called)) == functions
    counts = [sum(type(module).__name__ in replaced_classes(model) for module in model.modules())
              for model in (model, model, plain)]
    assert counts[0] == len(package.called) and replaced_classes(plain) == set()  # each of them, once
    line = f"liger_kernels: no layer of this {model.config.model_type} model computes with them\n"
    assert capfd.readouterr().err == ("" if functions else line)


def test_losses_and_gradients_are_the_familys(package, tmp_path):
    assert_equal_training("qwen3", tmp_path, 1e-5)
    assert package.called and {"Qwen3MLP", "Qwen3RMSNorm"} == liger_package.REPLACED  # and never in place


def test_only_the_loaded_model_computes_with_them(package, tmp_path):
    kinds = [modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP, modeling_llama.LlamaAttention]
    before = [(kind, dict(vars(kind))) for kind in kinds], dict(vars(modeling_llama))
    model = load("llama", tmp_path)
    assert ([(kind, dict(vars(kind))) for kind in kinds], dict(vars(modeling_llama))) == before
    reward = load_classifier(tmp_path / "base", new_head=True, kernels=Kernels(liger_kernels="auto"))
    assert replaced_classes(model) == replaced_classes(reward) == {"LlamaMLP", "LlamaRMSNorm"}
    package.called.clear()
    for other in (load_causal(tmp_path / "base"), load_causal(tmp_path / "base", kernels=Kernels(cpu_kernels="auto"))):
        other(torch.tensor(IDS[:1]))
    assert not package.called
    adapted = lora.add_lora(model, r=4, alpha=8, dropout=0.0, target_modules=("gate_proj", "up_proj"),
                            precision="fp32")
    loss_and_gradients(adapted)
    assert package.called.count("rms_norm") == 5 and package.called.count("swiglu") == 2


def test_mixed_dtypes_and_compiled_models_go_the_ordinary_way(package, monkeypatch, tmp_path):
    norm = load("llama", tmp_path).model.norm
    package.called.clear()
    norm(torch.randn(2, 32).bfloat16())
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        norm(torch.randn(2, 32))
    assert not package.called
    assert liger_package.supports(torch.ones(1)) and not liger_package.supports(torch.ones(1).half())


class OtherGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, torch.nan), grad


@pytest.mark.parametrize(("name", "function", "wrong", "kind", "reason"), [
    ("llama", "liger_swiglu", lambda a, b: 1.01 * nn.functional.silu(a) * b, "LlamaMLP", "kernel differs"),
    ("llama", "liger_swiglu", OtherGradient.apply, "LlamaMLP", "kernel differs"),
    ("gemma 3", "liger_rms_norm", lambda x, weight, *rest: weight * x, "Gemma3RMSNorm", "kernel differs"),
    ("llama", "liger_rms_norm", lambda x, weight, *rest: weight * x / 0 * 0, "LlamaRMSNorm", "kernel differs"),
    ("llama", "liger_rms_norm", lambda *inputs: [][1], "LlamaRMSNorm",
     "kernel failed: IndexError: list index out of range")])
def test_what_disagrees_stays_torchs_and_a_line_says_so(
        package, monkeypatch, tmp_path, capfd, name, function, wrong, kind, reason):
    monkeypatch.setattr(package, function, wrong)
    liger_reference.install(monkeypatch, package)
    model = load(name, tmp_path)
    assert kind not in replaced_classes(model) and len(replaced_classes(model)) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"liger_kernels: {kind} computes with torch: Liger's {reason}")
    plain = load_causal(tmp_path / "base")
    torch.testing.assert_close(model(torch.tensor(IDS[:1])).logits, plain(torch.tensor(IDS[:1])).logits)


def test_equal_code_of_another_formula_stays_its_own():
    """SeedOss drops out behind its gate, in training alone."""
    shape = {"hidden_size": 24, "intermediate_size": 50, "num_attention_heads": 2, "num_key_value_heads": 2,
             "num_hidden_layers": 1, "vocab_size": 8, "head_dim": 12, "pad_token_id": 0}
    model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model("seed_oss", **shape))
    assert liger._matching_mixin(model.model.layers[0].mlp) is None
    assert liger._matching_mixin(model.model.norm) is liger.LlamaNorm


def test_a_manifest_records_what_ran(package, tmp_path):
    assert describe_environment()["liger_kernels"] == "off"
    load("llama", tmp_path, kernels=TORCH_ONLY)
    assert describe_environment()["liger_kernels"] == "off"
    load("gpt2", tmp_path)
    assert describe_environment()["liger_kernels"] == "none: no layer of these models"
    load("llama", tmp_path)
    assert describe_environment()["liger_kernels"] == "LlamaMLP, LlamaRMSNorm"


def test_without_the_package_a_line_says_how_to_install_it_and_torch_computes(monkeypatch, tmp_path, capfd):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    for _ in range(2):
        assert replaced_classes(load("llama", tmp_path)) == set()
    reason = "liger_kernel.transformers is not installed: pip install liger-kernel==0.8.5"
    assert capfd.readouterr().err == f"liger_kernels: none, torch's own operations are slower: {reason}\n"
    assert describe_environment()["liger_kernels"] == f"none: {reason}"


def test_a_cpu_needs_no_package_and_says_nothing(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(liger_package, "DEVICE", "cuda")
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with computing_on("cpu"):
        assert replaced_classes(load("llama", tmp_path)) == set()
    assert capfd.readouterr().err == "" and describe_environment()["liger_kernels"] == "off"


@needs_liger
@with_kernels
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma 3", "olmo 2", "phi 3"])
def test_the_kernels_compute_losses_and_gradients_of_the_family(monkeypatch, tmp_path, capfd, device, name):
    """Of the norms and MLPs, and of the whole model; in fp32, as the interpreter computes wrongly in bf16."""
    monkeypatch.setattr(liger_package, "DEVICE", device)
    if INTERPRETED:
        liger_reference.complete_interpreter(monkeypatch)
    else:
        monkeypatch.setattr(liger, "NARROW_ROWS", 1 << 15)
    with computing_on(device) if device == "cpu" else nullcontext():
        assert_equal_training(name, tmp_path, 1e-4)
    assert len(liger_package.REPLACED) == 2 and capfd.readouterr().err == ""


@needs_liger
@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("name", ["llama", "gemma 3"])
def test_the_kernels_agree_in_bf16(monkeypatch, tmp_path, capfd, device, name):
    monkeypatch.setattr(liger_package, "DEVICE", device)
    model = load(name, tmp_path, precision="bf16")
    assert len(replaced_classes(model)) == 2 and capfd.readouterr().err == ""
