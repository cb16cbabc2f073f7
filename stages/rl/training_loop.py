"""Run the outer loop: train, evaluate on held-out prompts, keep the best policy, save checkpoints, stop early.

All randomness of an iteration comes from generators seeded by (seed, purpose, iteration), so a resumed run equals the
uninterrupted one bit for bit.
"""

import hashlib
import signal
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from stages.distributed import group, sharding
from stages.generation.rollout import Rollout
from stages.generation.sampler import sample_in_batches
from stages.rl.early_stopping import EarlyStopping, StopRules
from stages.rl.policy_gradient_trainer import PolicyGradientTrainer
from stages.rl.trajectory import score_rollout
from stages.runtime.files import write_json
from stages.runtime.stage_lines import print_line
from stages.runtime.stopping import Stopped, StopRequest, deferred
from stages.stackexchange.prompt import PROMPT_PREFIX, PROMPT_SUFFIX, Template, parse_question
from stages.training import checkpoint
from stages.training.checkpoint_plan import KEEP_CHECKPOINTS, CheckpointTimer
from stages.training.loggers import TIMING, TrainingLogger

KL_ANNEAL_SHARE = 0.5  # of the iterations
FINAL_TEMPERATURES = "final_temperatures.json"
LOGGED_SAMPLES = 8  # validation prompts whose answers are logged at every evaluation


@dataclass(frozen=True)
class LoopSettings:
    """Settings of the outer loop, named as in the recipe's sections."""

    iterations: int
    rollout_prompts: int
    learning_rate_decay: bool
    kl_coefficient: float
    kl_anneal_factor: float
    evaluate_every_iterations: int
    save_every_iterations: int
    save_every_minutes: float | None
    seed: int
    critic_warmup_iterations: int
    responses_per_prompt: int
    prompt_template: Template
    final_temperatures: tuple[float, ...]


