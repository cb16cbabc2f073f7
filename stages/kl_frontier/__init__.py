"""Ways to align, compared: scores against the KL to SFT, Gao et al.'s fits, and what can be told apart."""
