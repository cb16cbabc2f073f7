"""Answers while they are being written: policies side by side, token by token, each token beside what SFT makes of it.

A log-ratio is log p(token) - log p_SFT(token) in nats, of the policy that wrote the token, at the temperature it was
drawn at (1 for greedy); an answer's sum is a one-sample estimate (k1) of the policy's KL to SFT.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch

from stages.chat.token_text import Pieces
from stages.generation.best_of_n import best_of_kl
from stages.generation.sampler import DecodeState, GenerationState, generate_stepwise
from stages.modeling.families import max_positions
from stages.modeling.load import load_causal
from stages.modeling.packed.forward import uses_cpu_kernels
from stages.modeling.packed.token_logprobs import selective_log_softmax
from stages.modeling.tokenizer import shared_tokenizer
from stages.reward_modeling.load import load_reward_models
from stages.reward_modeling.scorer import combine_scores
from stages.stackexchange.prompt import prompt_ids

BEST_OF_N = "best of n"
MOST_SAMPLES = 64


@dataclass(frozen=True)
class SamplingSettings:
    """How an answer is drawn. temperature: 0 is greedy; most_tokens: it is cut off there; samples: n of best-of-n.

    ValueError for what cannot be done.
    """

    temperature: float = 1.0
    most_tokens: int = 128
    samples: int = 4
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"the temperature must be 0 or more, not {self.temperature}")
        if self.most_tokens < 1:
            raise ValueError(f"an answer needs at least one token, not {self.most_tokens}")
        if not 1 <= self.samples <= MOST_SAMPLES:
            raise ValueError(f"best-of-n draws 1 to {MOST_SAMPLES} answers, not {self.samples}")

    @property
    def scored_at(self) -> float:
        """The temperature of log-probabilities: greedy answers are scored as the model's own."""
        return self.temperature or 1.0


@dataclass
class Answer:
    """One answer, growing: the same object at every moment.

    tokens: ids as drawn, with the EOS that ended it; seconds: spent on drawing `drawn` tokens (best-of-n's are those of
    all its samples); finished: of best-of-n, how many samples are; rewards: of all its samples, the best first.
    kl: the sum of log-ratios, nats; of best-of-n `kl_bound`, the most that it can be.
    """

    speaker: str
    pieces: Pieces
    tokens: list[int] = field(default_factory=list)
    log_ratios: list[float] = field(default_factory=list)
    drawn: int = 0
    seconds: float = 0.0
    kl_bound: float | None = None
    ended: bool = False
    done: bool = False
    samples: int = 1
    finished: int = 0
    reward: float | None = None
    rewards: list[float] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.pieces.text

    @property
    def kl(self) -> float:
        return sum(self.log_ratios) if self.kl_bound is None else self.kl_bound

    def add(self, token: int, log_ratio: float) -> None:
        self.tokens.append(token)
        self.log_ratios.append(log_ratio)
        self.pieces.add(token, log_ratio)


