"""Top-k and top-p sampling with the filtered distribution scored as well.

A filter that only the sampler knew would bias every ratio and every KL: the tokens that it kept are remembered, and
old, new and reference log-probabilities are all of the softmax over these (the rest has probability 0 under each).
Shapes: M tokens, V vocabulary, K tokens kept at most.
"""



