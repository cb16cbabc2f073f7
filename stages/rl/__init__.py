"""PPO: rollouts, KL penalty, advantages, update."""
