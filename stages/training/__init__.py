"""The training loop around Transformers' Trainer, checkpoints, optimizers, memory and loggers."""
