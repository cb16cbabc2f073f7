"""Every optimiser the recipe names: its steps against plain loops, in the backward pass too, and its resume."""

import math

import pytest
import torch

from stages.recipe.ppo import Ppo
from stages.training import checkpoint, optimizers
from tests.helpers import tiny_models

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
    found = []
    for place, parameter in enumerate(parameters()):
        rows = torch.stack([gradients(step)[place].flatten() for step in range(steps)]).double().T.tolist()
        starts = parameter.detach().double().flatten().tolist()
        ends = [adam_by_hand(x, row, decoupled=decoupled) for x, row in zip(starts, rows, strict=True)]
        found.append(torch.tensor(ends, dtype=torch.float64).view(parameter.shape))
    return found


@pytest.mark.parametrize("name, decoupled", [("adam", False), ("adamw", True)])
def test_adam_is_adam(name, decoupled):
    learning = parameters()
    found = stepped(optimizers.build(name, learning, **SETTINGS), learning, range(4))
    for one, expected in zip(found, all_by_hand(decoupled), strict=True):
        assert torch.allclose(one.double(), expected, rtol=0, atol=1e-6)


def test_eight_bits_are_close_to_adamw_where_there_are_many_and_equal_where_there_are_few():
    learning = parameters()
    optimizer = optimizers.build("adamw_8bit", learning, **SETTINGS)
    found, expected = stepped(optimizer, learning, range(4)), all_by_hand(decoupled=True)
    assert [optimizer.state[p]["state1"].dtype for p in learning] == [torch.uint8, torch.float32, torch.float32]
    moved = (expected[0] - parameters()[0].detach()).abs().mean()
    error = (found[0].double() - expected[0]).abs().mean()
    assert 1e-4 < error / moved < 0.05
    for one, by_hand in zip(found[1:], expected[1:], strict=True):
        assert torch.allclose(one.double(), by_hand, rtol=0, atol=1e-6)


def test_adafactor_steps_by_its_constant_step_size():
    """By hand in float64: arXiv 1804.04235, algorithm 4, with beta2 = 1 - t^-0.8, d = 1, and no relative step."""
    learning = parameters()
    found = stepped(optimizers.build("adafactor", learning, **SETTINGS), learning, range(4))
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
        assert torch.allclose(found[place].double(), x, rtol=0, atol=1e-6)


def test_paging_is_refused_without_a_gpu_and_unknown_names_are():
    with pytest.raises(ValueError, match=r"paged_adamw_8bit needs a CUDA GPU.*use adamw_8bit"):
        optimizers.build("paged_adamw_8bit", parameters(), **SETTINGS)
    with pytest.raises(ValueError, match="no optimizer 'lion'"):
        optimizers.build("lion", parameters(), **SETTINGS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_restored_state_goes_on_to_the_last_bit(name, dtype):
    learning = parameters(dtype)
    optimizer = optimizers.build(name, learning, **SETTINGS)
    held = stepped(optimizer, learning, range(3))
    saved = {key: t.detach().clone() for key, t in checkpoint.optimizer_tensors(optimizer).items()}
    uninterrupted = stepped(optimizer, learning, range(3, 5))

    again = [torch.nn.Parameter(p.clone()) for p in held]
    other = optimizers.build(name, again, **SETTINGS)
    stepped(other, again, range(1))  # a state that must be forgotten
    with torch.no_grad():
        for parameter, value in zip(again, held, strict=True):
            parameter.copy_(value)
    checkpoint.restore_optimizer(other, saved)
    restored = checkpoint.optimizer_tensors(other)
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
    saved = checkpoint.optimizer_tensors(optimizer)
    other = torch.optim.SGD(learning, lr=0.1)
    checkpoint.restore_optimizer(other, saved)
    assert other.state[learning[0]] == entry


@pytest.mark.parametrize("name", NAMES)
def test_a_state_saved_before_the_first_step_is_no_state(name):
    learning = parameters()
    saved = checkpoint.optimizer_tensors(optimizers.build(name, learning, **SETTINGS))
    optimizer = optimizers.build(name, learning, **SETTINGS)
    stepped(optimizer, learning, range(1))
    checkpoint.restore_optimizer(optimizer, saved)
    assert not optimizer.state and list(saved) == [checkpoint.PLAIN]


def test_step_sizes_stay_those_of_the_optimiser_that_is_restored():
    learning = parameters()
    optimizer = optimizers.build("adam", learning, **SETTINGS)
    stepped(optimizer, learning, range(1))
    other = optimizers.build("adam", learning, **SETTINGS | {"learning_rate": 0.5})
    checkpoint.restore_optimizer(other, checkpoint.optimizer_tensors(optimizer))
    assert other.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("name", NAMES)
def test_state_bytes_are_those_of_the_real_state(name):
    learning = parameters()
    optimizer = optimizers.build(name, learning, **SETTINGS)
    stepped(optimizer, learning, range(1))
    tensors = [t for p in learning for key, t in optimizer.state[p].items() if torch.is_tensor(t) and "qmap" not in key]
    real = sum(t.nbytes for t in tensors if t.dim())
    assert optimizers.state_bytes(name, learning) == real


def losses(model, optimizer, steps, before=lambda: None):
    """A tiny model (input and output embeddings tied) on a few texts; what it says of itself afterwards."""
    ids = torch.arange(3, 51).view(4, 12)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids + step, labels=ids + step).loss.backward()
        norms.append(optimizers.gradient_norm(optimizer, None))
        optimizer.step()
        before()
    return norms


