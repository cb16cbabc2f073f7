"""Sample answers of policies, and score them: by reward models, by functions, and by a gold scorer.

A gold scorer is a user's function, named in the recipe, that knows the truth of some questions:

    def score(questions: list[str], responses: list[str]) -> dict[str, list[float | None]]

It returns scores under names, `gold` among them (higher is better), and None for a question that it does not know.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from stages.evaluation.cached_results import CachedResults, digest_value
from stages.evaluation.heldout_prompts import HeldOutPrompts
from stages.evaluation.summary import BEST
from stages.generation.sampler import sample_in_batches
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.scorer import Scorer, combine_scores
from stages.reward_modeling.scoring_file import member_folders
from stages.rewards.reward_functions import RewardFunction
from stages.runtime.environment import return_freed_memory
from stages.runtime.progress import Progress

MAIN_KEY = "gold"


@dataclass(frozen=True)
class Answers:
    """Responses to prompts: token ids as sampled (with the EOS that ended them), texts, and whether they ended.

    logprobs, sft_logprobs: log-probability of each token in nats, under the policy that sampled it and under SFT, at
    the sampling temperature; one 1-D tensor a response. None: not computed. temperature: that they were sampled at.
    """

    responses: list[list[int]]
    texts: list[str]
    ended: list[bool]
    logprobs: list[torch.Tensor] | None = None
    sft_logprobs: list[torch.Tensor] | None = None
    temperature: float | None = None


class AnswerScores(NamedTuple):
    """Scores of an evaluation's answers, by policy: rewards [N], scores of functions by name, and of a judge if any.

    pairs: of the held-out texts of pairs [M] by name; empty without pairs.
    """

    rewards: dict[str, np.ndarray]
    functions: dict[str, dict[str, np.ndarray]]
    judge: dict[str, np.ndarray]
    pairs: dict[str, np.ndarray | None]


def score_by_functions(scorers: list[RewardFunction], questions: list[str], answers: dict[str, Answers]
                       ) -> dict[str, dict[str, np.ndarray]]:
    """Compute the scores of functions that read text or ids, by policy and scorer; questions: one or more answers each.
    """
    scores: dict[str, dict[str, np.ndarray]] = {}
    for name, sampled in answers.items():
        repeated = repeat_each(questions, len(sampled.texts))
        scores[name] = {scorer.name: scorer(
            repeated, sampled.texts if scorer.reads == "text" else sampled.responses).double().numpy()
            for scorer in scorers}
    return scores


def score_gold(function: Callable, questions: list[str], responses: list[str]) -> dict[str, list[float]]:
    """Call a gold scorer and check what it returns: a score a response under each name, NaN where it has none."""
    scores = function(questions, responses)
    if MAIN_KEY not in scores:
        raise ValueError(f"gold: the scorer gives {', '.join(scores) or 'nothing'}, and no {MAIN_KEY!r}")
    for name, values in scores.items():
        if len(values) != len(responses):
            raise ValueError(f"gold: the scorer gives {len(values)} values of {name!r} for {len(responses)} responses")
    return {name: [float("nan") if value is None else float(value) for value in values]
            for name, values in scores.items()}


def score_policies(function: Callable | None, prompts: HeldOutPrompts, answers: dict[str, Answers]
                   ) -> dict[str, dict[str, list[float]]]:
    """Compute every gold score of each policy's answers and, if there are any, of 'human'; nothing without a scorer."""
    texts = {name: sampled.texts for name, sampled in answers.items()}
    texts |= {"human": prompts.best_answers} if prompts.best_answers else {}
    return {name: score_gold(function, repeat_each(prompts.questions, len(responses)), responses)
            for name, responses in texts.items()} if function else {}


def score_main_gold(function: Callable, texts: Sequence[tuple[str, str]]) -> np.ndarray:
    """Compute the gold score [M] of (question, answer) texts; NaN where it is not known."""
    questions, answers = zip(*texts, strict=True) if texts else ((), ())
    return np.array(score_gold(function, list(questions), list(answers))[MAIN_KEY])


