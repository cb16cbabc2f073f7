"""Say in words which policies can be told apart, and which cannot.

Two policies are told apart where the whole 95 % interval of their paired difference lies on one side of 0.
"""

from stages.evaluation.summary import change_direction, format_estimate, format_percent, join_words

MEASURES = {"gold": "gold score", "judge": "judge's score", "reward": "learnt reward"}
SOURCES = {
    "gold": "The gold score knows the truth, and no method was trained on it.",
    "judge": "Nobody knows the truth on this site. In its place stands the score of a judge: a held-out reward model, "
             "of another seed and other questions, that ranks {accuracy} of the held-out pairs right. It shares its "
             "architecture and voters with the reward model, so both can err in the same way.",
    "reward": "Nobody knows the truth on this site, and there is no judge. The learnt reward is what the methods were "
              "trained to raise: it cannot say which one is better."}


def describe_headline(metrics: dict) -> str:
    """Say in one line which policy has the highest score, and whether it is told apart from the other families."""
    first, *others = metrics["best"].values()
    undecided = [_label(metrics, row["against"]) for row in metrics["best_differences"]
                 if row["policy"] == first and change_direction(row["difference"]) <= 0]
    start = f"{_label(metrics, first)} has the highest {MEASURES[metrics['measure']]}"
    if not others:
        return start
    if not undecided:
        return f"{start}, above each other method's best"
    return f"{start}; it cannot be told apart from {join_words(undecided)}"


def describe_paragraphs(metrics: dict) -> dict[str, str]:
    """Return what can and cannot be said, by question."""
    return {"What is compared?": _describe_data(metrics),
            "Which policies are better than SFT?": _describe_against_sft(metrics),
            "Which method is best?": _describe_best(metrics),
            "And at equal KL?": _describe_equal_kl(metrics),
            "What can these intervals not say?": _describe_limits(metrics)}


def _describe_data(metrics: dict) -> str:
    """Say whose score is compared, and on what."""
    seeds, accuracy = len(metrics["seeds"]), metrics["judge_accuracy"]
    source = SOURCES[metrics["measure"]].format(accuracy=format_percent(accuracy) if accuracy else "an unknown share")
    of_seed, over_seeds = ("of a seed ", f" in {seeds} seeds") if seeds > 1 else ("", "")
    return (f"{source} All policies {of_seed}answered the same held-out questions, "
            f"{metrics['questions']:,}{over_seeds}, at temperature {metrics['temperature']:g}. Two policies are told "
            f"apart where the whole 95\u00a0% interval of their paired difference lies on one side of 0.")


def _describe_against_sft(metrics: dict) -> str:
    gains = {name: policy["gains"][metrics["measure"]] for name, policy in metrics["policies"].items()}
    return _compare(metrics, {name: gain for name, gain in gains.items() if gain}, "SFT")


def _describe_best(metrics: dict) -> str:
    """Compare the best policy of each method with the best of all, and name other pairs that are not told apart."""
    first, *others = metrics["best"].values()
    gain = metrics["policies"][first]["gains"][metrics["measure"]]
    words = (f"Of each method we take the policy with the highest {MEASURES[metrics['measure']]}. The highest of all "
             f"is {_label(metrics, first)}, {format_estimate(gain, signed=True)} above SFT.")
    undecided = [row for row in metrics["best_differences"] if change_direction(row["difference"]) <= 0]
    near = [row["against"] for row in undecided if row["policy"] == first]
    far = [name for name in others if name not in near]
    pairs = [f"{_label(metrics, row['policy'])} from {_label(metrics, row['against'])}" for row in undecided
             if row["policy"] != first]
    sentences = {"It is told apart from {}.": [_label(metrics, name) for name in far],
                 "It cannot be told apart from {}.": [_label(metrics, name) for name in near],
                 "Of the others, these cannot be told apart either: {}.": pairs}
    return " ".join([words, *(sentence.format(join_words(names)) for sentence, names in sentences.items() if names)])


def _describe_equal_kl(metrics: dict) -> str:
    """Say, for each curve, which policies lie above it, below it, or cannot be told apart from it."""
    parts = []
    for family in list_curves(metrics):
        rows = {row["policy"]: row[metrics["measure"]]["difference"]
                for row in metrics["equal_kl"] if row["against"] == family}
        parts.append(_compare(metrics, rows, f"{metrics['families'][family]} at the same KL"))
    return " ".join(parts) or "No policy has a KL within the range of another method's curve, so nothing can be said."


def list_curves(metrics: dict) -> list[str]:
    """List the families that policies are compared with at equal KL."""
    return [family for family in metrics["families"] if family in {row["against"] for row in metrics["equal_kl"]}]


def _describe_limits(metrics: dict) -> str:
    seeds, count = len(metrics["seeds"]), len(metrics["policies"]) + len(metrics["equal_kl"])
    scope = ("They are by question, of one training of each policy. They do not contain what another seed would "
             "change: where policies are told apart, the trained models are, not yet the methods." if seeds == 1 else
             f"They contain the questions and {seeds} seeds: the half width is the root of the sum of squares of both. "
             f"Few seeds make them wide.")
    return (f"{scope} There are {count} comparisons with SFT and at equal KL, each at 95\u00a0%: about "
            f"{0.05 * count:.0f} would seem told apart if no policy differed from another. Between the best of each "
            f"method, which are chosen by the same questions, the intervals are wider (Bonferroni); the choice still "
            f"flatters methods with several policies.")


def _compare(metrics: dict, differences: dict[str, dict | None], reference: str) -> str:
    """Say which policies are better and worse than the reference by their differences, and which not told apart."""
    sentences = {1: "Better than", -1: "Worse than", 0: "Not told apart from"}
    names = {direction: [_label(metrics, name) for name, difference in differences.items()
                         if change_direction(difference) == direction] for direction in sentences}
    return " ".join(f"{words} {reference}: {join_words(names[direction])}." for direction, words in sentences.items()
                    if names[direction])


def _label(metrics: dict, name: str) -> str:
    return metrics["policies"][name]["label"]
