"""Which numbers of which history are drawn: stage, key, title. One line each."""


from stages.reporting.figures import Curves

SHARE = (-0.03, 1.03)  # from none to all
WHOLE_RANGE = {"sft-eos": SHARE, "ppo-eos": SHARE}
# stage: (file name, title, x, {label: key})
DRAWN = {
    "base": [("base-loss", "Base: training loss, nats a token", "step", {"loss": "loss"})],
    "sft": [("sft-loss", "SFT: training loss, nats a token", "step", {"loss": "loss"}),
            ("sft-perplexity", "SFT: perplexity of held-out answers", "step", {"perplexity": "validation_perplexity"}),
            ("sft-eos", "SFT: share of sampled answers that end", "step", {"validation": "validation_eos_rate"})],
    "reward": [("reward-loss", "Reward: training loss", "step", {"loss": "loss"}),
               ("reward-accuracy", "Reward: accuracy on validation pairs", "step",
                {"reward model": "validation_accuracy", "longer answer": "validation_longer_answer_accuracy"}),
               ("reward-calibration", "Reward: expected calibration error", "step",
                {"validation": "validation_calibration_error"})],
    "ppo": [("ppo-reward", "PPO: mean reward", "iteration", {"rollouts": "reward", "validation": "validation_reward"}),
            ("ppo-kl", "PPO: KL to SFT, nats a response", "iteration",
             {"rollouts": "kl", "validation": "validation_kl"}),
            ("ppo-entropy", "PPO: entropy, nats a token", "iteration", {"entropy": "entropy"}),
            ("ppo-length", "PPO: response length, tokens", "iteration",
             {"rollouts": "response_tokens", "validation": "validation_response_tokens"}),
            ("ppo-eos", "PPO: share ended by EOS", "iteration",
             {"rollouts": "eos_rate", "validation": "validation_eos_rate"}),
            ("ppo-perplexity", "PPO: perplexity of its responses under SFT", "iteration",
             {"rollouts": "reference_perplexity"}),
            ("ppo-clip", "PPO: clipped share of the tokens", "iteration", {"update": "clip_fraction"}),
            ("ppo-update-kl", "PPO: KL of old to new policy, nats a token", "iteration", {"update": "update_kl"}),
            ("ppo-value", "PPO: error of the value function", "iteration", {"value loss": "value_loss"}),
            ("ppo-explained", "PPO: share of the returns' variance that values explain", "iteration",
             {"explained variance": "explained_variance"}),
            ("ppo-beta", "PPO: weight of the KL in the reward", "iteration", {"beta": "beta"}),
            ("ppo-seconds", "PPO: seconds by phase", "iteration",
             {"rollout": "rollout_seconds", "score": "score_seconds", "reference, values": "experience_seconds",
              "update": "update_seconds"})],
}


def curves_of(stage: str, history: list[dict]) -> dict[str, Curves]:
    """File name to figure, for all that this history has numbers for."""
    found = {}
    for name, title, x, keys in DRAWN[stage]:
        lines = {label: [(row[x], row[key]) for row in history if x in row and key in row]
                 for label, key in keys.items()}
        if lines := {label: points for label, points in lines.items() if points}:
            found[name] = Curves(title, x, lines, WHOLE_RANGE.get(name))
    return found
