"""Train with Transformers' Trainer: loop, checkpoints, optimizers, memory and loggers."""
