"""The checks before the first update: each passes on a healthy policy and stops a broken one (CORRECTNESS A2, P1,
failures 1, 3, 5, 6, 12, 14, 21, 27).
"""

import json
import math
import re
from dataclasses import asdict, dataclass, replace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from stages.generation.sampler import sample
from stages.modeling import lora
from stages.modeling.load import autocast, load_causal
from stages.modeling.tokenizer import load_tokenizer
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.reward_model import initialise_head
from stages.rl.checks import logprob_agreement, startup
from stages.rl.policy import Policy
from tests.helpers import tiny_models

PROMPTS = [[1, 40, 50, 60, 70, 80], [1, 45], [1, 90, 91, 92], [1, 33, 34, 35, 36, 37, 38, 39], [1, 7, 8], [1, 99]]
CLIP = 0.2
ROWS = torch.arange(6).split(2)
PRECISIONS = ["fp32", "mixed", "bf16", "int8", "nf4"]


@dataclass(frozen=True)
class FakeRollout:
    """The attributes of a rollout that the checks read."""

    prompts: list[list[int]]
    responses: list[list[int]]
    logprobs: torch.Tensor | None
    values: torch.Tensor | None
    allowed_token_ids: torch.Tensor | None = None


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_models.save_base(tmp_path_factory.mktemp("models") / "base", width=128)  # nf4 packs blocks of 64


@pytest.fixture(scope="module")
def reward(base):
    model = load_classifier(base, new_head=True)
    initialise_head(model, torch.Generator().manual_seed(0))
    return model


def make(base, precision="fp32", temperature=0.7):
    torch.manual_seed(0)
    model = load_causal(base, precision)
    model = lora.add_lora(model, r=4, alpha=8, dropout=0.0, target_modules=(), precision=precision)
    return Policy(model, temperature, precision)


@torch.no_grad()
def draw(policy, temperature=0.7, tokens=8):
    """Sampled token by token with a cache, one row at a time; log_p and values as the sampler saw them."""
    generator, rows = torch.Generator().manual_seed(0), []
    for prompt in PROMPTS:
        cache, step, row = DynamicCache(), prompt, []
        while len(row) < tokens - len(rows):  # ragged
            with autocast(policy.precision):
                out = policy.model(input_ids=torch.tensor([step]), past_key_values=cache, output_hidden_states=True)
            log_p = torch.log_softmax(out.logits[0, -1].float() / temperature, -1)
            token = int(torch.multinomial(log_p.exp(), 1, generator=generator))
            row.append((token, log_p[token], policy.value_head(out.hidden_states[-1][0, -1].float())[0]))
            step = [token]
        rows.append(row)
    log_p, values = (pad_sequence([torch.tensor([x[i] for x in row]) for row in rows], True) for i in (1, 2))
    return FakeRollout(PROMPTS, [[x[0] for x in row] for row in rows], log_p, values)


def sampled(policy):
    """The same from the engine's own sampler."""
    with policy.merge_adapter() as model:
        return sample(model, PROMPTS, max_new_tokens=8, temperature=0.7, stop_ids=[2], precision=policy.precision,
                      generator=torch.Generator().manual_seed(0), value_fn=policy.values_from_hidden)


def run(policy, rollout, base, rewards, clip_range=CLIP):
    lines = []
    tokenizer = load_tokenizer(base)
    report = startup.run_checks(policy, rollout, tokenizer, {name: (tokenizer, m) for name, m in rewards.items()},
                               clip_range=clip_range, microbatch_prompts=2, say=lines.append)
    return report, lines


