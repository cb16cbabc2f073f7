"""The sampling engines: what they sample, what they leave unchanged, and what they refuse. vLLM is a stand-in here."""

import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from stages.distributed import group
from stages.generation.engines import continuous_batching
from stages.generation.engines.build import build_engine
from stages.generation.engines.exported_weights import WEIGHTS
from stages.generation.engines.external import SampledResponse, sample_own_rows
from stages.generation.engines.protocol import SamplingRequest
from stages.generation.sampler import sample
from stages.modeling.load import load_causal
from stages.modeling.packed.forward import use_packed_attention, uses_cpu_kernels
from stages.modeling.replaced_layers.kernels import Kernels
from stages.rl.checks.sampler_agreement import LIMITS_NATS, sampler_difference
from stages.rl.trajectory import fill_policy_scores
from tests.helpers import architectures, tiny_models
from tests.rl.test_policy import PROMPTS, make_policy, perturb
from tests.rl.test_startup_checks import make

ROWS = PROMPTS * 2
LIMITS = [12, 5, 9, 1, 12, 12, 3, 8]
STOP = (2, 46, 100)


@pytest.fixture(scope="module")
def policy():
    return perturb(make_policy(temperature=0.8))


def request(prompts=ROWS, limits=LIMITS, temperature=0.8, stop_ids=STOP, **options):
    return SamplingRequest(prompts, limits, temperature, stop_ids, **options)


def draw(policy, engine="transformers", seed=0, **options):
    with policy.merge_adapter() as model:
        return build_engine(engine, 64).sample(model, request(**options), torch.Generator().manual_seed(seed))


@torch.no_grad()
def difference(policy, rollout):
    """The largest difference of the engine's log-probabilities from the policy's."""
    return float((policy(rollout.prompts, rollout.responses).logprobs - rollout.sampler_logprobs).abs().max())


def test_our_engine_is_our_sampler(policy):
    with policy.merge_adapter() as model:
        expected = sample(model, ROWS, max_new_tokens=LIMITS, temperature=0.8, stop_ids=STOP,
                          generator=torch.Generator().manual_seed(0))
    actual = draw(policy, "own")
    assert actual.responses == expected.responses and actual.sampler_logprobs is None


def test_continuous_batching_samples_from_the_policy_within_the_limits_and_up_to_a_stop_id(policy):
    rollout = draw(policy, prompts=ROWS * 8, limits=LIMITS * 8)
    assert difference(policy, rollout) < 2e-5
    assert {True, False} == set(rollout.ended)
    for response, limit, ended in zip(rollout.responses, LIMITS * 8, rollout.ended, strict=True):
        assert 1 <= len(response) <= limit and (response[-1] in STOP) is ended
        assert not set(response[:-1]) & set(STOP) and (ended or len(response) == limit)
    assert len(set(map(tuple, rollout.responses))) > 40
    assert all((row[len(r):] == 0).all() for row, r in zip(rollout.sampler_logprobs, rollout.responses, strict=True))


def test_continuous_batching_repeats_itself_and_leaves_model_and_random_state_alone(policy):
    model = policy.causal_model
    before = {name: p.clone() for name, p in policy.named_parameters()}
    use_packed_attention(model)
    attention, mode, state = model.config._attn_implementation, model.training, torch.random.get_rng_state()
    first = draw(policy)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(7)
    second, other = draw(policy, share_prefixes=False), draw(policy, seed=1)
    assert first.responses == second.responses and first.responses != other.responses
    assert torch.equal(first.sampler_logprobs, second.sampler_logprobs)
    assert (model.config._attn_implementation, model.training) == (attention, mode)
    assert "forward" not in vars(model) and all(torch.equal(p, before[name]) for name, p in policy.named_parameters())
    with policy.merge_adapter() as merged:  # our sampler goes on as before
        assert build_engine("own", 64).sample(merged, request(), torch.Generator()).responses


def test_with_shared_prefixes_the_samples_are_the_policys(policy):
    prompts = [[1, *range(40, 75)]] * 4  # longer than a page
    rollout = draw(policy, prompts=prompts, limits=[6] * 4, share_prefixes=True)
    assert difference(policy, rollout) < 2e-5


