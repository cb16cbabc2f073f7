"""PPO: make the SFT model's answers score higher, without leaving it too far.

    python -m stages.ppo --recipe configs/demo.yaml --policy results/demo/sft-merged \\
        --reward results/demo/reward-merged --pairs results/demo/pairs --out results/demo/ppo

Our own loop: sample responses, score them with the reward model, take beta times the KL to the SFT model off, estimate
advantages, update. Everything random in an iteration is drawn from generators seeded by (seed, purpose, iteration), so
that a resumed run is bit for bit the uninterrupted one. The policy that did best on held-out prompts is kept.
"""

import hashlib
import itertools
import sys
from dataclasses import asdict, fields
from pathlib import Path
from time import monotonic

import torch
from safetensors.torch import save_file

from stages.learning import checkpoint, models
from stages.learning.advantages import adapted_beta
from stages.learning.journal import append, keep_until
from stages.learning.policy import Policy
from stages.learning.ppo import Update, experience, ppo_epochs
from stages.learning.reward_model import Scorer
from stages.learning.rollout import Rollout, sample, sample_in_batches
from stages.learning.weights import save_adapter
from stages.plumbing.progress import Progress
from stages.recipe import Ppo
from stages.text.tables import questions_of
from stages.text.template import prompt_ids

SHOWN = 8  # validation prompts whose answers are kept at every evaluation
KL_ZERO = 1e-4  # nats a response that rounding may make of an exact 0


def run(config: Ppo, out: Path, *, policy: Path, reward: Path, pairs: Path) -> dict[str, float]:
    """Fill `out` with a PEFT adapter, value_head.safetensors, the tokenizer, and history, timing, samples .jsonl."""
    loop = _Loop(config, out, policy, reward, pairs)
    loop.resume()
    loop.train()
    return loop.finish()


