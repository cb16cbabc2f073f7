"""Learn from preference pairs without a reward model: losses, log-probabilities of policy and reference (DPO, IPO)."""
