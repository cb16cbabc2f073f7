"""Models, losses, rollouts, rewards. Takes numbers and tensors, never a recipe."""