def perturb(policy, scale=0.05):
    """After some learning: B and the value head are no longer 0."""
    with torch.no_grad():
        for name, parameter in policy.trainable_parameters().items():
            parameter.add_(scale * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    return policy


def all_log_p(policy, rollout):
    return logprob_agreement.forward_in_batches(policy, rollout, ROWS)[0]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_healthy_policy_passes_in_every_precision_and_stays_as_it_was(base, reward, precision):
    policy = make(base, precision)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    report, lines = run(policy, sampled(policy), base, {"reward": reward})
    assert report.kl_nats == 0.0 and report.eos_id == 2 and report.pad_id not in (2, None)
    assert report.value_head_norm == 0.0 and report.reward_head_norms == {"reward": pytest.approx(1.0, abs=0.3)}
    assert 0 < report.smallest_gradient_norm < float("inf")
    if precision == "fp32":
        assert report.rollout_log_p_difference < 1e-4 and report.noise_nats < 1e-4 and report.ratio_deviation < 1e-4
    assert report.keep_rollout_log_p is (report.rollout_log_p_difference <= 1e-3)
    if precision in ("fp32", "int8"):  # bf16 and nf4 agree or not by the CPU's kernels
        assert report.keep_rollout_log_p is (precision == "fp32")
    assert len(lines) == 9 - report.keep_rollout_log_p and all(line.startswith("check  ") for line in lines)
    assert lines[3] == "check  KL to the reference  0  (limit 0.0001 nats a response)  ok"
    assert ("WARNING: rounding takes" in lines[4]) is (precision == "int8")
    assert lines[5].endswith("  reused" if report.keep_rollout_log_p else "  forwarded again")
    if not report.keep_rollout_log_p:
        assert lines[6].startswith("check  ratio of old to sampler's  1 within ") and f"in {precision}: " in lines[6]
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in policy.named_parameters())
    assert json.loads(json.dumps(asdict(report)))["keep_rollout_log_p"] is report.keep_rollout_log_p


def test_a_moved_adapter_is_refused_with_its_kl(base):
    policy = perturb(make(base))
    rollout = draw(policy)
    expected = 0.0
    for prompt, response in zip(rollout.prompts, rollout.responses, strict=True):  # unpadded, token by token, float64
        logits = [policy.model(torch.tensor([prompt + response])).logits[0].detach().double() / 0.7]
        with policy.model.disable_adapter():
            logits.append(policy.model(torch.tensor([prompt + response])).logits[0].detach().double() / 0.7)
        for position, token in enumerate(response, start=len(prompt) - 1):
            on, off = (float(x[position, token] - torch.logsumexp(x[position], 0)) for x in logits)
            expected += (on - off) / len(rollout.responses)
    with pytest.raises(ValueError, match=r"starts \S+ nats a response from its reference instead of 0") as error:
        run(policy, rollout, base, {})
    assert float(str(error.value).split()[3]) == pytest.approx(expected, rel=1e-2) and abs(expected) > 0.1


def test_a_weight_that_is_not_a_number_is_named(base):
    policy = make(base)
    rollout = draw(policy)
    name, weight = next((n, p) for n, p in policy.named_parameters() if "layers.1" in n and "lora_A" in n)
    weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=f"KL to the reference is NaN: {re.escape(name)} is not finite"):
        run(policy, rollout, base, {})


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_another_temperature_in_sampling_is_a_fault_even_where_int8_is_noisy(base, precision):
    policy = make(base, precision)
    run(policy, draw(policy), base, {})
    with pytest.raises(ValueError, match=r"mean \|ratio - 1\| of the forward pass's probabilities to the sampler's is"):
        run(policy, draw(policy, temperature=1.0), base, {})


def test_rollout_numbers_are_reused_only_if_every_token_agrees(base):
    policy = make(base)
    with torch.no_grad():
        policy.value_head.weight.fill_(0.1)
    rollout = draw(policy)
    report, _ = run(policy, rollout, base, {})
    assert report.keep_rollout_log_p and 0 < report.rollout_values_difference < 1e-4
    cases = ("logprobs", 2, 5e-4, True), ("logprobs", 2, 5e-3, False), ("values", 0, 0.1, False)
    for name, row, change, reused in cases:
        metric = {"logprobs": "log_p"}.get(name, name)
        numbers = getattr(rollout, name).clone()
        numbers[row, 1] += change
        report, lines = run(policy, replace(rollout, **{name: numbers}), base, {})
        assert report.keep_rollout_log_p is reused and lines[4].endswith("reused" if reused else "forwarded again")
        assert getattr(report, f"rollout_{metric}_difference") == pytest.approx(change, rel=0.05)
    report, lines = run(policy, replace(rollout, logprobs=None, values=None), base, {})
    assert not report.keep_rollout_log_p and report.rollout_log_p_difference is None
    assert "not in the rollout" in lines[4] and len(lines) == 7
    assert report.ratio_deviation < 1e-4


class Table:
    """A policy that is a table of log-probabilities, off by so many nats for each row in the batch."""

    def __init__(self, nats_a_row):
        self.nats_a_row = nats_a_row

    def __call__(self, prompts, responses, allowed_token_ids=None):
        longest = max(map(len, responses))
        rows = [[-0.1 * token for token in response] + [0.0] * (longest - len(response)) for response in responses]
        log_p = torch.tensor(rows) + self.nats_a_row * len(prompts)
        return log_p, torch.zeros_like(log_p)


