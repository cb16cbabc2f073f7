"""Every family on tiny random models: adapters, positions, padding, sampling, heads, PPO, merging, packing; and what
no family's peculiarity may do in silence (CORRECTNESS failures 5, 8, 9, 11, 14, 24, 28).
"""

import numpy as np
import pytest
import torch
import transformers as hf

from stages.finetuning.packing import PackedRow, summed_lm_loss
from stages.generation import sampler
from stages.modeling import lora
from stages.modeling.adapters import load_score_head
from stages.modeling.final_norm import check_divisible, divide_final_norm
from stages.modeling.load import load_causal
from stages.modeling.output_layer import check_logits
from stages.modeling.packed import forward
from stages.modeling.tokenizer import load_tokenizer
from stages.preference.logprobs import answer_logprobs
from stages.recipe.sections.ppo import Ppo
from stages.reward_modeling.dataset import Example
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import Scoring, describe_scoring, save_scoring
from stages.rl.policy import Policy
from stages.rl.policy_gradient_trainer import UpdateSettings, update_policy
from tests.helpers import tiny_models
from tests.helpers.architectures import FAMILIES, GROUPED, POLICIES, POSITIONS, VOCABULARY, adapted, noisy, save
from tests.helpers.padded_states import last_hidden_states
from tests.helpers.settings import take_settings
from tests.helpers.trajectories import build_trajectory