class TrainingLoop:
    """A run of a policy gradient method: the trainer, the iteration, and the best policy so far.

    best: the evaluation row of the best policy, with its `iteration` and, if not 1, its `final_temperature`. name:
        begins the lines it prints.
    """

    def __init__(
        self, trainer: PolicyGradientTrainer, settings: LoopSettings, stop_rules: StopRules, *,
        prompts: list[list[int]], validation_prompts: list[list[int]], tokenizer, logger: TrainingLogger, out: Path,
        name: str,
    ):
        self.trainer, self.settings, self.stopping = trainer, settings, EarlyStopping(stop_rules)
        self.prompts, self.validation_prompts, self.tokenizer = prompts, validation_prompts, tokenizer
        self.logger, self.out, self.name, self.iteration = logger, out, name, 0
        self.best: dict[str, float] = {}
        self.best_weights: dict[str, torch.Tensor] = {}

    def resume(self) -> bool:
        """Continue from the last checkpoint in `out`; return whether there is one."""
        saved = checkpoint.load_checkpoint(self.out)
        self.logger.resume(-1 if saved is None else saved[1]["iteration"])
        if saved is None:
            return False
        tensors, facts = saved
        self._load_weights(tensors)
        checkpoint.restore_optimizer_state(self.trainer.optimizer, tensors)
        self.best_weights = {name.removeprefix("best."): t for name, t in tensors.items() if name.startswith("best.")}
        self.iteration, self.best = facts["iteration"], facts["best"]
        self.stopping = EarlyStopping.restore(self.stopping.rules, facts["stopping"])
        self.trainer.restore(facts["trainer"])
        print_line(f"{self.name}: resumed at iteration {self.iteration}")
        return True

    def train(self) -> None:
        """Train until the last iteration or until a stop rule applies, then restore the best policy's weights, and
        choose its final temperature.

        On a signal, a checkpoint is saved after the iteration at work, and Stopped is raised.
        """
        if self.iteration == 0:
            self._evaluate()
        with deferred() as request:
            self._iterate(request)
        if self.stopping.reason:
            print_line(f"{self.name}: stopped: {self.stopping.reason}")
        self._load_weights(self.best_weights)
        self._choose_temperature()

    def next_prompts(self) -> list[list[int]]:
        """Return the prompts of the next iteration, one for each response: those to one prompt are together."""
        s = self.settings
        drawn = draw_prompt_indices(len(self.prompts), s.rollout_prompts, self.iteration, s.seed)
        return [self.prompts[i] for i in drawn for _ in range(s.responses_per_prompt)]

    def generator(self, purpose: str) -> torch.Generator:
        """Seed a generator by (seed, purpose, iteration)."""
        name = f"{self.settings.seed}/{purpose}/{self.iteration}".encode()
        return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name).digest()[:7], "big"))

    def _iterate(self, request: StopRequest) -> None:
        s, timer = self.settings, CheckpointTimer(self.settings.save_every_minutes)
        progress = self.logger.progress(self.name, s.iterations, done=self.iteration)
        while self.iteration < s.iterations and not self.stopping.reason:
            row = self._step()
            progress.advance(note=f"reward {row['reward']:.2f}, KL {row['kl']:.2f}, beta {row['beta']:.3f}")
            if self.iteration % s.evaluate_every_iterations == 0 or self.iteration == s.iterations:
                self._evaluate()
            is_last = self.iteration == s.iterations or bool(self.stopping.reason)
            has_signal, is_due = group.any_process_each([request.signal is not None, timer.is_due()])
            is_stop = has_signal and not is_last
            if is_stop or is_due or self.iteration % s.save_every_iterations == 0:
                self._save_checkpoint()
                timer.restart()
            if is_stop:
                raise Stopped(request.signal or signal.SIGTERM, f"iteration {self.iteration}")
        progress.finish(note=f"best at iteration {self.best['iteration']}")

    def _step(self) -> dict[str, float]:
        s = self.settings
        row, timing = self.trainer.step(
            self.next_prompts(), self.generator, learning_rate_factor(s, self.iteration),
            kl_factor=kl_factor(s, self.iteration), critic_only=self.iteration < s.critic_warmup_iterations)
        self.iteration += 1
        self.logger.log_metrics(self.iteration, row)
        self.logger.log_metrics(self.iteration, timing, TIMING)
        return row

    def _evaluate(self) -> None:
        """Evaluate on the validation prompts, with the same random numbers each time, and keep the best policy.

        The start model's answers, if they give the scale of the reward, are those of iteration 0.
        """
        trainer = self.trainer
        rollout = self._sample_validation()
        if self.iteration == 0:
            trainer.reward_shaper.measure_start(rollout)
            trainer.policy.rescale_values(*trainer.reward_shaper.score_units())
        row, rewards = self._measure(rollout)
        self.logger.log_metrics(self.iteration, {f"validation_{name}": value for name, value in row.items()})
        self._log_samples(rollout, rewards)
        if self.stopping.check_evaluation(row):
            self.best = {**row, "iteration": self.iteration}
            self.best_weights = {name: p.detach().clone() for name, p in trainer.policy.trainable_parameters().items()}

    def _choose_temperature(self) -> None:
        """Evaluate the best policy at each of `final_temperatures`, and keep the temperature with the best score.

        The start model keeps its own: a gain by temperature alone is none of training. Writes FINAL_TEMPERATURES.
        """
        if not self.settings.final_temperatures or self.best["iteration"] == 0:
            return
        policy, rows = self.trainer.policy, []
        for temperature in self.settings.final_temperatures:
            policy.final_temperature = temperature
            rows.append(self._measure(self._sample_validation())[0] | {"final_temperature": temperature})
        allowed = filter(self.stopping.is_within_kl, rows)
        self.best |= max([self.best, *allowed], key=lambda row: row["selection_score"])  # NaN is never above the first
        policy.final_temperature = self.best.get("final_temperature", 1.0)
        write_json(self.out / FINAL_TEMPERATURES, rows)
        print_line(f"{self.name}: the policy's logits are divided by {policy.final_temperature:g}; selection_score "
                   f"{self.best['selection_score']:.4g} on held-out prompts")

    def _sample_validation(self) -> Rollout:
        policy, sampling = self.trainer.policy, self.trainer.sampling
        with policy.merge_adapter() as model:
            return sample_in_batches(
                model, self.validation_prompts, self.settings.rollout_prompts * self.settings.responses_per_prompt,
                self.settings.seed,
                precision=policy.precision, max_new_tokens=sampling.max_response_tokens,
                temperature=sampling.temperature * policy.final_temperature, stop_ids=sampling.stop_ids)

    def _measure(self, rollout: Rollout) -> tuple[dict[str, float], torch.Tensor]:
        """Measure the policy by its answers to the validation prompts; return the evaluation row and the rewards [N].

        The coefficient of `selection_score` is `kl_coefficient`; that of `objective` is also annealed or adapted.
        """
        trainer = self.trainer
        shaped = trainer.reward_shaper(rollout, update_statistics=False)
        kl = score_rollout(trainer.policy, rollout, trainer.forward_prompts).sequence_kl()
        score = trainer.reward_shaper.selection_score(shaped, kl, self.settings.kl_coefficient)
        return {"reward": float(shaped.rewards.mean()), "kl": kl, "selection_score": score, **shaped.metrics(),
                **rollout.metrics()}, shaped.rewards

    def _log_samples(self, rollout: Rollout, rewards: torch.Tensor) -> None:
        samples = zip(rollout.prompts, rollout.decode(self.tokenizer), rollout.ended, rewards.tolist(), strict=True)
        self.logger.log_samples(self.iteration, [
            {"question": self._decode_question(prompt), "answer": answer, "ended": ended, "reward": reward}
            for prompt, answer, ended, reward in islice(samples, LOGGED_SAMPLES)])

    def _decode_question(self, prompt: list[int]) -> str:
        """Decode a prompt for display; a tokenizer that does not round-trip only looks odd here."""
        if self.settings.prompt_template != "question":
            return parse_question(self.tokenizer, prompt, self.settings.prompt_template)
        text = self.tokenizer.decode(prompt, skip_special_tokens=True)
        return text.removeprefix(PROMPT_PREFIX).removesuffix(PROMPT_SUFFIX)

    def _save_checkpoint(self) -> None:
        best = {f"best.{name}": tensor for name, tensor in self.best_weights.items()}
        weights = self.trainer.policy.trainable_parameters()
        optimizer = checkpoint.flatten_optimizer_state(self.trainer.optimizer)
        facts = {"iteration": self.iteration, "best": self.best, "stopping": self.stopping.state(),
                 "trainer": self.trainer.state()}
        tensors = {name: sharding.whole(tensor) for name, tensor in {**weights, **optimizer, **best}.items()}
        checkpoint.save_checkpoint(self.out, tensors, facts, number=self.iteration, keep=KEEP_CHECKPOINTS)

    @torch.no_grad()
    def _load_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.trainer.policy.trainable_parameters().items():
            parameter.copy_(sharding.split_like(tensors[name], parameter))


def draw_prompt_indices(prompts: int, batch_prompts: int, iteration: int, seed: int) -> list[int]:
    """Return the indices of an iteration's prompts: epochs over all `prompts`, each in a new order."""
    indices: list[int] = []
    for position in range(iteration * batch_prompts, (iteration + 1) * batch_prompts):
        epoch, index = divmod(position, prompts)
        if not indices or index == 0:
            order = torch.randperm(prompts, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
        indices.append(order[index])
    return indices


def learning_rate_factor(settings: LoopSettings, iteration: int) -> float:
    """Return the factor of the learning rate in an iteration, counted from 0: constant, or linear to 0 over the run."""
    return 1 - iteration / settings.iterations if settings.learning_rate_decay else 1.0


def kl_factor(settings: LoopSettings, iteration: int) -> float:
    """Return the factor of the KL coefficient in an iteration, counted from 0: `kl_anneal_factor` falling to 1.

    A larger penalty keeps the policy near its start while the critic still knows little.
    """
    remaining = 1 - iteration / (KL_ANNEAL_SHARE * settings.iterations)
    return settings.kl_anneal_factor ** max(0.0, remaining)
