"""Train with PPO: rollouts, KL penalty, advantages, update."""
