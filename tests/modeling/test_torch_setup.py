"""What is set where there is a GPU, on a machine without one: TF32, sums in bf16, determinism, the fused optimizer."""

import os

import pytest
import torch

from stages.generation import sampler
from stages.modeling import torch_setup
from stages.training import optimizers
from stages.training.checkpoint import _restore_entry, flatten_optimizer_state, restore_optimizer_state


@pytest.fixture
def gpu(monkeypatch):
    """Let torch say that there is a GPU; the settings are restored afterwards."""
    precision, matmul = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    reduction = matmul.allow_bf16_reduced_precision_reduction
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(precision)
    matmul.allow_bf16_reduced_precision_reduction = reduction


def test_fp32_is_fp32_and_results_repeat(gpu):
    torch_setup.prepare()
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_a_users_cublas_workspace_stays(gpu, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch_setup.prepare()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_without_a_gpu_torchs_determinism_stays(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch_setup.prepare()
    assert not torch.are_deterministic_algorithms_enabled()


def test_sampling_calls_the_cumulative_sum_that_torch_would_refuse(gpu, monkeypatch):
    torch_setup.prepare()
    states, cumsum = [], torch.Tensor.cumsum

    def recorded(*arguments, **named):
        states.append(torch.are_deterministic_algorithms_enabled())
        return cumsum(*arguments, **named)

    monkeypatch.setattr(torch.Tensor, "cumsum", recorded)
    sampler.sample_token(torch.randn(2, 9), 1.0, torch.rand(2).double())
    assert states == [False] and torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def steps(weight, optimizer, count):
    for number in range(count):
        weight.grad = torch.full_like(weight, 1.0 + number)
        optimizer.step()


def build(weight):
    return optimizers.build_optimizer("adamw", [weight], learning_rate=0.1, epsilon=1e-8, weight_decay=0.1)


def test_adam_is_fused_and_resumes():
    whole, first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    steps(whole, build(whole), 4)
    optimizer = build(first)
    steps(first, optimizer, 2)
    assert optimizer.defaults["fused"] is True
    second.data.copy_(first.data)
    resumed = build(second)
    restore_optimizer_state(resumed, flatten_optimizer_state(optimizer))
    for number in (2, 3):
        second.grad = torch.full_like(second, 1.0 + number)
        resumed.step()
    assert torch.equal(second, whole) and not torch.equal(second, first)


@pytest.mark.parametrize(("group", "device"), [({"fused": None}, "cpu"), ({}, "cpu"), ({"fused": True}, "meta"),
                                               ({"capturable": True}, "meta")])
def test_a_counter_is_restored_where_the_optimizer_reads_it(group, device):
    """A fused kernel reads its step on the parameter's device; `meta` stands for a GPU."""
    state, parameter = {}, torch.nn.Parameter(torch.ones(3, device="meta"))
    _restore_entry(state, "step", torch.tensor(3.0), parameter, group)
    _restore_entry(state, "exp_avg", torch.ones(3), parameter, group)
    assert state["step"].device.type == device and state["exp_avg"].device.type == "meta"
