"""PPO: make the SFT model's answers score higher, without leaving it too far.

    python -m stages.ppo --recipe configs/demo.yaml --policy results/demo/sft-merged \\
        --reward results/demo/reward-merged --pairs results/demo/pairs --out results/demo/ppo

Our own loop: sample responses, score them, take beta times the KL to the SFT model off, estimate advantages, update.
Everything random in an iteration is drawn from generators seeded by (seed, purpose, iteration), so that a resumed run
is bit for bit the uninterrupted one. The policy that did best on held-out prompts is kept.
"""

import hashlib
import sys
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import torch

from stages.generation.sampling_params import SamplingParams
from stages.modeling import families, torch_setup
from stages.modeling.tokenizer import load_tokenizer
from stages.recipe.ppo import Ppo
from stages.recipe.recipe import named
from stages.reward_modeling import consistency
from stages.reward_modeling.ensemble import Ensemble, members
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import member_folders
from stages.rl.checks import memory_plan
from stages.rl.checks.startup import run_checks
from stages.rl.collect_rollouts import collect_rollout
from stages.rl.early_stopping import EarlyStopping, StopRules
from stages.rl.kl import KlController
from stages.rl.load import load_policy, load_reward
from stages.rl.ppo_trainer import PPOTrainer
from stages.rl.rewards.shaping import RewardShaper, Shaping
from stages.rl.rewards.sources import RewardFunction, load_reward_function
from stages.rl.trajectory import Update
from stages.runtime.artifact import RunContext, write_json
from stages.stackexchange.pairs.table import questions_of
from stages.stackexchange.prompt import AFTER, BEFORE, prompt_ids
from stages.training import checkpoint, optimizers
from stages.training.loggers import TIMING, Logs, open_logs

SHOWN = 8  # validation prompts whose answers are kept at every evaluation
STARTUP = "startup.json"


def run(config: Ppo, out: Path, *, policy: Path, reward: Path, pairs: Path, beside: RunContext | None = None
        ) -> dict[str, float]:
    """Fill `out` with the policy (a PEFT adapter, or a whole model), its value_head.safetensors, the tokenizer,
    startup.json, and history, timing and samples .jsonl.

    reward: the merged reward model, or its adapter, which then shares the policy's base.
    """
    torch_setup.prepare()
    with open_logs(config.log_to, out, "ppo", beside, asdict(config), count="iteration") as logs:
        loop = _Loop(config, out, policy, reward, pairs, logs)
        loop.start_or_resume()
        loop.train()
    return loop.finish()