def test_without_a_stop_id_every_response_has_its_full_length(policy):
    rollout = draw(policy, stop_ids=())
    assert [len(response) for response in rollout.responses] == LIMITS and not any(rollout.ended)


@pytest.mark.parametrize("own", [range(1, 3), range(0)])
def test_each_process_samples_its_own_rows_with_a_seed_of_its_own(monkeypatch, own):
    """The others' rows, here the first ones, come by `gather_in_order`."""
    others, seeds = {int: [[9, 2]] * (3 - len(own)), float: [[-1.0, -2.0]] * (3 - len(own))}, []

    def sample_rows(part, seed):
        assert part.prompts == [[40 + row] for row in own] and part.max_new_tokens == list(own)
        seeds.append(seed)
        return [SampledResponse([row] * row, [-float(row)] * row) for row in own]

    def gather(values):
        kinds.append(kinds.pop(0))
        return others[kinds[-1]] + values

    for name, value in {"own_rows": lambda _: own, "rank": lambda: 1, "gather_in_order": gather}.items():
        monkeypatch.setattr(group, name, value)
    kinds, generator = [int, float], torch.Generator().manual_seed(0)
    rollout = sample_own_rows(sample_rows, request([[40], [41], [42]], [0, 1, 2], stop_ids=(2,)), generator,
                              torch.device("cpu"))
    drawn = int(torch.randint(2**31 - 1, (1,), generator=torch.Generator().manual_seed(0)))
    assert seeds == [drawn + 1] * bool(own)
    assert rollout.responses == ([[9, 2], [1], [2, 2]] if own else [[9, 2]] * 3)
    assert rollout.ended == ([True, False, True] if own else [True] * 3)
    assert rollout.sampler_logprobs.tolist()[1] == ([-1.0, 0.0] if own else [-1.0, -2.0])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_models.save_base(tmp_path_factory.mktemp("engines") / "base", width=128)


@pytest.mark.parametrize("precision", ["mixed", "bf16", "int8", "nf4"])
def test_every_precision_is_sampled_nearly_as_scored(base, precision):
    policy = make(base, precision, temperature=1.0)
    rollout = fill_policy_scores(policy, draw(policy, temperature=1.0, precision=precision), 4)
    assert 0 < sampler_difference(rollout)["sampler_logprob_difference"] < LIMITS_NATS[precision]


def test_cpu_kernels_are_on_again_afterwards(base):
    model = load_causal(base, kernels=Kernels(cpu_kernels="auto"))
    before = uses_cpu_kernels(model)
    build_engine("transformers", 64).sample(model, request(), torch.Generator())
    assert uses_cpu_kernels(model) is before


@pytest.mark.parametrize("family", ["mistral", "gemma 3", "pythia", "smollm 3"])
def test_families_with_windows_and_other_layers_are_sampled_as_scored(tmp_path, family):
    model = load_causal(architectures.save(architectures.FAMILIES[family], tmp_path))
    part = request([[1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 5]] * 3, [10] * 6, 1.0, (0,))
    rollout = build_engine("transformers", 64).sample(model, part, torch.Generator().manual_seed(0))
    for prompt, response, row in zip(rollout.prompts, rollout.responses, rollout.sampler_logprobs, strict=True):
        logprobs = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        expected = logprobs[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0]
        assert (expected - row[: len(response)]).abs().max() < 2e-5


def test_a_cap_that_continuous_batching_would_leave_out_is_refused_in_one_line(tmp_path):
    capped = load_causal(architectures.save(architectures.FAMILIES["gemma 2"], tmp_path))
    with pytest.raises(ValueError, match=r"^sampling_engine transformers leaves out the cap .* gemma2 .* to own$"):
        build_engine("transformers", 64).sample(capped, request(), torch.Generator())
    assert capped.config._attn_implementation != continuous_batching.ATTENTION


