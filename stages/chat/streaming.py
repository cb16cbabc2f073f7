"""Stream answers of several policies side by side, token by token, each token with its log-ratio to SFT.

A log-ratio is log p(token) - log p_SFT(token) in nats, p being the policy that sampled the token, at the sampling
temperature (1 for greedy). Its sum over an answer is a one-sample estimate (k1) of the policy's KL to SFT.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic

import torch

from stages.chat.token_text import StreamingDecoder
from stages.generation.best_of_n import best_of_kl
from stages.generation.sampler import DecodeState, GenerationState, generate_stepwise
from stages.modeling.families import max_positions
from stages.modeling.load import load_causal
from stages.modeling.output_layer import output_layer
from stages.modeling.packed.forward import uses_cpu_kernels
from stages.modeling.packed.token_logprobs import selective_log_softmax
from stages.modeling.tokenizer import load_shared_tokenizer
from stages.reward_modeling.load import load_reward_models
from stages.reward_modeling.scorer import combine_scores
from stages.stackexchange.prompt import prompt_ids

MAX_QUESTION_CHARACTERS = 100_000
BEST_OF_N = "best of n"
MAX_SAMPLES = 64


@dataclass(frozen=True)
class SamplingSettings:
    """Settings of one answer; raises ValueError for values that make no sense.

    temperature: 0 is greedy. most_tokens: length limit. samples: the n of best-of-n.
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
        if not 1 <= self.samples <= MAX_SAMPLES:
            raise ValueError(f"best-of-n draws 1 to {MAX_SAMPLES} answers, not {self.samples}")

    @property
    def scoring_temperature(self) -> float:
        """Temperature of the log-probabilities: 1 for greedy answers."""
        return self.temperature or 1.0


@dataclass
class Answer:
    """One answer while it is generated; the same object is updated after each token.

    tokens: ids, including the EOS that ended the answer, if one did. seconds: spent on sampling `sampled_tokens`, which
    for best-of-n are those of all samples. finished_samples, rewards: of best-of-n; rewards are sorted, best first.
    kl: sum of the log-ratios in nats; for best-of-n the upper bound `kl_bound`.
    """

    policy: str
    decoder: StreamingDecoder
    tokens: list[int] = field(default_factory=list)
    log_ratios: list[float] = field(default_factory=list)
    sampled_tokens: int = 0
    seconds: float = 0.0
    kl_bound: float | None = None
    ended: bool = False
    done: bool = False
    samples: int = 1
    finished_samples: int = 0
    reward: float | None = None
    rewards: list[float] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.decoder.text

    @property
    def kl(self) -> float:
        return sum(self.log_ratios) if self.kl_bound is None else self.kl_bound

    def add(self, token: int, log_ratio: float) -> None:
        self.tokens.append(token)
        self.log_ratios.append(log_ratio)
        self.decoder.add(token, log_ratio)