PROMPTS = [[0, 40, 50, 60, 70, 80, 0, 9, 11], [45], [90, 91, 92, 93], [0, 33, 34, 35, 36, 37]]
ANSWERS = [[5, 6, 0], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 0], [21, 22, 23, 24, 25], [0]]
ROWS = [prompt + answer for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
SCORES = torch.tensor([3.0, -3.0, 2.0, -1.0])
UPDATE = take_settings(
    UpdateSettings, Ppo(), max_sampler_ratio=None,
    epochs=2, minibatch_prompts=4, microbatch_prompts=2, clip_range=0.2, value_clip_range=0.2,
                        value_coefficient=0.1, max_gradient_norm=1.0, max_ratio=10.0, update_kl_limit=None)
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A function: family to a folder with its model and tokenizer, made once."""
    folders = {}

    def base(family):
        if family not in folders:
            folders[family] = save((FAMILIES | POLICIES)[family], tmp_path_factory.mktemp("base"))
        return folders[family]

    return base


def policy_of(folder, temperature=1.0, moved=True):
    return Policy(adapted(folder, moved=moved), temperature, "fp32")


def draw(model, prompts=PROMPTS, **changes):
    settings = {"max_new_tokens": 12, "temperature": 0, "stop_ids": (), "generator": torch.Generator().manual_seed(3)}
    return sampler.sample(model, prompts, **(settings | changes))


def by_hand(policy, prompt, answer):
    """Log-probabilities of an answer by a plain forward of the one row: no mask, no positions, no padding."""
    logits = policy.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double()
    log_p = torch.log_softmax(logits / policy.temperature, -1)
    return log_p.gather(-1, torch.tensor(answer)[:, None]).squeeze(-1)


def real(states, keep_mask):
    return [row[mask.bool()] for row, mask in zip(states, keep_mask, strict=True)]


@every_family
def test_an_adapter_finds_its_targets_and_is_all_that_learns(bases, family):
    ids = torch.tensor([ROWS[0]])
    with torch.no_grad():
        base_logits = load_causal(bases(family))(ids).logits
    model = adapted(bases(family), moved=False)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    learns = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(frozen) > 10 and learns and all("lora_" in name for name in learns)
    assert torch.equal(model(ids).logits, base_logits)
    model(input_ids=ids, labels=ids).loss.backward()
    b = {name: p for name, p in learns.items() if "lora_B" in name}
    assert {name.split(".layers.")[-1].split(".h.")[-1].split(".")[0] for name in b} == {"0", "1"}
    assert all(torch.isfinite(p.grad).all() and p.grad.norm() > 0 for p in b.values())
    torch.optim.AdamW(model.parameters(), lr=0.05).step()
    with torch.no_grad():
        assert (model(ids).logits - base_logits).abs().max() > 0.01
        with model.disable_adapter():
            assert torch.equal(model(ids).logits, base_logits)
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)


@every_family
@torch.no_grad()
def test_log_probabilities_are_the_row_alones_whatever_the_padding_and_the_batch(bases, family):
    policy = policy_of(bases(family), temperature=0.7)
    expected = [by_hand(policy, prompt, answer) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    for rows in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3], [0]):
        scored = policy([PROMPTS[i] for i in rows], [ANSWERS[i] for i in rows])
        for i, log_p, mask in zip(rows, scored.logprobs, scored.mask, strict=True):
            assert torch.allclose(log_p[mask.bool()].double(), expected[i], atol=2e-5)
    base = policy.model.get_base_model()
    alone = [last_hidden_states(base, *forward.pad_batch([row]))[0] for row in ROWS]
    for side in ("left", "right"):
        ids, mask = forward.pad_batch(ROWS, side)
        states = real(last_hidden_states(base, ids, mask), mask)
        assert all(torch.allclose(x, y, atol=2e-5) for x, y in zip(states, alone, strict=True))


@pytest.mark.parametrize("family", [*FAMILIES, *POLICIES])
@torch.no_grad()
def test_log_probabilities_are_those_of_transformers_own_logits(bases, family):
    """Of rows one by one, by Transformers' attention; caps and scales of logits and of attention scores included."""
    plain = hf.AutoModelForCausalLM.from_pretrained(bases(family), attn_implementation="eager").eval()
    policy = policy_of(bases(family), moved=False)
    scored = policy(PROMPTS, ANSWERS).logprobs
    examples = [Example(("tiny", 0), prompt, [answer], []) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    sums = answer_logprobs(policy.model, examples)
    for i, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        log_p = plain(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        expected = log_p.gather(-1, torch.tensor(answer)[:, None]).squeeze(-1)
        assert torch.allclose(scored[i, : len(answer)].double(), expected, atol=2e-5)
        assert float(sums[i]) == pytest.approx(float(expected.sum()), abs=1e-4)
    drawn = draw(policy.model, temperature=1.0, value_fn=policy.values_from_hidden)
    assert torch.allclose(policy(drawn.prompts, drawn.responses).logprobs, drawn.logprobs, atol=2e-5)


@every_family
def test_batched_greedy_is_single_greedy_and_stops_at_eos(bases, family):
    model = adapted(bases(family))
    never_ending = draw(model).responses
    assert never_ending == [draw(model, [prompt]).responses[0] for prompt in PROMPTS]
    eos = never_ending[0][3]
    actual = draw(model, stop_ids=(eos,))
    expected = [r[: r.index(eos) + 1] if eos in r else r for r in never_ending]
    assert actual.responses == expected and actual.ended == [eos in r for r in never_ending] and actual.ended[0]


@every_family
def test_what_is_sampled_is_what_is_scored(bases, family):
    """The steps of sampling, each on cached keys and values, give the log-probabilities and values of one forward."""
    policy = policy_of(bases(family), temperature=0.7)
    with torch.no_grad():
        policy.value_head.weight.normal_(generator=torch.Generator().manual_seed(5))
        drawn = draw(policy.model, temperature=0.7, value_fn=policy.values_from_hidden)
        scored = policy(drawn.prompts, drawn.responses)
    assert torch.allclose(scored.logprobs, drawn.logprobs, atol=2e-5) and drawn.logprobs.abs().sum() > 1
    assert torch.allclose(scored.values, drawn.values, atol=1e-4) and drawn.values.abs().sum() > 0.1
    still = torch.optim.SGD(policy.trainable_parameters().values(), lr=0.0)
    statistics = update_policy(policy, still, build_trajectory(policy, drawn, SCORES, 0.1), UPDATE, torch.Generator())
    assert statistics["ratio"] == pytest.approx(1.0, abs=1e-5) and statistics["clip_fraction"] == 0


@every_family
@torch.no_grad()
def test_the_value_head_reads_the_state_before_the_token(bases, family):
    policy = policy_of(bases(family))
    noisy(policy.value_head.parameters(), 0.5)
    values = policy(PROMPTS, ANSWERS).values
    trunk = getattr(policy.model.get_base_model(), policy.model.get_base_model().base_model_prefix)
    for i, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        hidden = trunk(torch.tensor([prompt + answer])).last_hidden_state[0, len(prompt) - 1 : -1]
        assert torch.allclose(values[i, : len(answer)], policy.value_head(hidden).squeeze(-1), atol=2e-5)


@every_family
@torch.no_grad()
def test_the_score_is_read_at_the_last_real_token(bases, family):
    model = adapted(bases(family), scorer=True)
    classifier = model.get_base_model()
    trunk = getattr(classifier, classifier.base_model_prefix)
    expected = torch.cat([classifier.score(trunk(torch.tensor([row])).last_hidden_state[0, -1]) for row in ROWS])
    assert torch.allclose(Scorer(model, "fp32", Scoring())(PROMPTS, ANSWERS), expected, atol=2e-5)


@every_family
def test_one_ppo_update_starts_at_the_reference_and_changes_the_adapter_only(bases, family):
    policy = policy_of(bases(family), moved=False)
    before = {name: p.clone() for name, p in policy.named_parameters()}
    drawn = draw(policy.model, temperature=1.0)
    seen = build_trajectory(policy, drawn, SCORES, 0.1)
    assert torch.equal(seen.logprobs, seen.ref_logprobs) and seen.sequence_kl() == 0.0
    optimizer = torch.optim.Adam(policy.trainable_parameters().values(), lr=0.01)
    update_policy(policy, optimizer, seen, UPDATE, torch.Generator())
    changed = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert changed == set(policy.trainable_parameters())
    assert all("lora_" in n or n.startswith("value_head") for n in changed)
    assert torch.equal(policy.ref_logprobs(drawn.prompts, drawn.responses) * seen.mask, seen.ref_logprobs)


@every_family
@pytest.mark.parametrize("scorer", [False, True])
def test_a_merged_adapter_computes_the_same_when_reloaded(bases, family, scorer, tmp_path):
    """With a tokenizer whose pad token the embedding does not have."""
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    model, tokenizer = adapted(bases(family), scorer), load_tokenizer(bases(family))
    assert tokenizer.pad_token_id == VOCABULARY
    model.save_pretrained(adapter)
    tokenizer.save_pretrained(adapter)
    if scorer:
        scores = Scorer(model, "fp32", Scoring())(PROMPTS, ANSWERS)
        save_scoring(adapter, describe_scoring(Scoring(), "fp32", (PROMPTS, ANSWERS), scores))
    actual = tiny_models.merge(bases(family), [adapter], merged)
    assert actual["merge_difference"] < 1e-4 and actual["reload_difference"] < 1e-5
    assert len(actual["layers"]) == sum(".lora_B." in name for name, _ in model.named_parameters())
    assert all(0 < row["relative_change"] < 10 for row in actual["layers"])
    if scorer:
        assert torch.equal(load_classifier(merged).score.weight, load_score_head(adapter))
        assert actual["pair_accuracy_before"] == actual["pair_accuracy_after"]
        again = Scorer(load_classifier(merged), "fp32")(PROMPTS, ANSWERS)
        assert torch.allclose(again, scores - scores.mean(), atol=1e-4)
        return
    assert actual["perplexity_after"] == pytest.approx(actual["perplexity_before"], rel=1e-4)
    with torch.no_grad():
        plain = hf.AutoModelForCausalLM.from_pretrained(merged)
        assert torch.allclose(plain(torch.tensor([ROWS[0]])).logits, model(torch.tensor([ROWS[0]])).logits, atol=1e-4)


@every_family
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(bases, family):
    model = load_causal(bases(family))
    alone = [float(model(torch.tensor([row]), labels=torch.tensor([row])).loss) * (len(row) - 1) for row in ROWS]
    model = load_causal(bases(family))
    rows = [PackedRow(np.array(row), np.arange(len(row)) > 0) for row in ROWS]
    assert float(summed_lm_loss(model, rows, "fp32")) == pytest.approx(sum(alone), rel=1e-5)


@pytest.mark.parametrize("family", ["gemma 2", "granite", "cohere", "gptj"])
def test_gradients_are_those_of_transformers_own_loss(bases, family):
    """Of what caps or scales, and of an attention of its own."""
    plain = hf.AutoModelForCausalLM.from_pretrained(bases(family), attn_implementation="eager").eval()
    for row in ROWS:
        (plain(torch.tensor([row]), labels=torch.tensor([row])).loss * (len(row) - 1)).backward()
    model = load_causal(bases(family))
    summed_lm_loss(model, [PackedRow(np.array(row), np.arange(len(row)) > 0) for row in ROWS], "fp32").backward()
    for (name, parameter), own in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(parameter.grad, own.grad, atol=1e-3, rtol=1e-3), name


@pytest.mark.parametrize("family", [*FAMILIES, *POLICIES])
@torch.no_grad()
def test_a_divided_final_norm_divides_the_logits_or_is_refused(bases, family):
    model, ids = load_causal(bases(family)), torch.tensor([ROWS[0]])
    if family in ("gemma 2", "phi", "gptj", "opt-350m"):  # a cap; a bias after the norm, twice; no norm
        with pytest.raises(ValueError, match=f"of {model.config.model_type} does not divide its logits: set it to "):
            check_divisible(model)
        return
    check_divisible(model), check_divisible(load_causal(bases(family), "bf16"))
    before = model(ids).logits
    divided = divide_final_norm(model, 0.6)
    assert torch.equal(model(ids).logits, before)
    assert not model.load_state_dict(divided, strict=False).unexpected_keys
    assert torch.allclose(model(ids).logits, before / 0.6, rtol=1e-4, atol=1e-5)


def test_a_table_of_positions_has_an_end_and_rotary_ones_do_not(bases):
    long = [[5] * (POSITIONS - 4)]
    for family in ("gpt2", "opt"):
        model = load_causal(bases(family))
        assert len(draw(model, long, max_new_tokens=5).responses[0]) == 5  # the last token drawn needs no position
        with pytest.raises(ValueError, match=f"a text of 65 tokens, but .* {POSITIONS} positions"):
            draw(model, long, max_new_tokens=6)
    assert len(draw(load_causal(bases("pythia")), long).responses[0]) == 12


def test_targets_that_are_not_there_are_refused(bases, tmp_path):
    settings = {"r": 4, "alpha": 8, "dropout": 0.0, "precision": "fp32"}
    with pytest.raises(ValueError, match=r"lora\.target_modules: gpt2 has no q_proj; it has c_attn, c_fc, c_proj"):
        lora.add_lora(load_causal(bases("gpt2")), target_modules=("c_attn", "q_proj"), **settings)
    unknown = load_causal(save(hf.Phi3Config(**GROUPED), tmp_path))
    with pytest.raises(ValueError, match=r"no LoRA targets for phi3: .* down_proj, gate_up_proj, o_proj, qkv_proj$"):
        lora.add_lora(unknown, target_modules=(), **settings)


def test_logits_that_change_in_an_unknown_way_are_refused(bases):
    model = load_causal(bases("llama"))
    check_logits(model)
    model.register_forward_hook(lambda module, inputs, outputs: outputs | {"logits": 2 * outputs.logits})
    with pytest.raises(ValueError, match="llama changes its logits after the output layer"):
        check_logits(model)


def test_a_family_whose_packed_rows_would_see_each_other_is_refused(tmp_path):
    """CodeGen has a code of its own for attention, which knows nothing of rows."""
    config = hf.CodeGenConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64)
    with pytest.raises(ValueError, match="codegen models cannot be packed"):
        load_causal(save(config, tmp_path))


def test_a_model_of_images_is_refused(tmp_path):
    hf.Gemma3Config(text_config=GROUPED, vision_config={"num_hidden_layers": 1}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="gemma3 models read more than text: give a model of text alone"):
        load_causal(tmp_path)


def test_a_family_without_position_ids_is_refused(tmp_path):
    folder = save(hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4), tmp_path)
    with pytest.raises(ValueError, match="bloom models take no position ids"):
        load_causal(folder)