class ChatModels:
    """Policies in memory, the first of them SFT, with the reward model: all that answers questions.

    folders: plain model folders by name; reward: a merged reward model, or several in one artifact. ValueError when
    they do not share one tokenizer.
    """

    def __init__(self, folders: dict[str, Path], reward: Path, precision: str = "fp32", cpu_kernels: str = "off"):
        self.tokenizer = shared_tokenizer(*folders.values(), reward)
        self.longest = max_positions(*folders.values(), reward)
        self.models = {name: load_causal(folder, precision, cpu_kernels) for name, folder in folders.items()}
        self.reference = next(iter(folders))
        self.scorers = load_reward_models(reward, precision, cpu_kernels=cpu_kernels)
        self.names = [*folders, BEST_OF_N]

    def prompt(self, question: str, manner: SamplingSettings) -> list[int]:
        """Token ids of the prompt; ValueError, in one sentence, for a question that cannot be asked."""
        if not question.strip():
            raise ValueError("Type a question, or pick one.")
        ids = prompt_ids(self.tokenizer, question)
        room = self.longest - manner.most_tokens
        if len(ids) > room:
            raise ValueError(
                f"The question has {len(ids):,} tokens, and an answer of {manner.most_tokens:,} leaves room for "
                f"{max(0, room):,} of the {self.longest:,} that the models read: shorten it.")
        return ids

    def answer(self, name: str, prompt: list[int], manner: SamplingSettings) -> Iterator[Answer]:
        """The answer of one policy after each of its tokens; the last time it is done, with its reward."""
        draw = self._best_of if name == BEST_OF_N else self._alone
        return draw(name, prompt, manner)

    def together(self, names: list[str], prompt: list[int], manner: SamplingSettings) -> Iterator[list[Answer]]:
        """Answers that grow side by side, a token each in turn; each has random numbers of its own."""
        answers = [Answer(name, Pieces(self.tokenizer)) for name in names]
        manners = [SamplingSettings(**{**vars(manner), "seed": manner.seed + place}) for place in range(len(names))]
        growing = dict(enumerate(self.answer(name, prompt, how) for name, how in zip(names, manners, strict=True)))
        while growing:
            for place in list(growing):
                answers[place] = next(growing[place])
                if answers[place].done:
                    growing.pop(place).close()
            yield answers

    @torch.no_grad()
    def _alone(self, name: str, prompt: list[int], manner: SamplingSettings) -> Iterator[Answer]:
        answer = Answer(name, Pieces(self.tokenizer))
        reader = _Reader(self.models[self.reference], prompt, manner.scored_at) if name != self.reference else None
        for record in _timed(self._steps(name, [prompt], manner), answer):
            token, log_p = record.responses[0][-1], float(record.logprobs[0, record.steps - 1])
            answer.add(token, log_p - reader.read(token) if reader else 0.0)
            yield answer
        yield self._finished(answer, prompt)

    @torch.no_grad()
    def _best_of(self, name: str, prompt: list[int], manner: SamplingSettings) -> Iterator[Answer]:
        """SFT's answer of the highest reward among `samples`; no token is its own before all are drawn."""
        answer = Answer(f"best of {manner.samples}", Pieces(self.tokenizer), samples=manner.samples)
        prompts = [prompt] * manner.samples
        for record in _timed(self._steps(self.reference, prompts, manner), answer):
            answer.finished = sum(record.done)
            yield answer
        rewards = self._rewards(prompts, record.responses)
        for token in record.responses[int(rewards.argmax())]:
            answer.add(token, 0.0)
        answer.rewards = sorted(rewards.tolist(), reverse=True)
        answer.kl_bound = best_of_kl(manner.samples)
        yield self._finished(answer, prompt)

    def _steps(self, name: str, prompts: list[list[int]], manner: SamplingSettings) -> Iterator[GenerationState]:
        return generate_stepwise(
            self.models[name], prompts, max_new_tokens=manner.most_tokens, temperature=manner.temperature,
            stop_ids=[self.tokenizer.eos_token_id], generator=torch.Generator().manual_seed(manner.seed),
            value_fn=lambda hidden: hidden.new_zeros(len(hidden)),  # no values, but log-probabilities are noted
        )

    def _finished(self, answer: Answer, prompt: list[int]) -> Answer:
        answer.pieces.finish()
        answer.ended = answer.tokens[-1] == self.tokenizer.eos_token_id
        answer.reward = float(self._rewards([prompt], [answer.tokens]))
        answer.done = True
        return answer

    def _rewards(self, prompts: list[list[int]], responses: list[list[int]]) -> torch.Tensor:
        return combine_scores([scorer(prompts, responses) for scorer in self.scorers])


class _Reader:
    """A model that reads what another one writes."""

    def __init__(self, model, prompt: list[int], temperature: float):
        self.head, self.growing, self.temperature = model.get_output_embeddings(), DecodeState(model, [prompt]), temperature
        self.cpu_kernels = uses_cpu_kernels(model)
        self.unread: torch.Tensor | None = None

    def read(self, token: int) -> float:
        """The token's log-probability, in nats, after all that was read."""
        if self.unread is not None:
            self.growing.step(self.unread)
        self.unread = torch.tensor([token], device=self.growing.hidden.device)
        return float(selective_log_softmax(self.head, self.growing.hidden, self.unread, self.temperature,
                                           cpu_kernels=self.cpu_kernels))


def _timed(records: Iterator[GenerationState], answer: Answer) -> Iterator[GenerationState]:
    """The same records; their tokens and the seconds that they took are counted on the answer."""
    while True:
        start = perf_counter()
        record = next(records, None)
        answer.seconds += perf_counter() - start
        if record is None:
            return
        answer.drawn = sum(map(len, record.responses))
        yield record