class _Loop:
    """The state of a run: the engine, the iteration, the best policy so far; and what is written down."""

    def __init__(self, config: Ppo, out: Path, policy: Path, reward: Path, pairs: Path, logs: Logs):
        self.config, self.out, self.logs, self.iteration = config, out, logs, 0
        self.tokenizer = load_tokenizer(policy)
        self.prompts, self.validation, self.dropped = _prompts(config, self.tokenizer, pairs)
        self.engine, self.sources = _engine(config, self.tokenizer, policy, reward)
        self.stopper = EarlyStopping(StopRules(**named(StopRules, config)))
        self.best: dict[str, float] = {}
        self.best_weights: dict[str, torch.Tensor] = {}

    def start_or_resume(self) -> None:
        """Go on from the last checkpoint, if there is one; else check that everything is as it should be."""
        found = checkpoint.load(self.out)
        self.logs.resume(-1 if found is None else found[1]["iteration"])
        if found is None:
            self._check()
            return
        tensors, facts = found
        self._load(tensors)
        checkpoint.restore_optimizer(self.engine.optimizer, tensors)
        self.best_weights = {name.removeprefix("best."): t for name, t in tensors.items() if name.startswith("best.")}
        self.iteration, self.best = facts["iteration"], facts["best"]
        self.stopper = EarlyStopping(self.stopper.rules, **facts["stopper"])
        self.engine.restore(facts["engine"])
        _say(f"resumed at iteration {self.iteration}")

    def train(self) -> None:
        c = self.config
        if self.iteration == 0:
            self._evaluate()
        progress = self.logs.progress("ppo", c.iterations, done=self.iteration)
        while self.iteration < c.iterations and not self.stopper.reason:
            row = self._iterate()
            progress.advance(note=f"reward {row['reward']:.2f}, KL {row['kl']:.2f}, beta {row['beta']:.3f}")
            if self.iteration % c.evaluate_every_iterations == 0 or self.iteration == c.iterations:
                self._evaluate()
            if self.iteration % c.save_every_iterations == 0:
                self._save()
        progress.finish(note=f"best at iteration {self.best['iteration']}")
        if self.stopper.reason:
            _say(f"stopped: {self.stopper.reason}")

    def finish(self) -> dict[str, float]:
        """Write the best policy as the artifact."""
        self._load(self.best_weights)
        self.engine.policy.save(self.out, self.tokenizer)
        checkpoint.remove(self.out)
        return {
            "best_iteration": self.best["iteration"],
            "iterations": self.iteration,
            "stopped_early": bool(self.stopper.reason),
            "validation_reward": self.best["reward"],
            "validation_kl": self.best["kl"],
            "prompts": len(self.prompts),
            "prompts_over_length": self.dropped,
        }

    def _check(self) -> None:
        """Before the first update: the plan, the memory it takes, and proof that the parts fit together."""
        c, engine = self.config, self.engine
        minibatches = c.rollout_prompts // c.minibatch_prompts
        _say(
            f"{len(self.prompts)} prompts; {c.iterations} iterations x {c.rollout_prompts} prompts x {c.epochs} epochs"
            f" x {minibatches} minibatches of {c.minibatch_prompts} = {c.iterations * c.epochs * minibatches} optimiser"
            f" steps; {c.minibatch_prompts // c.microbatch_prompts} microbatches of {c.microbatch_prompts} each"
        )
        longest = sorted(self.prompts, key=len)[-c.rollout_prompts :]
        scorers = {source.name: source.score for source in self.sources}
        for line in memory_plan.memory_plan(engine, c.optimizer, longest, scorers):
            _say(line)
        first = [self.prompts[i] for i in self._prompt_order()[: c.microbatch_prompts]]
        rollout = collect_rollout(engine.policy, first, engine.sampling, self._generator("startup"), c.microbatch_prompts)
        classifiers = memory_plan.classifiers(self.sources, self.tokenizer)
        measured = run_checks(engine.policy, rollout, self.tokenizer, classifiers, clip_range=c.clip_range,
                              microbatch_prompts=c.microbatch_prompts, say=_say)
        engine.keep_rollout_log_p = measured.keep_rollout_log_p
        write_json(self.out / STARTUP, asdict(measured))

    def _iterate(self) -> dict[str, float]:
        row, timing = self.engine.iterate(
            [self.prompts[i] for i in self._prompt_order()],
            self._generator,
            self._learning_rate(),
            only_values=self.iteration < self.config.critic_warmup_iterations,
        )
        self.iteration += 1
        self.stopper.updated(row, row.pop("skips"))
        self.logs.numbers(self.iteration, row)
        self.logs.numbers(self.iteration, timing, TIMING)
        return row

    def _evaluate(self) -> None:
        """Held-out prompts, the same random numbers each time: keep the best policy, stop one that went too far."""
        c = self.config
        row, rollout, rewards = self.engine.held_out(self.validation, c.rollout_prompts, c.seed, c.kl_coefficient)
        self.logs.numbers(self.iteration, {f"validation_{name}": value for name, value in row.items()})
        answered = zip(self.validation, rollout.texts(self.tokenizer), rollout.ended, rewards.tolist(), strict=True)
        self.logs.samples(self.iteration, [
            {"question": self._question(prompt), "answer": text, "ended": ended, "reward": reward}
            for prompt, text, ended, reward in islice(answered, SHOWN)])
        if self.stopper.evaluated(row):
            self.best = {**row, "iteration": self.iteration}
            self.best_weights = {name: p.detach().clone() for name, p in self.engine.policy.trained().items()}

    def _question(self, prompt: list[int]) -> str:
        """For eyes: a tokenizer that does not give back what it was given only looks odd here."""
        return self.tokenizer.decode(prompt, skip_special_tokens=True).removeprefix(BEFORE).removesuffix(AFTER)

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
        trained, optimizer = self.engine.policy.trained(), checkpoint.optimizer_tensors(self.engine.optimizer)
        facts = {"iteration": self.iteration, "best": self.best, "stopper": self.stopper.state(),
                 "engine": self.engine.state()}
        checkpoint.save(self.out, {**trained, **optimizer, **best}, facts, number=self.iteration,
                        keep=self.config.keep_checkpoints)

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.engine.policy.trained().items():
                parameter.copy_(tensors[name])


def _engine(config: Ppo, tokenizer, policy: Path, reward: Path) -> tuple[PPOTrainer, list[RewardFunction]]:
    """Everything that an iteration uses, loaded; ValueError for lengths that a model has no positions for."""
    torch.manual_seed(config.seed)
    learner = load_policy(
        policy, reward, tune=config.tune, value_model=config.value_model, lora=asdict(config.lora),
        precision=config.precision, temperature=config.temperature,
        gradient_checkpointing=config.gradient_checkpointing, compiled=config.compile)
    longest = config.max_prompt_tokens + config.max_response_tokens
    families.check_length(learner.causal.config, longest)

    def reward_model() -> Scorer | Ensemble:
        scorer = load_reward(reward, learner, policy, config.forward_prompts, config.spread_penalty)
        for member, folder in zip(members(scorer), member_folders(reward), strict=True):
            families.check_length(member.model.config, longest)
            found = consistency.agreement(member, folder)
            _say(f"check  reward model  {consistency.check(found, folder, config.min_reward_correlation)}")
        return scorer

    sources = [load_reward_function(**asdict(entry), reward_model=reward_model, precision=config.precision)
               for entry in config.rewards]
    stop_ids = (tokenizer.eos_token_id,) if config.stop_ids is None else config.stop_ids
    return PPOTrainer(
        policy=learner,
        rewards=RewardShaper(sources, tokenizer, Shaping(**named(Shaping, config))),
        optimizer=optimizers.build(
            config.optimizer, learner.trained().values(), learning_rate=config.learning_rate,
            epsilon=config.adam_epsilon, weight_decay=config.weight_decay, in_backward=config.optimizer_in_backward),
        controller=KlController(config.kl_coefficient, config.kl_target_nats, config.kl_horizon_responses),
        sampling=replace(SamplingParams(**named(SamplingParams, config)), stop_ids=stop_ids),
        update=Update(**named(Update, config)),
    ), sources


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


def _say(text: str) -> None:
    print(f"ppo: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    from stages.runtime.command import main

    main(run)
