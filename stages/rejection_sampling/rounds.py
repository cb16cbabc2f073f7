"""Expert iteration: rounds of sampling from the policy, and of fine-tuning on the best responses.

ReST^EM (arXiv 2312.06585) fine-tunes the SFT model anew in each round, RAFT (arXiv 2304.06767) goes on with the
policy. A round is stored as a checkpoint when it is complete. Within a round, scored responses and the checkpoints of
its training are stored in a folder of its own. A resumed run therefore equals the uninterrupted one bit for bit.
"""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from stages.finetuning.packing import PackedBlocks, collate_blocks, summed_lm_loss
from stages.finetuning.token_store import TokenizedDocuments, write_documents
from stages.generation.prompts import Prompts
from stages.modeling.adapters import merged_adapter
from stages.modeling.load import autocast
from stages.modeling.packed.token_logprobs import response_logprobs
from stages.rejection_sampling.candidates import CandidateSampler, choose_winners, draw_tilted, list_winners, read_parts
from stages.training import checkpoint
from stages.training.loggers import TrainingLogger
from stages.training.trainer import TrainerSettings, train

LOGGED_SAMPLES = 8  # validation prompts whose answers are logged in every round
FOLDER, DOCUMENTS = "round-", "documents.arrow"


@dataclass(frozen=True)
class RoundSettings:
    """Settings of the rounds, named as in the recipe's section `expert_iteration`."""

    rounds: int
    start_from: str
    round_prompts: int | None
    keep: str
    keep_above: float | None
    keep_share: float | None
    keep_draws: int | None
    packing: str
    loss_on: str
    sequence_length_tokens: int
    kl_coefficient: float
    patience_rounds: int | None
    precision: str
    seed: int