def repeat_each(items: Sequence, rows: int) -> list:
    """Repeat each item so that there are `rows` of them."""
    return [item for item in items for _ in range(rows // len(items))]


class LoadedModel:
    """The one model in memory, loaded when it is first computed with."""

    def __init__(self, load: Callable[[Path], torch.nn.Module]):
        self._load, self._model, self._folder = load, None, None

    def get(self, folder: Path) -> torch.nn.Module:
        """Return the model in this folder; another one is freed first."""
        if folder != self._folder:
            if self._folder is not None:
                self.release()
            self._model, self._folder = self._load(folder), folder
        return self._model

    def release(self) -> None:
        """Free the memory."""
        self._model = self._folder = None
        return_freed_memory()


def sample_answers(
    model, tokenizer, prompts: list[list[int]], *, batch_prompts: int, max_new_tokens: int, temperature: float,
    seed: int, label: str, share_prefixes: bool = False, precision: str = "fp32", stop_ids: Sequence[int] | None = None
) -> Answers:
    """Sample an answer to each prompt; two models with the same seed and prompts use the same random numbers.

    share_prefixes: for prompts that come several times (sampler.generate_stepwise). stop_ids: None: the tokenizer's
    EOS.
    """
    ends = [tokenizer.eos_token_id] if stop_ids is None else list(stop_ids)
    progress = Progress(label, len(prompts), "answers")
    rollout = sample_in_batches(
        model, prompts, batch_prompts, seed, progress.advance, max_new_tokens=max_new_tokens, temperature=temperature,
        stop_ids=ends, share_prefixes=share_prefixes, precision=precision)
    progress.finish()
    return Answers(rollout.responses, rollout.decode(tokenizer), rollout.ended)


class AnswerScorer:
    """Score answers by merged reward models.

    apart: policies of whose answers those that nobody before them gave are in batches of their own, so that the other
    scores are the same without them, also in rounding. cache: results of earlier evaluations.
    """

    def __init__(self, *, precision: str, batch_texts: int, cpu_kernels: str = "off",
                 apart: Sequence[str] = (), cache: CachedResults | None = None):
        self.precision, self.batch_texts, self.cpu_kernels = precision, batch_texts, cpu_kernels
        self.apart, self.cache = apart, cache or CachedResults()

    def score(self, reward: Path, texts: dict[Hashable, tuple[list, list]]) -> dict[Hashable, np.ndarray]:
        """Score the answers to prompts of each writer.

        An answer of None scores NaN. Each distinct text is scored once: who gives the same answer has the same score.

        Args:
            texts: lists of prompts and of answers, by writer: its name, or a tuple that begins with it.
        """
        rows = {writer: [None if end is None else (tuple(start), tuple(end)) for start, end in zip(*both, strict=True)]
                for writer, both in texts.items()}
        rewards: dict = {None: float("nan")}
        model = LoadedModel(partial(load_classifier, precision=self.precision, cpu_kernels=self.cpu_kernels))
        for group in ("", *self.apart):
            members = (part for writer, part in rows.items() if self._group(writer) == group)
            distinct = sorted({text for part in members for text in part} - rewards.keys(),
                              key=lambda text: (sum(map(len, text)), text))
            if not distinct:
                continue
            scores = self.cache.compute(
                "rewards", reward, partial(self._score_texts, reward, distinct, model), texts=digest_value(distinct),
                precision=self.precision, batch_texts=self.batch_texts)["scores"]
            rewards |= zip(distinct, scores.tolist(), strict=True)
        return {writer: np.array([rewards[text] for text in part]) for writer, part in rows.items()}

    def _group(self, writer: Hashable) -> str:
        name = (writer[0] if isinstance(writer, tuple) else writer).removesuffix(BEST)
        return name if name in self.apart else ""

    def _score_texts(self, reward: Path, texts: list[tuple], model: LoadedModel) -> dict[str, torch.Tensor]:
        """Score texts [N] by a reward model, or by the mean of its members, of which one is in memory at a time."""
        by_member = []
        for folder in member_folders(reward):
            scorer = None  # the model of another member
            scorer = Scorer(model.get(folder), self.precision, batch_rows=self.batch_texts, share_prompts=True)
            by_member.append(scorer(*zip(*texts, strict=True), label=f"evaluate: scores by {reward.name}"))
        return {"scores": combine_scores(by_member)}
