"""Every optimizer that a recipe can name: its steps against plain loops, and its resume."""

import math

import pytest
import torch

from stages.recipe.schema import SettingsError, override
from stages.recipe.sections.ppo import Ppo
from stages.training import checkpoint, optimizers

NAMES = ["adam", "adamw", "adamw_8bit", "adafactor"]  # the paged one needs a GPU
SHAPES = [(70, 100), (10,), (3, 5)]  # bitsandbytes keeps the state of the last two in 32 bits
SETTINGS = {"learning_rate": 0.01, "epsilon": 1e-5, "weight_decay": 0.1}


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def stepped(optimizer, learning, steps):
    for step in steps:
        for parameter, gradient in zip(learning, gradients(step, learning[0].dtype), strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [p.detach().clone() for p in learning]


def adam_by_hand(start, rows, *, decoupled):
    """Adam on plain Python floats: one number, its gradients one after another."""
    x, first, second = start, 0.0, 0.0
    for t, g in enumerate(rows, start=1):
        if decoupled:
            x *= 1 - 0.01 * 0.1
        else:
            g += 0.1 * x
        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g * g
        x -= 0.01 * (first / (1 - 0.9**t)) / (math.sqrt(second / (1 - 0.999**t)) + 1e-5)
    return x


def all_by_hand(decoupled, steps=4):
    actual = []
    for place, parameter in enumerate(parameters()):
        rows = torch.stack([gradients(step)[place].flatten() for step in range(steps)]).double().T.tolist()
        starts = parameter.detach().double().flatten().tolist()
        ends = [adam_by_hand(x, row, decoupled=decoupled) for x, row in zip(starts, rows, strict=True)]
        actual.append(torch.tensor(ends, dtype=torch.float64).view(parameter.shape))
    return actual


@pytest.mark.parametrize("name, decoupled", [("adam", False), ("adamw", True)])
def test_adam_is_adam(name, decoupled):
    learning = parameters()
    actual = stepped(optimizers.build_optimizer(name, learning, **SETTINGS), learning, range(4))
    for one, expected in zip(actual, all_by_hand(decoupled), strict=True):
        assert torch.allclose(one.double(), expected, rtol=0, atol=1e-6)


def test_eight_bits_are_close_to_adamw_where_there_are_many_and_equal_where_there_are_few():
    learning = parameters()
    optimizer = optimizers.build_optimizer("adamw_8bit", learning, **SETTINGS)
    actual, expected = stepped(optimizer, learning, range(4)), all_by_hand(decoupled=True)
    assert [optimizer.state[p]["state1"].dtype for p in learning] == [torch.uint8, torch.float32, torch.float32]
    moved = (expected[0] - parameters()[0].detach()).abs().mean()
    error = (actual[0].double() - expected[0]).abs().mean()
    assert 1e-4 < error / moved < 0.05
    for one, by_hand in zip(actual[1:], expected[1:], strict=True):
        assert torch.allclose(one.double(), by_hand, rtol=0, atol=1e-6)


def test_adafactor_steps_by_its_constant_step_size():
    """By hand in float64: arXiv 1804.04235, algorithm 4, with beta2 = 1 - t^-0.8, d = 1, and no relative step."""
    learning = parameters()
    actual = stepped(optimizers.build_optimizer("adafactor", learning, **SETTINGS), learning, range(4))
    for place, parameter in enumerate(parameters()):
        x = parameter.detach().double()
        row = column = whole = 0.0
        for t in range(1, 5):
            g, beta = gradients(t - 1)[place].double(), 1 - t**-0.8
            square = g**2 + 1e-30
            if x.dim() > 1:
                row = beta * row + (1 - beta) * square.sum(1, keepdim=True)
                column = beta * column + (1 - beta) * square.sum(0, keepdim=True)
                estimate = row * column / row.sum()
            else:
                estimate = whole = beta * whole + (1 - beta) * square
            update = g / estimate.sqrt()
            x = x * (1 - 0.01 * 0.1) - 0.01 * update / max(1.0, float((update**2).mean().sqrt()))
        assert torch.allclose(actual[place].double(), x, rtol=0, atol=1e-6)


def test_paging_is_refused_without_a_gpu_and_unknown_names_are():
    with pytest.raises(ValueError, match=r"paged_adamw_8bit needs a CUDA GPU.*use adamw_8bit"):
        optimizers.build_optimizer("paged_adamw_8bit", parameters(), **SETTINGS)
    with pytest.raises(ValueError, match="no optimizer 'lion'"):
        optimizers.build_optimizer("lion", parameters(), **SETTINGS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_restored_state_goes_on_to_the_last_bit(name, dtype):
    learning = parameters(dtype)
    optimizer = optimizers.build_optimizer(name, learning, **SETTINGS)
    continued = stepped(optimizer, learning, range(3))
    saved = {key: t.detach().clone() for key, t in checkpoint.flatten_optimizer_state(optimizer).items()}
    uninterrupted = stepped(optimizer, learning, range(3, 5))

    again = [torch.nn.Parameter(p.clone()) for p in continued]
    other = optimizers.build_optimizer(name, again, **SETTINGS)
    stepped(other, again, range(1))  # a state that must be forgotten
    with torch.no_grad():
        for parameter, value in zip(again, continued, strict=True):
            parameter.copy_(value)
    checkpoint.restore_optimizer_state(other, saved)
    restored = checkpoint.flatten_optimizer_state(other)
    assert restored.keys() == saved.keys()
    assert all(restored[key].dtype == t.dtype and torch.equal(restored[key], t) for key, t in saved.items())
    kinds = [{key: type(value) for key, value in optimizer.state[p].items()} for p in learning]
    assert kinds == [{key: type(value) for key, value in other.state[p].items()} for p in again]
    assert all(map(torch.equal, stepped(other, again, range(3, 5)), uninterrupted))


def test_entries_that_are_no_tensors_come_back_as_they_were():
    learning = parameters()[:1]
    optimizer = torch.optim.SGD(learning, lr=0.1)
    entry = {"step": 7, "none": None, "share": 0.1, "on": True, "unseen": float("inf"), "map": torch.tensor([3]).byte()}
    optimizer.state[learning[0]] = dict(entry)
    saved = checkpoint.flatten_optimizer_state(optimizer)
    other = torch.optim.SGD(learning, lr=0.1)
    checkpoint.restore_optimizer_state(other, saved)
    assert other.state[learning[0]] == entry


@pytest.mark.parametrize("name", NAMES)
def test_a_state_saved_before_the_first_step_is_no_state(name):
    learning = parameters()
    saved = checkpoint.flatten_optimizer_state(optimizers.build_optimizer(name, learning, **SETTINGS))
    optimizer = optimizers.build_optimizer(name, learning, **SETTINGS)
    stepped(optimizer, learning, range(1))
    checkpoint.restore_optimizer_state(optimizer, saved)
    assert not optimizer.state and list(saved) == [checkpoint.NON_TENSORS]


def test_step_sizes_stay_those_of_the_optimiser_that_is_restored():
    learning = parameters()
    optimizer = optimizers.build_optimizer("adam", learning, **SETTINGS)
    stepped(optimizer, learning, range(1))
    other = optimizers.build_optimizer("adam", learning, **SETTINGS | {"learning_rate": 0.5})
    checkpoint.restore_optimizer_state(other, checkpoint.flatten_optimizer_state(optimizer))
    assert other.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("name", NAMES)
def test_state_bytes_are_those_of_the_real_state(name):
    learning = parameters()
    optimizer = optimizers.build_optimizer(name, learning, **SETTINGS)
    stepped(optimizer, learning, range(1))
    tensors = [t for p in learning for key, t in optimizer.state[p].items() if torch.is_tensor(t) and "qmap" not in key]
    real = sum(t.nbytes for t in tensors if t.dim())
    assert optimizers.optimizer_state_bytes(name, learning) == real


@pytest.mark.parametrize("limit", [None, 2.0, 1e6])
def test_gradient_norm_is_the_norm_before_clipping(limit):
    learning = parameters()
    optimizer = optimizers.build_optimizer("adam", learning, **SETTINGS)
    for parameter, gradient in zip(learning, gradients(0), strict=True):
        parameter.grad = gradient
    by_hand = math.sqrt(sum(x * x for gradient in gradients(0) for x in gradient.double().flatten().tolist()))
    assert optimizers.clip_gradient_norm(optimizer, limit) == pytest.approx(by_hand, rel=1e-5)
    left = math.sqrt(sum(float(p.grad.double().square().sum()) for p in learning))
    assert left == pytest.approx(min(by_hand, limit or by_hand), rel=1e-5)


def test_a_recipe_with_the_removed_optimizer_in_backward_is_refused():
    with pytest.raises(SettingsError, match=r"optimizer_in_backward.* removed; .* lower microbatch_prompts"):
        override(Ppo(), {"optimizer_in_backward": True}, "ppo")


class Layers(torch.nn.Module):
    """An embedding, a layer with a matrix and a bias, and a head of one output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 6)
        self.score = torch.nn.Linear(6, 1, bias=False)


def muon_by_hand(start, rows):
    """Muon in float64: Nesterov momentum, five Newton-Schulz iterations, update scaled to AdamW's root mean square."""
    x, momentum = start.double(), torch.zeros_like(start).double()
    for g in rows:
        momentum = momentum + (1 - 0.95) * (g.double() - momentum)
        update = g.double() + 0.95 * (momentum - g.double())
        transposed = update.shape[0] > update.shape[1]
        update = update.T if transposed else update
        update = update / update.norm()
        for _ in range(5):
            gram = update @ update.T
            update = 3.4445 * update + (-4.775 * gram + 2.0315 * gram @ gram) @ update
        update = update.T if transposed else update
        x = x * (1 - 0.01 * 0.1) - 0.01 * 0.2 * math.sqrt(max(update.shape)) * update
    return x


def model_gradients(model, step):
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def muon_steps(model, optimizer, steps):
    for step in steps:
        for name, gradient in model_gradients(model, step).items():
            model.get_parameter(name).grad = gradient
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# torch computes the Newton-Schulz iterations in bf16; where a CPU emulates that, they stay in fp32.
@pytest.mark.parametrize(("bf16_products", "tolerance"), [(True, 0.02), (False, 2e-5)])
def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest(bf16_products, tolerance, monkeypatch):
    monkeypatch.setattr(optimizers, "has_bf16_products", lambda: bf16_products)
    model = Layers()
    matrices, others = optimizers.split_matrices(model)
    assert [id(p) for p in matrices] == [id(model.layer.weight)]
    assert {id(p) for p in others} == {id(p) for p in (model.embedding.weight, model.layer.bias, model.score.weight)}
    starts = {name: p.detach().clone() for name, p in model.named_parameters()}
    ends = muon_steps(model, optimizers.MuonWithAdamW(model, learning_rate=0.01, weight_decay=0.1), range(4))
    expected = muon_by_hand(starts["layer.weight"], [model_gradients(model, step)["layer.weight"] for step in range(4)])
    moved = expected - starts["layer.weight"].double()
    assert float((ends["layer.weight"].double() - expected).norm()) < tolerance * float(moved.norm())
    bias = [model_gradients(model, step)["layer.bias"][0].item() for step in range(4)]
    adamw = adamw_with_torch_epsilon(starts["layer.bias"][0].item(), bias)
    assert ends["layer.bias"][0].item() == pytest.approx(adamw, abs=1e-6)


def adamw_with_torch_epsilon(start, rows):
    """AdamW with torch's default epsilon, 1e-8, on plain floats."""
    x, first, second = start, 0.0, 0.0
    for t, g in enumerate(rows, start=1):
        x *= 1 - 0.01 * 0.1
        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g * g
        x -= 0.01 * (first / (1 - 0.9**t)) / (math.sqrt(second / (1 - 0.999**t)) + 1e-8)
    return x


def test_muon_resumes_bit_for_bit():
    model = Layers()
    whole = muon_steps(model, optimizers.MuonWithAdamW(model, learning_rate=0.01, weight_decay=0.1), range(4))
    model = Layers()
    optimizer = optimizers.MuonWithAdamW(model, learning_rate=0.01, weight_decay=0.1)
    muon_steps(model, optimizer, range(2))
    state = optimizer.state_dict()
    resumed = optimizers.MuonWithAdamW(model, learning_rate=0.5, weight_decay=0.1)
    resumed.load_state_dict(state)
    assert resumed.param_groups[0]["lr"] == resumed.muon.param_groups[0]["lr"] == 0.01
    ends = muon_steps(model, resumed, range(2, 4))
    assert all(torch.equal(ends[name], whole[name]) for name in whole)


def test_a_schedule_reaches_both_optimizers():
    model = Layers()
    optimizer = optimizers.MuonWithAdamW(model, learning_rate=0.01, weight_decay=0.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    starts = {name: p.detach().clone() for name, p in model.named_parameters()}
    ends = muon_steps(model, optimizer, range(1))
    assert all(torch.equal(ends[name], starts[name]) for name in starts)


def test_each_group_is_clipped_by_itself():
    policy, critic = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    policy.grad, critic.grad = torch.full((3,), 0.1), torch.full((3,), 100.0)
    optimizer = torch.optim.SGD([{"params": [policy]}, {"params": [critic]}], lr=1.0)
    norm = optimizers.clip_gradient_norm(optimizer, 1.0)
    assert norm == pytest.approx(math.sqrt(3 * 0.1**2 + 3 * 100.0**2))
    assert policy.grad.tolist() == pytest.approx([0.1] * 3)  # below the limit: the critic's error does not shrink it
    assert float(critic.grad.norm()) == pytest.approx(1.0, abs=1e-4)