class RoundLoop:
    """A run: the policy, the last complete round, and the best one so far.

    Args:
        model: the policy, of which some weights require gradients; it must be the SFT model.
        reference: opens the SFT model.

    round: the last complete one; 0 is the SFT model, -1: none. best: the row of the best round, with its `round`.
    """

    def __init__(
        self, model, reference: Callable[[], AbstractContextManager], sampler: CandidateSampler,
        settings: RoundSettings, trainer_settings: TrainerSettings, *, prompts: Prompts, validation: Prompts,
        tokenizer, logger: TrainingLogger, out: Path, say: Callable[[str], None],
    ):
        self.model, self.reference, self.sampler, self.settings = model, reference, sampler, settings
        self.trainer_settings, self.prompts, self.validation, self.tokenizer = (
            trainer_settings, prompts, validation, tokenizer)
        self.logger, self.out, self.say = logger, out, say
        self.initial_weights, self.best_weights = self._copy_weights(), {}
        self.round, self.best, self.rounds_without_better = -1, {}, 0

    def run(self) -> None:
        """Go on until the last round or until rounds do not improve, then load the best round's weights."""
        self._resume()
        if self.round < 0:
            self._complete({}, 0)
        while self.round < self.settings.rounds and not self.stopped_early:
            number = self.round + 1
            folder = self.out / f"{FOLDER}{number:04d}"
            self._remove_folders(folder)
            self._complete(self._run_round(number, folder), number)
        if self.stopped_early:
            self.say(f"stopped: no better selection_score than {self.best['selection_score']:.4g} in patience_rounds "
                     f"({self.rounds_without_better}) rounds")
        self._remove_folders()
        self._load_weights(self.best_weights)

    @property
    def stopped_early(self) -> bool:
        """Check whether as many rounds as the patience allows were no better."""
        return self.rounds_without_better == self.settings.patience_rounds

    def _resume(self) -> None:
        saved = checkpoint.load_checkpoint(self.out)
        self.logger.resume(-1 if saved is None else saved[1]["round"])
        if saved is None:
            return
        tensors, facts = saved
        self._load_weights(tensors)
        self.best_weights = {name.removeprefix("best."): t for name, t in tensors.items() if name.startswith("best.")}
        self.round, self.best, self.rounds_without_better = (
            facts[name] for name in ("round", "best", "rounds_without_better"))
        self.say(f"resumed after round {self.round}")

    def _run_round(self, number: int, folder: Path) -> dict[str, float]:
        """Sample from the policy and fine-tune on the winners; return the metrics of both."""
        s = self.settings
        prompts = self.prompts.select(self._draw_prompts(number))
        with merged_adapter(self.model, s.precision) as model:
            measured = [(part.rewards, part.distinct(), np.array(part.ended)) for part in self.sampler.sample(
                model, prompts.ids, folder, f"expert_iteration round {number}")]
        rewards, distinct, ended = map(np.concatenate, zip(*measured, strict=True))
        chosen = self._choose(rewards, distinct, number)
        documents = write_documents(folder / DOCUMENTS, list_winners(prompts.ids, read_parts(folder), chosen), None,
                                    int(chosen.sum()))
        loss = self._fine_tune(documents, folder, number)
        return {"reward": float(rewards.mean()), "winners_reward": float(np.average(rewards, weights=chosen)),
                "eos_rate": float(ended.mean()), "distinct_responses": float(distinct.mean()),
                "documents": len(documents), "loss": loss}

    def _choose(self, rewards: np.ndarray, distinct: np.ndarray, number: int) -> np.ndarray:
        """Return how often a round trains on each response, [P, n]."""
        s = self.settings
        if s.keep == "tilted":
            return draw_tilted(rewards, s.rounds * s.kl_coefficient, s.keep_draws,
                               np.random.default_rng([s.seed, number]))
        return choose_winners(rewards, distinct, s.keep, s.keep_above, s.keep_share)

    def _draw_prompts(self, number: int) -> list[int]:
        """Return the indices of a round's prompts: all, or the next ones, from the first again after the last."""
        count = len(self.prompts.ids)
        drawn = min(self.settings.round_prompts or count, count)
        return sorted((drawn * (number - 1) + i) % count for i in range(drawn))

    def _fine_tune(self, documents: TokenizedDocuments, folder: Path, number: int) -> float:
        """Train on the winners as SFT does; return the last loss, nats a token."""
        s, settings = self.settings, replace(self.trainer_settings, seed=self.settings.seed + number)
        order = np.random.default_rng(settings.seed).permutation(len(documents))
        blocks = PackedBlocks(documents, order, s.sequence_length_tokens, s.packing, s.loss_on == "answer")
        if s.start_from == "sft":
            self._load_weights(self.initial_weights)
        history = train(
            self.model, blocks, collate_blocks, lambda rows: summed_lm_loss(self.model, rows, s.precision), settings,
            folder, f"expert_iteration round {number}",
            logger=TrainingLogger(folder, "expert_iteration", quiet=self.logger.quiet))
        self.model.eval()
        return next(row["loss"] for row in reversed(history) if "loss" in row)

    def _complete(self, row: dict[str, float], number: int) -> None:
        """Evaluate the policy of a round on the validation prompts, and store the round."""
        measured = self._evaluate(number)
        self.logger.log_metrics(number, row | {f"validation_{name}": value for name, value in measured.items()})
        self.round = number
        if not self.best or measured["selection_score"] > self.best["selection_score"]:
            self.best, self.rounds_without_better = {**measured, "round": number}, 0
            self.best_weights = self._copy_weights()
        else:
            self.rounds_without_better += 1
        facts = {"round": number, "best": self.best, "rounds_without_better": self.rounds_without_better}
        tensors = self._copy_weights() | {f"best.{name}": tensor for name, tensor in self.best_weights.items()}
        checkpoint.save_checkpoint(self.out, tensors, facts, number=number, keep=1)

    @torch.no_grad()
    def _evaluate(self, number: int) -> dict[str, float]:
        """Sample an answer to each validation prompt, with the same random numbers each time, and measure them."""
        temperature = self.sampler.settings.temperature
        with merged_adapter(self.model, self.settings.precision) as model, autocast(self.settings.precision):
            rollout = self.sampler.sample_once(model, self.validation.ids)
            logprobs = response_logprobs(model, rollout.prompts, rollout.responses, temperature)
        with self.reference() as model, autocast(self.settings.precision):
            ref_logprobs = response_logprobs(model, rollout.prompts, rollout.responses, temperature)
        shaped = self.sampler.reward_shaper(rollout, update_statistics=False)
        kl = sum(float((p - q).sum()) for p, q in zip(logprobs, ref_logprobs, strict=True)) / len(logprobs)
        self.logger.log_samples(number, [
            {"question": row["question"], "answer": answer, "ended": ended, "reward": score}
            for row, answer, ended, score in islice(zip(
                self.validation.rows, rollout.decode(self.tokenizer), rollout.ended, shaped.rewards.tolist(),
                strict=True), LOGGED_SAMPLES)])
        score = self.sampler.reward_shaper.selection_score(shaped, kl, self.settings.kl_coefficient)
        return {"reward": float(shaped.rewards.mean()), "kl": kl, "selection_score": score, **shaped.metrics(),
                **rollout.metrics()}

    def _remove_folders(self, but: Path | None = None) -> None:
        for folder in self.out.glob(f"{FOLDER}*"):
            if folder != but:
                shutil.rmtree(folder)

    def _copy_weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def _load_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(tensors[name])
