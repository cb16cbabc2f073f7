"""Stream answers of several policies side by side, and measure each finished one: rewards, log-ratio of each word."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import torch

from stages.artifacts.artifact import MANIFEST
from stages.chat.views import Answer, TextPiece
from stages.generation.best_of_n import best_of_kl
from stages.generation.sampler import generate_stepwise
from stages.modeling.families import max_positions
from stages.modeling.load import load_causal
from stages.modeling.packed.token_logprobs import response_logprobs
from stages.modeling.tokenizer import load_shared_tokenizer
from stages.reward_modeling.load import load_reward_models
from stages.reward_modeling.scorer import combine_scores
from stages.runtime.files import DIGEST_CHARACTERS, hash_file
from stages.stackexchange.prompt import prompt_ids

BEST_OF_N = "best of n"
REPLACEMENT = "\ufffd"  # what an incomplete character decodes to


class SamplingSettings(NamedTuple):
    """Settings of one answer: temperature (0: greedy), length limit, and the n of best-of-n."""

    temperature: float = 1.0
    most_tokens: int = 128
    samples: int = 4


class ChatModels:
    """A run's SFT and PPO models, further `models` by name, and its reward model, in memory.

    Raises ValueError if tokenizers differ or a name is given twice.
    """

    def __init__(self, run: Path, models: Sequence[tuple[str, Path]] = (), precision: str = "fp32",
                 cpu_kernels: str = "off"):
        folders, reward = {"SFT": run / "sft-merged", "PPO": run / "ppo-merged"}, run / "reward-merged"
        for name, folder in models:
            if name in folders or name == BEST_OF_N:
                raise ValueError(f"--model {name}: there is a model of that name already")
            folders[name] = folder
        self.tokenizer = load_shared_tokenizer(*folders.values(), reward)
        self.max_positions = max_positions(*folders.values(), reward)
        self.policies = {name: load_causal(folder, precision, cpu_kernels) for name, folder in folders.items()}
        self.reference = next(iter(folders))
        self.policies[BEST_OF_N] = self.policies[self.reference]
        self.scorers = load_reward_models(reward, precision, cpu_kernels=cpu_kernels)
        self.digests = {name: digest_model(folder) for name, folder in folders.items()}
        self.digests[BEST_OF_N] = f"{self.digests[self.reference]} by {digest_model(reward)}"

    def encode_prompt(self, question: str, most_tokens: int) -> list[int]:
        """Return the prompt's token ids; ValueError, in one sentence, for a question that is empty or too long."""
        if not (question or "").strip():
            raise ValueError("Type a question, or pick one.")
        ids, room = prompt_ids(self.tokenizer, question), self.max_positions - most_tokens
        if len(ids) > room:
            raise ValueError(
                f"The question has {len(ids):,} tokens, and an answer of {most_tokens:,} leaves room for "
                f"{max(0, room):,} of the {self.max_positions:,} that the models read: shorten it.")
        return ids

    def stream_side_by_side(
        self, names: list[str], question: str, sampling: SamplingSettings, seed: int
    ) -> Iterator[list[Answer]]:
        """Stream several answers, one token of each in turn; each has its own seed."""
        if not all(name in list(self.policies) for name in names):  # a request may hold a list for a name
            raise ValueError("Choose a model for each answer.")
        prompt = self.encode_prompt(question, sampling.most_tokens)
        streams = {index: self.stream(name, prompt, sampling, seed + index) for index, name in enumerate(names)}
        answers = {}
        while streams:
            for index in list(streams):
                answers[index] = next(streams[index])
                if answers[index].done:
                    streams.pop(index).close()
            yield list(answers.values())

    @torch.no_grad()
    def stream(self, name: str, prompt: list[int], sampling: SamplingSettings, seed: int) -> Iterator[Answer]:
        """Yield the answer of one policy after each token, and once more when it is done and measured."""
        count = sampling.samples if name == BEST_OF_N else 1
        answer = Answer(f"best of {count}" if name == BEST_OF_N else name, self.digests[name], count)
        start = monotonic()
        for state in generate_stepwise(
                self.policies[name], [prompt] * count, max_new_tokens=sampling.most_tokens,
                temperature=sampling.temperature, stop_ids=[self.tokenizer.eos_token_id],
                generator=torch.Generator().manual_seed(seed)):
            answer.seconds += monotonic() - start
            answer.sampled_tokens, answer.finished_samples = sum(map(len, state.responses)), sum(state.done)
            if count == 1:
                self._set_tokens(answer, state.responses[0])
            yield answer
            start = monotonic()
        rewards = combine_scores([scorer([prompt] * count, state.responses) for scorer in self.scorers])
        self._set_tokens(answer, state.responses[int(rewards.argmax())])
        answer.ended = answer.tokens[-1] == self.tokenizer.eos_token_id
        ratios = self._log_ratios(name, prompt, answer.tokens, sampling.temperature or 1.0)
        answer.pieces, answer.rewards = self.split_text(answer.tokens, ratios), sorted(rewards.tolist(), reverse=True)
        answer.kl = best_of_kl(count) if name == BEST_OF_N else sum(ratios)
        yield answer

    def split_text(self, tokens: list[int], log_ratios: list[float]) -> list[TextPiece]:
        """Split an answer into pieces of whole characters, a token each where possible, with their log-ratios."""
        pieces, length, log_ratio = [], 0, 0.0
        for count, ratio in enumerate(log_ratios, 1):
            text, log_ratio = self._decode(tokens[:count]), log_ratio + ratio
            if count == len(tokens) or not text.endswith(REPLACEMENT):
                text = text.rstrip(REPLACEMENT)
                pieces.append(TextPiece(text[length:], log_ratio))
                length, log_ratio = len(text), 0.0
        return pieces

    def _set_tokens(self, answer: Answer, tokens: Sequence[int]) -> None:
        answer.tokens = list(tokens)
        answer.text = self._decode(answer.tokens).rstrip(REPLACEMENT)

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _log_ratios(self, name: str, prompt: list[int], tokens: list[int], temperature: float) -> list[float]:
        own, reference = (response_logprobs(self.policies[policy], [prompt], [tokens], temperature)[0]
                          for policy in (name, self.reference))
        return (own - reference).tolist()


def digest_model(folder: Path) -> str:
    """Return the start of the manifest's SHA-256, which identifies a model in a vote; '' if no stage made it."""
    manifest = folder / MANIFEST
    return hash_file(manifest)[:DIGEST_CHARACTERS] if manifest.is_file() else ""