class _Loop:
    """The state of a run: policy, optimiser, beta, iteration, the best so far; and what is written down."""

    def __init__(self, config: Ppo, out: Path, policy: Path, reward: Path, pairs: Path):
        self.config, self.out = config, out
        self.tokenizer = models.load_tokenizer(policy)
        self.prompts, self.validation, self.dropped = _prompts(config, self.tokenizer, pairs)
        torch.manual_seed(config.seed)
        model = models.load_causal(policy, config.precision)
        models.check_special_tokens(self.tokenizer, model.config)
        model = models.add_lora(model, precision=config.precision, **asdict(config.lora))
        self.policy = Policy(model, config.temperature, config.precision)
        self.scorer = Scorer(models.load_scorer(reward, config.precision), config.precision)
        self.optimizer = torch.optim.Adam(self.policy.trained().values(), lr=config.learning_rate, eps=1e-5)
        self.update = Update(**{field.name: getattr(config, field.name) for field in fields(Update)})
        self.beta, self.iteration, self.stopped = config.kl_coefficient, 0, False
        self.best = {"objective": float("-inf"), "iteration": 0}
        self.best_weights: dict[str, torch.Tensor] = {}

    def train(self) -> None:
        if self.iteration == 0:
            self._say_plan()
            self._evaluate()
        progress = Progress("ppo", self.config.iterations, "iterations", done=self.iteration)
        while self.iteration < self.config.iterations and not self.stopped:
            row = self._iterate()
            progress.advance(note=f"reward {row['reward']:.2f}, KL {row['kl']:.2f}, beta {row['beta']:.3f}")
            if self.iteration % self.config.evaluate_every_iterations == 0 or self.iteration == self.config.iterations:
                self._evaluate()
            if self.iteration % self.config.save_every_iterations == 0:
                self._save()
        progress.finish(note=f"best at iteration {self.best['iteration']}")

    def _iterate(self) -> dict[str, float]:
        """Rollout, reward, experience, update, controller: one iteration."""
        clock = [monotonic()]
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        rollout = self._sample([self.prompts[i] for i in self._prompt_order()])
        clock.append(monotonic())
        scores = self._scores(rollout)
        clock.append(monotonic())
        seen = experience(self.policy, rollout, scores, self.beta, self.update)
        kl = seen.sequence_kl()
        if self.iteration == 0:
            _check_start(kl)
        clock.append(monotonic())
        statistics = ppo_epochs(self.policy, self.optimizer, seen, self.update, self._generator("minibatches"))
        clock.append(monotonic())
        self.iteration += 1
        row = {
            "iteration": self.iteration,
            "reward": float(scores.mean()),
            "reward_std": float(scores.std()),
            "kl": kl,
            "beta": self.beta,
            "objective": float(scores.mean()) - self.beta * kl,
            "entropy": seen.mean_entropy(),
            "explained_variance": seen.explained_variance(),
            "learning_rate": self._learning_rate(),
            **rollout.numbers(),
            **statistics,
        }
        if self.config.kl_target_nats is not None:
            self.beta = adapted_beta(
                self.beta, kl, self.config.kl_target_nats, self.config.kl_horizon_responses, len(scores)
            )
        append(self.out / "history.jsonl", row)
        seconds = dict(
            zip(
                ("rollout", "score", "experience", "update"),
                (round(b - a, 3) for a, b in itertools.pairwise(clock)),
                strict=True,
            )
        )
        append(
            self.out / "timing.jsonl",
            {"iteration": self.iteration, **seconds, "tokens": sum(map(len, rollout.responses))},
        )
        return row

    def _evaluate(self) -> None:
        """Held-out prompts, the same random numbers each time: keep the best policy, stop one that went too far."""
        rollout = sample_in_batches(
            self.policy.model,
            self.validation,
            self.config.rollout_prompts,
            seed=self.config.seed,
            **self._sampling(),
        )
        scores = self._scores(rollout)
        kl = experience(self.policy, rollout, scores, 0.0, self.update).sequence_kl()
        row = {
            "iteration": self.iteration,
            "reward": float(scores.mean()),
            "kl": kl,
            "objective": float(scores.mean()) - self.config.kl_coefficient * kl,
            **rollout.numbers(),
        }
        append(self.out / "history.jsonl", {f"validation_{k}" if k != "iteration" else k: v for k, v in row.items()})
        texts = rollout.texts(self.tokenizer)
        for prompt, text, score in list(zip(self.validation, texts, scores.tolist(), strict=True))[:SHOWN]:
            append(
                self.out / "samples.jsonl",
                {
                    "iteration": self.iteration,
                    "prompt": self.tokenizer.decode(prompt, skip_special_tokens=True),
                    "response": text,
                    "reward": score,
                },
            )
        self.stopped = kl > self.config.max_kl_nats
        if not self.stopped and row["objective"] > self.best["objective"]:
            self.best = {**row, "iteration": self.iteration}
            self.best_weights = {name: p.detach().clone() for name, p in self.policy.trained().items()}

    def _scores(self, rollout: Rollout) -> torch.Tensor:
        """Rewards [rows] of the ids as sampled, clipped; a response that did not end pays."""
        rewards = self.scorer(rollout.prompts, rollout.responses)
        if self.config.reward_clip is not None:
            rewards = rewards.clamp(-self.config.reward_clip, self.config.reward_clip)
        ended = torch.tensor(rollout.ended, dtype=torch.float32)
        return rewards - self.config.missing_eos_penalty * (1 - ended)

    def _sample(self, prompts: list[list[int]]) -> Rollout:
        return sample(self.policy.model, prompts, generator=self._generator("sampling"), **self._sampling())

    def _sampling(self) -> dict:
        return {
            "max_new_tokens": self.config.max_response_tokens,
            "temperature": self.config.temperature,
            "eos_id": self.tokenizer.eos_token_id,
            "precision": self.config.precision,
        }

    def _generator(self, purpose: str) -> torch.Generator:
        name = f"{self.config.seed}/{purpose}/{self.iteration}".encode()
        return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name).digest()[:7], "big"))

    def _prompt_order(self) -> list[int]:
        """Prompts of this iteration: pass after pass over all of them, each pass in a fresh order."""
        start, found = self.iteration * self.config.rollout_prompts, []
        for position in range(start, start + self.config.rollout_prompts):
            epoch, place = divmod(position, len(self.prompts))
            if not found or place == 0:
                generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + epoch)
                order = torch.randperm(len(self.prompts), generator=generator).tolist()
            found.append(order[place])
        return found

    def _learning_rate(self) -> float:
        left = 1 - self.iteration / self.config.iterations if self.config.learning_rate_decay else 1.0
        return self.config.learning_rate * left

    def _save(self) -> None:
        best = {f"best.{name}": tensor for name, tensor in self.best_weights.items()}
        checkpoint.save(
            self.out,
            {**self.policy.trained(), **checkpoint.optimizer_tensors(self.optimizer), **best},
            {"iteration": self.iteration, "beta": self.beta, "best": self.best, "stopped": self.stopped},
        )

    def resume(self) -> None:
        """Go on from the last checkpoint, if there is one: weights, optimiser, beta, best, the files up to it."""
        found = checkpoint.load(self.out)
        if found is None:
            for name in ("history", "timing", "samples"):
                (self.out / f"{name}.jsonl").unlink(missing_ok=True)
            return
        tensors, facts = found
        self._load(tensors)
        checkpoint.restore_optimizer(self.optimizer, tensors)
        self.best_weights = {name.removeprefix("best."): t for name, t in tensors.items() if name.startswith("best.")}
        self.iteration, self.beta = facts["iteration"], facts["beta"]
        self.best, self.stopped = facts["best"], facts["stopped"]
        for name in ("history", "timing", "samples"):
            keep_until(self.out / f"{name}.jsonl", self.iteration)
        _say(f"resumed at iteration {self.iteration}")

    def finish(self) -> dict[str, float]:
        """Write the best policy as the artifact."""
        self._load(self.best_weights)
        save_adapter(self.policy.model, self.tokenizer, self.out)
        save_file(
            {name: t.detach().cpu().contiguous() for name, t in self.policy.value_head.state_dict().items()},
            self.out / "value_head.safetensors",
        )
        checkpoint.remove(self.out)
        return {
            "best_iteration": self.best["iteration"],
            "iterations": self.iteration,
            "stopped_by_kl": self.stopped,
            "validation_reward": self.best["reward"],
            "validation_kl": self.best["kl"],
            "prompts": len(self.prompts),
            "prompts_over_length": self.dropped,
        }

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.policy.trained().items():
                parameter.copy_(tensors[name])

    def _say_plan(self) -> None:
        c = self.config
        minibatches = c.rollout_prompts // c.minibatch_prompts
        _say(
            f"{len(self.prompts)} prompts; {c.iterations} iterations of {c.rollout_prompts} prompts, {c.epochs} epochs"
            f" x {minibatches} minibatches = {c.iterations * c.epochs * minibatches} optimiser steps"
        )


