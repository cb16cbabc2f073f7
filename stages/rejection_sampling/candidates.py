"""Sample n responses to each prompt and score them, in parts: a part that is stored is not made again.

Also write the table of best-of-n that people open.

Each part has random numbers of its own, so that a resumed run equals the uninterrupted one bit for bit. Of several
processes, which share the rows of every part, each stores all parts in a folder of its own. Shapes: P prompts.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stages.evaluation.statistics import bootstrap_mean
from stages.generation.best_of_n import best_of_kl, best_of_n_weights, tilt_weights
from stages.generation.prompts import Prompts
from stages.generation.rollout import Rollout
from stages.generation.sampler import sample_in_batches
from stages.modeling.tokenizer import load_shared_tokenizer
from stages.reward_modeling.load import load_reward_models
from stages.reward_modeling.scorer import Scorer
from stages.rewards import checked_models
from stages.rewards.reward_functions import load_reward_functions
from stages.rewards.shaping import RewardShaper, ShapingSettings
from stages.runtime.files import atomic_path, check_free_space
from stages.runtime.progress import Progress
from stages.runtime.stage_lines import print_line
from stages.stackexchange.prompt import prompt_text
from stages.training.checkpoint import SEAL, find_damage, seal_checkpoint

PART, TABLE = "part-", "candidates.parquet"
TOKENS = pa.list_(pa.list_(pa.int32()))
SCHEMA = pa.schema({"responses": TOKENS, "ended": pa.list_(pa.bool_()), "rewards": pa.list_(pa.float32())})
TOKEN_BYTES, RESPONSE_BYTES = 4, 16  # of a part, uncompressed
SAMPLE_SCHEMA = pa.schema({
    "site": pa.string(), "qid": pa.int64(), "question": pa.string(), "url": pa.string(), "author": pa.string(),
    "prompt": pa.string(), "winner": pa.string(), "ended": pa.bool_(), "reward": pa.float32(),
    "rewards": pa.list_(pa.float32())})


@dataclass(frozen=True)
class Candidates:
    """Responses [P][n] as token ids, whether each ended, and rewards [P, n]."""

    responses: list[list[list[int]]]
    ended: list[list[bool]]
    rewards: np.ndarray

    def distinct(self) -> np.ndarray:
        """Mark the first of equal responses to a prompt, [P, n]."""
        return np.array([[row.index(response) == i for i, response in enumerate(row)] for row in self.responses])


@dataclass(frozen=True)
class CandidateSettings:
    """Settings of sampling, named as in the recipe's section `best_of_n`."""

    n: int
    temperature: float
    max_response_tokens: int
    batch_prompts: int
    save_every_prompts: int
    precision: str
    seed: int


class CandidateSampler:
    """Sample and score candidates; tokenizer: the policy's."""

    def __init__(self, tokenizer, reward_shaper: RewardShaper, settings: CandidateSettings):
        self.stop_ids, self.reward_shaper, self.settings = (tokenizer.eos_token_id,), reward_shaper, settings

    def sample(self, model, prompts: list[list[int]], folder: Path, purpose: str) -> Iterator[Candidates]:
        """Yield the candidates of all prompts, part by part; a part that lies intact in `folder` is read from there.

        Args:
            purpose: another one has other random numbers; it also names the progress line.
        """
        progress = Progress(purpose, len(prompts), "prompts")
        for number, part in enumerate(_slices(prompts, self.settings.save_every_prompts)):
            path = folder / f"{PART}{number:05d}"
            candidates = _read(path)
            progress.initial += len(part) if candidates else 0
            if candidates is None:
                candidates = self._sample_part(model, part, f"{purpose}/{number}")
                _write(path, candidates)
            yield candidates
            progress.advance(len(part), note=f"reward of the best {candidates.rewards.max(1).mean():.2f}")
        progress.finish()

    def check_space(self, folder: Path, prompts: int) -> None:
        """Raise ValueError if the disk of `folder` has no room for the candidates of so many prompts."""
        response_bytes = self.settings.max_response_tokens * TOKEN_BYTES + RESPONSE_BYTES
        check_free_space("the sampled responses", folder, prompts * self.settings.n * response_bytes)

    def sample_once(self, model, prompts: list[list[int]]) -> Rollout:
        """Sample one response to each prompt, with the same random numbers each time."""
        return self._generate(model, prompts, self.settings.seed)

    def _sample_part(self, model, prompts: list[list[int]], purpose: str) -> Candidates:
        n, name = self.settings.n, f"{self.settings.seed}/{purpose}".encode()
        rollout = self._generate(model, [prompt for prompt in prompts for _ in range(n)],
                                 seed=int.from_bytes(hashlib.sha256(name).digest()[:5], "big"))
        rewards = self.reward_shaper(rollout, update_statistics=False).rewards
        return Candidates(_slices(rollout.responses, n), _slices(rollout.ended, n), rewards.numpy().reshape(-1, n))

    def _generate(self, model, prompts: list[list[int]], seed: int) -> Rollout:
        s = self.settings
        return sample_in_batches(
            model, prompts, s.batch_prompts * s.n, seed, precision=s.precision, max_new_tokens=s.max_response_tokens,
            temperature=s.temperature, stop_ids=self.stop_ids, share_prefixes=s.n > 1)


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
    def load_models(source: str) -> list[Scorer]:
        artifact = checked_models.reward_artifact(source, reward)
        load_shared_tokenizer(policy, artifact)
        return checked_models.check_scorers(
            load_reward_models(artifact, settings.precision, cpu_kernels=cpu_kernels, share_prompts=settings.n > 1),
            artifact, longest_tokens=longest_tokens, min_correlation=min_correlation, sharded=False, say=say)

    load = partial(load_reward_functions, precision=settings.precision, pairs=pairs, load_models=load_models)
    functions = [function for source in sources for function in load(**source)]
    return CandidateSampler(tokenizer, RewardShaper(functions, tokenizer, shaping), settings)