def test_noise_is_the_spread_over_compositions():
    rollout = FakeRollout([[1]] * 5, [[3], [4, 5], [6], [7, 8, 9], [3, 3]], None, None)
    largest, mean = logprob_agreement.measure_noise(Table(0.01), rollout, 4, CLIP)  # batches of 1, 2 and 4 rows
    assert largest == pytest.approx(0.03, abs=1e-6) and mean == pytest.approx(0.03, abs=1e-6)
    assert logprob_agreement.measure_noise(Table(0.01), rollout, 1, CLIP)[0] == 0.0  # no neighbours


def test_the_ratio_of_new_to_old_may_differ_from_1_by_noise_alone():
    old, new = torch.tensor([-1.0, -2.0, -0.5, -3.0]), torch.tensor([-1.0, -2.0, -0.5, -3.02])
    mean = (1 - math.exp(-0.02)) / 4
    assert logprob_agreement.check_ratio(old, new, 0.21 * mean, CLIP) == pytest.approx(4 * mean, abs=1e-6)
    words = r"explain only 0\.00094: old and new log-probabilities come from two functions"
    with pytest.raises(ValueError, match=words):
        logprob_agreement.check_ratio(old, new, 0.19 * mean, CLIP)


def test_dropout_in_the_update_alone_is_a_fault(base):
    policy = make(base)
    rollout, forward = draw(policy), policy.forward

    def with_dropout(*rows):
        scores = forward(*rows)
        return scores._replace(logprobs=scores.logprobs * (1.05 if torch.is_grad_enabled() else 1.0))

    policy.forward = with_dropout
    with pytest.raises(ValueError, match="old and new log-probabilities come from two functions"):
        run(policy, rollout, base, {})


def test_noise_beyond_the_clip_range_is_refused(base):
    policy = make(base)
    rollout = draw(policy)
    forward, reference = policy.forward, policy.ref_logprobs  # both feel the batch's size, so that the KL stays 0
    policy.forward = lambda *rows: (s := forward(*rows))._replace(logprobs=s.logprobs * (1 + 0.01 * len(rows[0])))
    policy.ref_logprobs = lambda *rows: reference(*rows) * (1 + 0.01 * len(rows[0]))
    report, lines = run(policy, replace(rollout, logprobs=None), base, {})
    assert 0.02 < math.expm1(report.noise_nats) < CLIP and "WARNING: rounding takes" in lines[3]
    with pytest.raises(ValueError, match=r"changes by \S+ nats .*, more than clip_range \(0.01\)"):
        run(policy, replace(rollout, logprobs=None), base, {}, clip_range=0.01)


def first(policy, part):
    return next((n, m) for n, m in policy.named_modules() if n.endswith(f"{part}.default"))


def gradient_of(policy):
    return startup.check_gradients(policy, policy(PROMPTS[:2], [[40, 41, 42], [43]]))


def test_the_gradient_reported_is_the_smallest_that_must_not_be_0(base):
    policy = make(base)
    report = gradient_of(policy)
    scored = policy(PROMPTS[:2], [[40, 41, 42], [43]])
    differences, tokens = scored.values - scored.logprobs, ((0, 0), (0, 1), (0, 2), (1, 0))
    (sum(differences[token] for token in tokens) / 4).backward()
    norms = {name: float(p.grad.norm()) for name, p in policy.trainable_parameters().items()}
    assert all((norm == 0) is ("lora_A" in name) for name, norm in norms.items())
    watched = [norm for name, norm in norms.items() if "lora_B" in name or name == "value_head.weight"]
    assert len(watched) == 2 * 2 + 1 and report == pytest.approx(min(watched), rel=1e-5)


def test_a_detached_b_is_named(base):
    policy = make(base)
    name, module = first(policy, "lora_B")
    forward = module.forward
    module.forward = lambda x: forward(x).detach()
    with pytest.raises(ValueError, match=f"2 of 10 trained tensors get no .*{re.escape(name)}.weight"):
        gradient_of(policy)


def test_a_b_that_sees_only_zeros_is_named(base):
    policy = make(base)
    name, module = first(policy, "lora_B")
    forward = module.forward
    module.forward = lambda x: forward(0 * x)
    with pytest.raises(ValueError, match=f"1 of 10 trained tensors get no .*: {re.escape(name)}.weight"):
        gradient_of(policy)


def test_a_frozen_part_of_the_adapter_is_named(base):
    policy = make(base)
    name, module = first(policy, "lora_B")
    module.weight.requires_grad = False
    with pytest.raises(ValueError, match=f"of the adapter, {re.escape(name)}.weight is frozen"):
        gradient_of(policy)
    policy.model.requires_grad_(False)
    with pytest.raises(ValueError, match="every tensor is frozen"):
        gradient_of(policy)


