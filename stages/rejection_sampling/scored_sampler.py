"""Load what scores the responses, and build the sampler."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from stages.modeling.tokenizer import load_shared_tokenizer
from stages.rejection_sampling.candidates import CandidateSampler, CandidateSettings
from stages.reward_modeling.load import load_reward_models
from stages.reward_modeling.scorer import Scorer
from stages.rewards import checked_models
from stages.rewards.reward_functions import load_reward_functions
from stages.rewards.shaping import RewardShaper, ShapingSettings


def build_sampler(
    settings: CandidateSettings, shaping: ShapingSettings, sources: Iterable[dict], tokenizer, *, policy: Path,
    reward: Path, pairs: Path, longest_tokens: int, min_correlation: float, cpu_kernels: str,
    say: Callable[[str], None],
) -> CandidateSampler:
    """Load the reward functions, with checks of the reward models among them, and build the sampler.

    Args:
        sources: of the reward, as arguments of load_reward_functions.
        policy: the sampled model, whose tokenizer the reward models must share.
        reward: the merged reward model.
        longest_tokens: of a prompt and a response.
    """
    load_models = partial(_load_models, policy=policy, reward=reward, precision=settings.precision,
                          cpu_kernels=cpu_kernels, check=partial(
                              checked_models.check_scorers, longest_tokens=longest_tokens, sharded=False,
                              min_correlation=min_correlation, say=say))
    functions = [function for source in sources for function in load_reward_functions(
        **source, precision=settings.precision, pairs=pairs, load_models=load_models)]
    return CandidateSampler(tokenizer, RewardShaper(functions, tokenizer, shaping), settings)


def _load_models(source: str, *, policy: Path, reward: Path, precision: str, cpu_kernels: str, check: Callable
                 ) -> list[Scorer]:
    artifact = checked_models.reward_artifact(source, reward)
    load_shared_tokenizer(policy, artifact)
    return check(load_reward_models(artifact, precision, cpu_kernels=cpu_kernels), artifact)
