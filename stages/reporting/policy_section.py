"""All policies beside one another: the table, and reward against KL."""

from stages.evaluation.summary import best_of_n_policies, format_estimate, order_policies
from stages.render.html import Html, element, join_html, table
from stages.reporting.figures import Frontier

ESTIMATES = (("mean reward", "reward"), ("reward, minus SFT's (paired)", "reward_difference"),
             ("win rate against SFT", "win_rate"), ("KL to SFT (k1), nats a response", "kl_k1"),
             ("KL to SFT (k3), nats a response", "kl_k3"), ("gold", "gold"))
PLAIN = (("KL to SFT, log n - (n-1)/n", "kl_formula", ".3f"), ("entropy, nats a token", "entropy", ".3f"),
         ("perplexity under SFT", "perplexity_under_sft", ".3f"), ("mean length, tokens", "response_tokens", ".1f"),
         ("ended by EOS", "eos_rate", ".3f"), ("distinct-1", "distinct_1", ".3f"), ("distinct-2", "distinct_2", ".3f"),
         ("distinct-3", "distinct_3", ".3f"), ("distinct responses", "distinct_responses", ".3f"),
         ("repetition, share of repeated 4-grams", "repetition", ".4f"), ("with a code block", "code_share", ".3f"),
         ("code fences a response", "code_fences", ".3f"),
         ("correlation of reward with length", "reward_length_correlation", ".3f"))
NAMES = {"base": "base", "sft": "SFT", "ppo": "PPO"}


def name_of(policy: str) -> str:
    """'best_of_4' as 'best of 4'."""
    return NAMES.get(policy, policy.replace("_", " "))


def policies(metrics: dict) -> Html:
    """Every policy on the same prompts, a column each, and the best human answer as far as it has such numbers."""
    columns = order_policies(metrics["policies"]) | {"best human": metrics["best_human_answer"]}
    scores = [(name, {key: found.get("scores", {}).get(name) for key, found in columns.items()})
              for name in metrics["score_changes"]]
    rows = [[label, *(_estimate(found.get(name)) for found in columns.values())] for label, name in ESTIMATES]
    rows += [[name, *map(_estimate, found.values())] for name, found in scores]
    rows += [[label, *(_plain(found.get(name), form) for found in columns.values())] for label, name, form in PLAIN]
    rows = [row for row in rows if set(row[1:]) != {"–"}]
    return table(["measure", *map(name_of, columns)], rows, class_="numbers wide")


def frontier(policies: dict) -> Frontier:
    """Mean reward against KL to SFT, in nats a response: what each policy got for what it paid."""
    sft = policies["sft"]["reward"]
    line = {"SFT": (0.0, sft)} | {name_of(name): (found["kl_formula"], found["reward"])
                                  for name, found in best_of_n_policies(policies).items()}
    others = {name_of(name): (policies[name]["kl_k1"]["mean"], policies[name]["reward"])
              for name in ("ppo", "base") if name in policies}
    return Frontier("Reward against KL to SFT", "KL to SFT, nats a response", "mean reward", line, others)


def _estimate(found: dict | None) -> str:
    """The mean with its interval below it: seven policies stand beside one another."""
    if found is None:
        return "–"
    mean, _, interval = format_estimate(found).partition(" ")
    return join_html([mean, " ", element("small", interval)])


def _plain(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:z{form}}"