def _prompts(config: Ppo, tokenizer, pairs: Path) -> tuple[list[list[int]], list[list[int]], int]:
    """Prompts of the rl split for training and for validation, each question once; how many were over-long."""
    every = [prompt_ids(tokenizer, row["question"]) for row in questions_of(pairs, "rl")]
    fitting = [prompt for prompt in every if len(prompt) <= config.max_prompt_tokens]
    held = min(config.validation_prompts, len(fitting) // 4)  # a small site keeps most of its prompts for training
    if not held:
        raise ValueError(
            f"{pairs} has {len(fitting)} prompts of at most {config.max_prompt_tokens} tokens in its rl split "
            f"({len(every) - len(fitting)} are longer): ppo needs at least 4"
        )
    order = torch.randperm(len(fitting), generator=torch.Generator().manual_seed(config.seed)).tolist()
    mixed = [fitting[i] for i in order]
    return mixed[held:], mixed[:held], len(every) - len(fitting)


def _check_start(kl: float) -> None:
    """A fresh adapter is the reference: any KL at the first rollout is a fault, not a number to train on."""
    _say(f"KL to the SFT model before the first update: {kl:.2g}")
    if not abs(kl) < KL_ZERO:
        raise ValueError(
            f"the policy starts {kl:.3g} nats from its reference instead of 0: the adapter is not fresh, or "
            f"the precision is too low to tell them apart"
        )


def _say(text: str) -> None:
    print(f"ppo: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    from stages.plumbing.command import main

    main(run)
