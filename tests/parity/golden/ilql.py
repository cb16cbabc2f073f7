"""Golden values of ILQL's loss, target synchronisation and shifted policy: the formulas of trlX (CarperAI/trlx,
trlx/models/modeling_ilql.py: ILQLConfig.loss, ILQLHeads, generate) in plain float64 loops over rows, tokens and ids.

No code of the peer is called or copied: trlX does not run with a current torch. Standard library only.

    python tests/parity/golden/ilql.py
"""

import json
import math
import random
from pathlib import Path

LENGTHS, VOCABULARY, HEADS = (4, 1, 6), 5, 2
SETTINGS = {"gamma": 0.9, "tau": 0.7, "cql_scale": 0.1, "awac_scale": 0.8, "awac_beta": 0.6}
RATE, BETA = 0.3, 4.0


def draw_inputs() -> dict:
    """Draw rows of tokens with logits [V], Q [H][V], target Q [H][V] and V of each state, and a score per row."""
    rng = random.Random(20220623)
    normal = lambda *shape: [normal(*shape[1:]) for _ in range(shape[0])] if shape else rng.gauss(0, 1)  # noqa: E731
    rows = []
    for length in LENGTHS:
        rows.append({
            "actions": [rng.randrange(VOCABULARY) for _ in range(length)], "logits": normal(length, VOCABULARY),
            "q": normal(length, HEADS, VOCABULARY), "target_q": normal(length, HEADS, VOCABULARY),
            # one state more than actions: V of the last one is never used
            "v": normal(length + 1), "score": rng.choice([0, 1, 5, 9])})
    return {"rows": rows, "head": normal(6), "target": normal(6)}


def log_softmax(values: list[float]) -> list[float]:
    largest = max(values)
    total = math.log(sum(math.exp(value - largest) for value in values)) + largest
    return [value - total for value in values]


def normalise(scores: list[float]) -> list[float]:
    mean = sum(scores) / len(scores)
    std = math.sqrt(sum((score - mean) ** 2 for score in scores) / (len(scores) - 1))
    return [(score - mean) / std for score in scores]


def losses(inputs: dict, s: dict) -> dict:
    """Sum each term of the loss over all actions and divide by their number."""
    sums = dict.fromkeys(("td", "expectile", "cql", "awac"), 0.0)
    returns = normalise([row["score"] for row in inputs["rows"]])
    for row, final in zip(inputs["rows"], returns, strict=True):
        for t, action in enumerate(row["actions"]):
            done = t == len(row["actions"]) - 1
            target = (final if done else 0.0) + s["gamma"] * (0.0 if done else row["v"][t + 1])
            target_q = min(row["target_q"][t][head][action] for head in range(HEADS))
            for head in range(HEADS):
                q = row["q"][t][head]
                sums["td"] += (q[action] - target) ** 2
                sums["cql"] -= log_softmax(q)[action]
            gap = target_q - row["v"][t]
            sums["expectile"] += (s["tau"] if gap >= 0 else 1 - s["tau"]) * gap**2
            sums["awac"] -= math.exp(s["awac_beta"] * gap) * log_softmax(row["logits"][t])[action]
    means = {name: value / sum(LENGTHS) for name, value in sums.items()}
    means["loss"] = (means["td"] + means["expectile"] + s["cql_scale"] * means["cql"]
                     + s["awac_scale"] * means["awac"])
    return means


def shifted_policy(inputs: dict) -> list[list[float]]:
    """Compute the log-probabilities that are sampled from, of every token in the order of the rows."""
    policies = []
    for row in inputs["rows"]:
        for t in range(len(row["actions"])):
            own = log_softmax(row["logits"][t])
            policies.append(log_softmax([
                own[i] + BETA * (min(row["target_q"][t][head][i] for head in range(HEADS)) - row["v"][t])
                for i in range(VOCABULARY)]))
    return policies


if __name__ == "__main__":
    drawn = draw_inputs()
    content = {
        "settings": SETTINGS, "rate": RATE, "beta": BETA, "inputs": drawn,
        "returns": normalise([row["score"] for row in drawn["rows"]]), "losses": losses(drawn, SETTINGS),
        "shifted_logprobs": shifted_policy(drawn),
        "synchronised": [RATE * a + (1 - RATE) * b for a, b in zip(drawn["head"], drawn["target"], strict=True)]}
    Path(__file__).with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