@pytest.mark.parametrize("name", ["adam", "adamw", "adafactor"])
def test_in_backward_equals_the_plain_optimiser_bit_for_bit(name):
    models = [tiny_models.llama(tiny_models.tokenizer()) for _ in range(2)]
    plain, within = (
        optimizers.build(name, model.parameters(), **SETTINGS, in_backward=flag)
        for model, flag in zip(models, (False, True), strict=True)
    )
    norms = [losses(model, optimizer, 3) for model, optimizer in zip(models, (plain, within), strict=True)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0][0] > 0.1
    assert all(torch.equal(p, q) for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True))
    saved = [checkpoint.optimizer_tensors(optimizer) for optimizer in (plain, within)]
    assert saved[0].keys() == saved[1].keys() and all(torch.equal(t, saved[1][key]) for key, t in saved[0].items())


def test_in_backward_never_holds_more_than_one_gradient_and_resumes_bit_for_bit():
    model = tiny_models.llama(tiny_models.tokenizer())
    alive = []

    def look(parameter):
        alive.append([p.numel() for p in model.parameters() if p.grad is not None])

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)  # before the optimiser's own
    optimizer = optimizers.build("adamw", model.parameters(), **SETTINGS, in_backward=True)
    losses(model, optimizer, 2)
    count = len(list(model.parameters()))
    assert len(alive) == 2 * count and all(len(sizes) == 1 for sizes in alive)
    assert all(p.grad is None for p in model.parameters())

    held = {name: p.detach().clone() for name, p in model.named_parameters()}
    saved = {name: t.clone() for name, t in checkpoint.optimizer_tensors(optimizer).items()}
    losses(model, optimizer, 2)
    again = tiny_models.llama(tiny_models.tokenizer(), seed=1)
    again.load_state_dict(held, strict=False)
    other = optimizers.build("adamw", again.parameters(), **SETTINGS, in_backward=True)
    checkpoint.restore_optimizer(other, saved)
    losses(again, other, 2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_without_steps_nothing_moves_and_no_gradient_stays():
    model = tiny_models.llama(tiny_models.tokenizer())
    before = [p.detach().clone() for p in model.parameters()]
    for in_backward in (False, True):
        optimizer = optimizers.build("adam", model.parameters(), **SETTINGS, in_backward=in_backward)
        with optimizers.without_steps(optimizer):
            model(input_ids=torch.ones(1, 4).long(), labels=torch.ones(1, 4).long()).loss.backward()
        assert not optimizer.state and all(map(torch.equal, before, model.parameters()))
        optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    losses(model, optimizer, 1)
    assert not torch.equal(before[0], next(model.parameters()))


def test_in_backward_a_gradient_that_is_not_finite_moves_nothing_and_shows():
    learning = parameters()[1:]
    before = [p.detach().clone() for p in learning]
    optimizer = optimizers.build("adam", learning, **SETTINGS, in_backward=True)
    (learning[0].sum() * float("nan") + learning[1].sum()).backward()
    assert math.isnan(optimizers.gradient_norm(optimizer, None))
    assert torch.equal(learning[0], before[0]) and not torch.equal(learning[1], before[1])
    optimizer.zero_grad()
    assert optimizers.gradient_norm(optimizer, None) == 0


@pytest.mark.parametrize("limit", [None, 2.0, 1e6])
def test_gradient_norm_is_the_norm_before_clipping(limit):
    learning = parameters()
    optimizer = optimizers.build("adam", learning, **SETTINGS)
    for parameter, gradient in zip(learning, gradients(0), strict=True):
        parameter.grad = gradient
    by_hand = math.sqrt(sum(x * x for gradient in gradients(0) for x in gradient.double().flatten().tolist()))
    assert optimizers.gradient_norm(optimizer, limit) == pytest.approx(by_hand, rel=1e-5)
    left = math.sqrt(sum(float(p.grad.double().square().sum()) for p in learning))
    assert left == pytest.approx(min(by_hand, limit or by_hand), rel=1e-5)


IN_BACKWARD = {"optimizer_in_backward": True, "microbatch_prompts": 64, "max_gradient_norm": None}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"microbatch_prompts": 8}, r"microbatch_prompts \(8\) must equal minibatch_prompts \(64\)"),
        ({"max_gradient_norm": 1.0}, "max_gradient_norm must be null"),
        ({"optimizer": "adamw_8bit"}, "adam, adamw or adafactor, not with adamw_8bit"),
        ({"keep_checkpoints": 0}, "keep_checkpoints must be 1 or more, not 0"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(change, message):
    assert Ppo(**IN_BACKWARD).optimizer == "adam"
    with pytest.raises(ValueError, match=message):
        Ppo(**IN_BACKWARD | change)