def read_parts(folder: Path) -> Iterator[Candidates]:
    """Yield the parts that `CandidateSampler.sample` has stored, in order."""
    return filter(None, map(_read, sorted(folder.glob(f"{PART}*"))))


def _slices(values: list, size: int) -> list[list]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _write(folder: Path, candidates: Candidates) -> None:
    table = pa.table([candidates.responses, candidates.ended, candidates.rewards.tolist()], schema=SCHEMA)
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / TABLE, compression="zstd")
    seal_checkpoint(folder)


def _read(folder: Path) -> Candidates | None:
    """Read a part; None if there is none, or if it is damaged, which a line says."""
    if not (folder / SEAL).exists():
        return None
    if damage := find_damage(folder):
        print_line(f"{folder} is damaged ({damage}): sampling it again")
        return None
    table = pq.read_table(folder / TABLE, schema=SCHEMA)
    responses, ended, rewards = (table[name].to_pylist() for name in SCHEMA.names)
    return Candidates(responses, ended, np.array(rewards, np.float32))


def choose_winners(
    rewards: np.ndarray, distinct: np.ndarray, keep: Literal["best", "above", "share"], keep_above: float | None,
    keep_share: float | None,
) -> np.ndarray:
    """Mark the responses to learn from, [P, n]; settings are named as in the recipe's section `expert_iteration`.

    distinct: marks one of equal responses to a prompt, [P, n]. ValueError if no response is left.
    """
    if keep == "best":  # of equal rewards the first
        return np.arange(rewards.shape[1]) == rewards.argmax(1)[:, None]
    if keep == "above":
        chosen = distinct & (rewards > keep_above)
        if not chosen.any():
            raise ValueError(f"no sampled response has a reward above keep_above ({keep_above:g}): the highest is "
                             f"{rewards.max():.4g}; lower keep_above, or set keep to best")
        return chosen
    ranked = np.argsort(np.where(distinct, -rewards, np.inf), axis=None, kind="stable")
    chosen = np.zeros(rewards.size, bool)
    chosen[ranked[: max(1, round(keep_share * distinct.sum()))]] = True
    return chosen.reshape(rewards.shape)


def draw_tilted(rewards: np.ndarray, coefficient: float, draws: int, generator: np.random.Generator) -> np.ndarray:
    """Draw responses to each prompt in proportion to exp(reward / coefficient); return how often each is drawn, [P, n].

    If a policy pi gave the n responses, a drawn one is, for a large n, a sample of pi exp(reward / coefficient)
    (sampling-importance resampling, Rubin 1988). Systematic: one random number a prompt (Kitagawa 1996).
    """
    ends = np.cumsum(tilt_weights(rewards.astype(np.float64), coefficient), 1) * draws
    first = generator.random((len(rewards), 1))
    return np.diff(np.ceil(ends - first).clip(0, draws), axis=1, prepend=0).astype(int)


def list_winners(prompts: list[list[int]], parts: Iterable[Candidates], chosen: np.ndarray
                 ) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (prompt, response), as often as `chosen` [P, n] says. A response that was cut off has no EOS."""
    rows = zip(prompts, chosen, strict=True)
    for part in parts:
        for (prompt, counts), responses in zip(islice(rows, len(part.responses)), part.responses, strict=True):
            yield from ((prompt, responses[i]) for i in np.repeat(np.arange(len(counts)), counts))


def write_samples(path: Path, prompts: Prompts, parts: Iterable[Candidates], tokenizer) -> None:
    """Write a row a prompt, with the candidates of one part in memory at a time."""
    rows = iter(prompts.rows)
    with atomic_path(path) as draft, pq.ParquetWriter(draft, SAMPLE_SCHEMA, compression="zstd") as writer:
        for part in parts:
            writer.write_table(pa.Table.from_pylist(_rows(list(islice(rows, len(part.rewards))), part, tokenizer),
                                                    SAMPLE_SCHEMA))


def _rows(rows: list[dict], part: Candidates, tokenizer) -> list[dict]:
    best = part.rewards.argmax(1)
    texts = tokenizer.batch_decode([responses[i] for responses, i in zip(part.responses, best, strict=True)],
                                   skip_special_tokens=True)
    return [{"site": row["site"], "qid": row["qid"], "question": row["question"], "url": row["metadata"][0],
             "author": row["authors"][0], "prompt": prompt_text(row["question"]), "winner": text,
             "ended": ended[i], "reward": rewards[i], "rewards": rewards}
            for row, text, ended, rewards, i in zip(rows, texts, part.ended, part.rewards.tolist(), best, strict=True)]


def measure_best_of_n(rewards: np.ndarray, bootstrap_samples: int, seed: int) -> list[dict]:
    """Compute, for n = 1, 2, 4, ... and S, the KL bound in nats and the unbiased mean reward with its 95 % interval.

    The interval is by prompt. rewards: [P, S].
    """
    prompts, samples = rewards.shape
    counts = [n for exponent in range(samples.bit_length()) if (n := 2**exponent) < samples] + [samples]
    expected = {n: (best_of_n_weights(rewards, n) * rewards).sum(1) for n in counts}
    return [{"n": n, "kl": best_of_kl(n), "reward": bootstrap_mean(
        values, np.arange(prompts), samples=bootstrap_samples, seed=seed)} for n, values in expected.items()]
