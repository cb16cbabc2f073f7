"""Compute on a pretended GPU what iterations of PPO and GRPO, rewards and the losses need, and compare it with the CPU.

    python -m tests.cuda.placement_worker FOLDER

It prints a line for each comparison, and fails with the error that a GPU would give. A process of its own: see
tests/helpers/pretended_gpu.py.
"""

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from stages.modeling import load, lora
from stages.modeling.packed import sequences, token_logprobs
from stages.offline_rl.dataset import ScoredAnswer
from stages.offline_rl.losses import LossSettings, token_losses, total_loss
from stages.offline_rl.model import ILQLModel
from stages.preference.logprobs import ReferencedExample
from stages.preference.loss import PreferenceLoss
from stages.recipe.sections.dpo import Dpo
from stages.recipe.sections.reward import Reward
from stages.reward_modeling import load as reward_load
from stages.reward_modeling.loss import PairwiseLoss
from stages.reward_modeling.reward_model import initialise_head
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import Scoring
from tests.cuda.test_against_the_cpu import ADAPTER, RESPONSES, iterate, moved_policy
from tests.helpers import pretended_gpu, tiny_models
from tests.helpers.settings import take_settings
from tests.rl.test_policy import PROMPTS

EXAMPLES = [replace(example, score_gaps=[1.0]) for example in tiny_models.EXAMPLES[:3]]


def adapted(base: Path, scorer: bool = False):
    torch.manual_seed(0)
    if not scorer:
        return lora.add_lora(load.load_causal(base), **ADAPTER, precision="fp32")
    model = reward_load.load_classifier(base, "fp32", new_head=True)
    initialise_head(model, torch.Generator().manual_seed(0))
    return lora.add_lora(model, **ADAPTER, precision="fp32", scorer=True)


def gradients(loss: torch.Tensor, model) -> list[torch.Tensor]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [loss.detach(), *(g for g in torch.autograd.grad(loss, parameters, allow_unused=True) if g is not None)]


def score(base: Path) -> list[torch.Tensor]:
    policy, model = moved_policy(base), adapted(base, scorer=True).eval()
    with torch.no_grad():
        return [*policy(PROMPTS, RESPONSES), policy.ref_logprobs(PROMPTS, RESPONSES),
                Scorer(model, "fp32", scoring=Scoring())(PROMPTS, RESPONSES)]


def train_reward(base: Path) -> list[torch.Tensor]:
    model = adapted(base, scorer=True)
    loss = take_settings(PairwiseLoss, Reward(margin_per_score=0.1))
    return gradients(loss.summed_loss(model, EXAMPLES, Scoring(), "fp32"), model)


def train_dpo(base: Path) -> list[torch.Tensor]:
    model, rows = adapted(base), [ReferencedExample(example, (-9.0, -12.0)) for example in EXAMPLES]
    return gradients(take_settings(PreferenceLoss, Dpo()).summed_loss(model, rows, "fp32"), model)


def train_ilql(base: Path) -> list[torch.Tensor]:
    model = ILQLModel(adapted(base), "fp32")
    with torch.no_grad():  # random heads would be drawn on the device
        for parameter in model.heads.parameters():
            parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view(parameter.shape))
    rows = [ScoredAnswer(prompt, answer, 0.5) for prompt, answer in zip(PROMPTS, RESPONSES, strict=True)]
    settings = LossSettings(gamma=0.99, tau=0.7, cql_scale=0.1, awac_scale=1.0, awac_beta=0.0)
    return gradients(total_loss(token_losses(model(rows), settings), settings).sum(), model)


def take_ppo_iteration(base: Path, responses: int = 1) -> list[torch.Tensor]:
    row, weights = iterate(base, "cpu", responses)
    return [*(torch.tensor(float(row[name])) for name in ("kl", "entropy", "policy_loss", "value_loss")), *weights]


def take_grpo_iteration(base: Path) -> list[torch.Tensor]:
    return take_ppo_iteration(base, responses=2)


@contextmanager
def loading_onto(device: torch.device):
    """Move every model that is loaded to the device."""
    original = load.load_pretrained
    for module in (load, reward_load):
        module.load_pretrained = lambda *args, **more: original(*args, **more).to(device)
    for table in (sequences.BUCKET_SCORES, token_logprobs.CHUNK_LOGITS):
        table[device.type] = table["cuda"]
    yield


def main(folder: Path) -> None:
    base = tiny_models.save_base(folder, width=64)
    parts = (score, train_reward, train_dpo, train_ilql, take_ppo_iteration, take_grpo_iteration)
    device = pretended_gpu.pretend()  # before the first backward pass, which starts a thread for each device
    expected = [part(base) for part in parts]
    with ExitStack() as stack:
        for context in (*pretended_gpu.modes(), loading_onto(device)):
            stack.enter_context(context)
        assert next(moved_policy(base).parameters()).device == device
        for part, numbers in zip(parts, expected, strict=True):
            actual = [x.cpu() for x in part(base)]
            torch.testing.assert_close(actual, numbers, atol=1e-4, rtol=1e-3)
            print(part.__name__, "equal")
        try:
            torch.ones(3, device=device) + torch.ones(3)
        except RuntimeError as error:
            print(error)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