class ChatModels:
    """Policies in memory, the first of them SFT, with the reward models; raises ValueError if tokenizers differ.

    Args:
        folders: plain model folders by name.
        reward: a merged reward artifact of one or several models.
    """

    def __init__(self, folders: dict[str, Path], reward: Path, precision: str = "fp32",
                 cpu_kernels: str = "off"):
        self.tokenizer = load_shared_tokenizer(*folders.values(), reward)
        self.max_positions = max_positions(*folders.values(), reward)
        self.policies = {name: load_causal(folder, precision, cpu_kernels) for name, folder in folders.items()}
        self.reference = next(iter(folders))
        self.scorers = load_reward_models(reward, precision, cpu_kernels=cpu_kernels)
        self.names = [*folders, BEST_OF_N]

    def encode_prompt(self, question: str, sampling: SamplingSettings) -> list[int]:
        """Return the prompt's token ids; ValueError, in one sentence, for a question that is empty or too long."""
        if not (question or "").strip():
            raise ValueError("Type a question, or pick one.")
        if len(question) > MAX_QUESTION_CHARACTERS:  # before it is tokenized, which may take long
            raise ValueError(f"The question has {len(question):,} characters; at most {MAX_QUESTION_CHARACTERS:,} are "
                             f"read: shorten it.")
        ids = prompt_ids(self.tokenizer, question)
        room = self.max_positions - sampling.most_tokens
        if len(ids) > room:
            raise ValueError(
                f"The question has {len(ids):,} tokens, and an answer of {sampling.most_tokens:,} leaves room for "
                f"{max(0, room):,} of the {self.max_positions:,} that the models read: shorten it.")
        return ids

    def stream(self, name: str, prompt: list[int], sampling: SamplingSettings) -> Iterator[Answer]:
        """Yield the answer of one policy after each token, and once more when it is done, with its reward."""
        return (self._stream_best_of_n if name == BEST_OF_N else self._stream_policy)(name, prompt, sampling)

    def stream_side_by_side(
        self, names: list[str], prompt: list[int], sampling: SamplingSettings
    ) -> Iterator[list[Answer]]:
        """Stream several answers, one token of each in turn; each has its own seed."""
        answers = [Answer(name, StreamingDecoder(self.tokenizer)) for name in names]
        streams = {index: self.stream(name, prompt, replace(sampling, seed=sampling.seed + index))
                   for index, name in enumerate(names)}
        while streams:
            for index in list(streams):
                answers[index] = next(streams[index])
                if answers[index].done:
                    streams.pop(index).close()
            yield answers

    @torch.no_grad()
    def _stream_policy(self, name: str, prompt: list[int], sampling: SamplingSettings) -> Iterator[Answer]:
        answer, scorer = Answer(name, StreamingDecoder(self.tokenizer)), None
        if name != self.reference:
            scorer = _ReferenceScorer(self.policies[self.reference], prompt, sampling.scoring_temperature)
        for state in _count_cost(self._generate(name, [prompt], sampling), answer):
            token, logprob = state.responses[0][-1], float(state.logprobs[0, state.steps - 1])
            answer.add(token, logprob - scorer.logprob(token) if scorer else 0.0)
            yield answer
        yield self._finish(answer, prompt)

    @torch.no_grad()
    def _stream_best_of_n(self, name: str, prompt: list[int], sampling: SamplingSettings) -> Iterator[Answer]:
        """Stream SFT's answer with the highest reward of `samples`; its tokens come when all samples are finished."""
        answer = Answer(f"best of {sampling.samples}", StreamingDecoder(self.tokenizer), samples=sampling.samples)
        prompts = [prompt] * sampling.samples
        for state in _count_cost(self._generate(self.reference, prompts, sampling), answer):
            answer.finished_samples = sum(state.done)
            yield answer
        rewards = self._score(prompts, state.responses)
        for token in state.responses[int(rewards.argmax())]:
            answer.add(token, 0.0)
        answer.rewards = sorted(rewards.tolist(), reverse=True)
        answer.kl_bound = best_of_kl(sampling.samples)
        yield self._finish(answer, prompt)

    def _generate(self, name: str, prompts: list[list[int]], sampling: SamplingSettings) -> Iterator[GenerationState]:
        return generate_stepwise(
            self.policies[name], prompts, max_new_tokens=sampling.most_tokens, temperature=sampling.temperature,
            stop_ids=[self.tokenizer.eos_token_id], generator=torch.Generator().manual_seed(sampling.seed),
            value_fn=lambda hidden: hidden.new_zeros(len(hidden)),  # a value function makes it store log-probabilities
        )

    def _finish(self, answer: Answer, prompt: list[int]) -> Answer:
        answer.decoder.finish()
        answer.ended = answer.tokens[-1] == self.tokenizer.eos_token_id
        answer.reward = float(self._score([prompt], [answer.tokens]))
        answer.done = True
        return answer

    def _score(self, prompts: list[list[int]], responses: list[list[int]]) -> torch.Tensor:
        return combine_scores([scorer(prompts, responses) for scorer in self.scorers])


class _ReferenceScorer:
    """Score the tokens of another model's answer, one by one."""

    def __init__(self, model, prompt: list[int], temperature: float):
        self.head, self.temperature = output_layer(model), temperature
        self.decoder, self.cpu_kernels = DecodeState(model, [prompt]), uses_cpu_kernels(model)
        self.last_token: torch.Tensor | None = None

    def logprob(self, token: int) -> float:
        """Return the log-probability of the next token, in nats."""
        if self.last_token is not None:
            self.decoder.step(self.last_token)
        self.last_token = torch.tensor([token], device=self.decoder.hidden.device)
        return float(selective_log_softmax(self.head, self.decoder.hidden, self.last_token, self.temperature,
                                           cpu_kernels=self.cpu_kernels))


def _count_cost(states: Iterator[GenerationState], answer: Answer) -> Iterator[GenerationState]:
    """Yield the states, and count their tokens and seconds on the answer."""
    while True:
        start = monotonic()
        state = next(states, None)
        answer.seconds += monotonic() - start
        if state is None:
            return
        answer.sampled_tokens = sum(map(len, state.responses))
        yield state