def test_re_entrant_checkpointing_is_refused_and_the_other_kind_passes(base):
    policy = make(base)
    plain = gradient_of(policy)
    for re_entrant in (False, True):
        policy.model.get_base_model().gradient_checkpointing_enable({"use_reentrant": re_entrant})
        policy.model.train()
        if not re_entrant:
            assert gradient_of(policy) == pytest.approx(plain, rel=1e-5)
    with pytest.raises(ValueError, match=r"8 of 10 trained tensors get no .*must be non-reentrant"):
        gradient_of(policy)


def ids_of(base, reward, role="policy", tokenizer=(), **config):
    """special_ids of healthy parts, some ids of one role set otherwise; "generation" is the policy's other config."""
    parts = {"policy": load_causal(base), "reward": reward}
    known = load_tokenizer(base)
    for key, value in dict(tokenizer).items():
        setattr(known, key, value)
    settings = parts["policy"].generation_config if role == "generation" else parts[role].config
    before = {key: getattr(settings, key) for key in config}
    try:
        for key, value in config.items():
            setattr(settings, key, value)
        return startup.check_special_ids(known, parts)
    finally:
        for key, value in before.items():
            setattr(settings, key, value)


def test_special_tokens_that_disagree_are_refused_with_their_place(base, reward):
    assert ids_of(base, reward) == ids_of(base, reward, eos_token_id=[7, 2]) == (2, 0)
    for role, where in {"policy": "policy, LlamaConfig", "reward": "reward, LlamaConfig",
                        "generation": "policy, GenerationConfig"}.items():
        with pytest.raises(ValueError, match=f"{where}: the tokenizer ends texts with id 2"):
            ids_of(base, reward, role, eos_token_id=7)
        with pytest.raises(ValueError, match=f"{where}: the tokenizer begins texts with id 1, this config with 0"):
            ids_of(base, reward, role, bos_token_id=0)
    with pytest.raises(ValueError, match="EOS is id 2, but the model has only 2"):
        ids_of(base, reward, vocab_size=2)
    with pytest.raises(ValueError, match="pad and EOS are both id 2"):
        ids_of(base, reward, tokenizer={"pad_token_id": 2})


def test_a_reward_that_reads_text_with_a_tokenizer_of_its_own_has_ids_of_its_own(base, reward, monkeypatch):
    policy = make(base)
    tokenizer, other = load_tokenizer(base), load_tokenizer(base)
    monkeypatch.setattr(reward.config, "eos_token_id", 7)
    settings = {"clip_range": CLIP, "microbatch_prompts": 2, "say": str}
    startup.run_checks(policy, draw(policy), tokenizer, {"hub": (other, reward)}, **settings)
    with pytest.raises(ValueError, match="model, LlamaConfig: the tokenizer ends texts with id 2"):
        startup.run_checks(policy, draw(policy), tokenizer, {"model": (tokenizer, reward)}, **settings)


def test_a_value_head_that_cannot_be_right_is_refused(base):
    policy = make(base)
    assert startup.check_value_head(perturb(policy)) == pytest.approx(float(policy.value_head.weight.data.norm()))
    policy.value_head.weight.data[0, 3] = float("inf")
    with pytest.raises(ValueError, match=r"the value head is \[1, 128\] and not finite"):
        startup.check_value_head(policy)
    policy.value_head = torch.nn.Linear(64, 1)
    with pytest.raises(ValueError, match=r"\[1, 64\] and finite, but must be \[1, 128\]"):
        startup.check_value_head(policy)


def test_a_reward_model_without_a_live_head_is_refused(base):
    model = load_classifier(base, new_head=True)
    adapted = lora.add_lora(model, r=2, alpha=4, dropout=0.0, target_modules=(), precision="fp32", scorer=True)
    head = adapted.base_model.model.score.modules_to_save["default"].weight
    assert startup.check_reward_head("reward", adapted) == pytest.approx(float(head.data.norm()))
    for value, norm in ((0.0, "0.0"), (float("nan"), "nan")):
        head.data.fill_(value)
        with pytest.raises(ValueError, match=f"reward: the norm of its head is {norm}"):
            startup.check_reward_head("reward", adapted)
    with pytest.raises(ValueError, match="a LlamaForCausalLM has no head with one output"):
        startup.check_reward_head("reward", load_causal(base))