def test_a_failure_inside_of_transformers_is_one_line_and_leaves_the_model_as_it_was(policy, monkeypatch):
    before = policy.causal_model.config._attn_implementation
    with monkeypatch.context() as patch:
        patch.setattr(policy.causal_model.get_output_embeddings(), "forward", lambda states: states.no_such_attribute)
        with pytest.raises(ValueError, match=r"^sampling_engine transformers failed: [^\n]*no_such_attribute[^\n]*$"):
            draw(policy)
    assert policy.causal_model.config._attn_implementation == before and draw(policy).responses


# --- vLLM: a stand-in with its interface ----------------------------------------------------------------------------


class StandIn:
    """The part of vLLM's interface that the engine uses; responses are the row's limit of token 7, then a stop id."""

    def __init__(self):
        self.calls, self.weights = [], []
        self.LLM, self.SamplingParams = self.start, lambda **options: SimpleNamespace(**options)

    def start(self, **options):
        self.calls.append(("start", options))
        self.read(options["model"])
        return self

    def read(self, folder):
        self.weights.append(load_file(f"{folder}/{WEIGHTS}"))
        self.model = load_causal(folder)

    def collective_rpc(self, method, kwargs):
        self.calls.append((method, kwargs))
        self.read(kwargs["weights_path"])

    def reset_prefix_cache(self):
        self.calls.append(("reset_prefix_cache", {}))

    def generate(self, prompts, params, use_tqdm):
        self.params = params
        return [SimpleNamespace(outputs=[self.complete(prompt["prompt_token_ids"], one)])
                for prompt, one in zip(prompts, params, strict=True)]

    @torch.no_grad()
    def complete(self, prompt, params):
        tokens = (7,) * (params.max_tokens - 1) + (params.stop_token_ids[0],)
        logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0] / params.temperature
        logprobs = logits.log_softmax(-1)[len(prompt) - 1 :]
        return SimpleNamespace(token_ids=tokens, logprobs=[
            {token: SimpleNamespace(logprob=float(row[token]))} for token, row in zip(tokens, logprobs, strict=False)])


@pytest.fixture
def vllm(monkeypatch, base):
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    return stand_in


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_vllm_is_given_the_weights_of_the_policy_before_every_rollout(vllm, base, precision):
    policy, engine = perturb(make(base, precision, temperature=0.8)), build_engine("vllm", 64)
    for _ in range(2):
        with policy.merge_adapter() as model:
            rollout = engine.sample(model, request(precision=precision), torch.Generator().manual_seed(0))
        mean = sampler_difference(fill_policy_scores(policy, rollout, 4))["sampler_logprob_difference"]
        assert mean < {"fp32": 1e-5, "bf16": 0.1}[precision]
        perturb(policy)
    names = [name for name, _ in vllm.calls]
    assert names == ["start", "reload_weights", "reset_prefix_cache"]
    options = vllm.calls[0][1]
    assert options["logprobs_mode"] == "processed_logprobs" and options["max_model_len"] == 64
    assert options["dtype"] == {"fp32": "float32", "bf16": "bfloat16"}[precision]
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(vllm.weights[0][name], vllm.weights[1][name])
    assert not [name for name in vllm.weights[0] if "lora" in name or "base_layer" in name]


def test_vllm_is_asked_for_the_distribution_of_the_policy(vllm, policy):
    rollout = draw(policy, "vllm")
    assert [len(response) for response in rollout.responses] == LIMITS and all(rollout.ended)
    one = vllm.params[0]
    assert (one.temperature, one.top_k, one.top_p, one.ignore_eos) == (0.8, 0, 1.0, True)
    assert one.stop_token_ids == list(STOP)
    assert len({params.seed for params in vllm.params}) == len(ROWS)
    draw(policy, "vllm")
    assert vllm.params[0].seed == one.seed


def test_where_vllm_cannot_run_one_line_says_so(monkeypatch, vllm):
    with monkeypatch.context() as patch:
        patch.setattr(group, "world_size", lambda: 2)
        with pytest.raises(ValueError, match=r"^sampling_engine vllm samples in one process only: [^\n]*$"):
            build_engine("vllm", 64)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=r"^sampling_engine vllm: vLLM cannot be imported [^\n]* to own$"):
        build_engine("vllm", 64)
