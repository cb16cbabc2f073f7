"""What policies are evaluated on: a dump's held-out questions and pairs, or a user's own prompts and reward."""
