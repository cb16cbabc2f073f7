"""Say a verdict in three short sentences; the paragraphs with all numbers are folded below them."""

from stages.evaluation.summary import (
    BEST,
    against_start,
    change_direction,
    choose_measure,
    difference_at_best,
    display_name,
    mean_score,
    samples_per_answer,
    strongest_best_of_n,
)
from stages.evaluation.tasks.wording import find_wording, start_model
from stages.render.units import format_duration

MEASURES = {"gold": "gold, the score that knows the truth", "judge": "the score of a held-out reward model"}
AGAINST_START = {1: "beats", 0: "cannot be told apart from", -1: "is worse than"}
AGAINST_POLICY = {1: "worse", 0: "as well", -1: "better"}
HACKING = {"flagged": "Flagged as reward hacking", "watch": "Not flagged as reward hacking, but worth watching"}


def list_policy_bullets(metrics: dict, policy: str) -> tuple[str, ...]:
    """Say how a policy compares with SFT and with best-of-n, each at its best temperature, and whether it cheated."""
    return tuple(filter(None, (_against_start(metrics, policy), _against_best_of_n(metrics, policy),
                               _hacking(metrics, policy))))


def list_run_bullets(metrics: dict, manifests: dict[str, dict]) -> tuple[str, ...]:
    """Say what the run was made from, how good its reward model is, and what it took."""
    counts = manifests.get("pairs", {}).get("metrics", {}) | manifests.get("posts", {}).get("metrics", {})
    seconds = sum(manifest["seconds"] for manifest in manifests.values())
    peak = max(manifest["peak_memory_mib"] for manifest in manifests.values())
    source = (f"{counts['questions']:,} questions with answers gave {counts['pairs']:,} preference pairs."
              if {"questions", "pairs"} <= counts.keys() else None)
    return tuple(filter(None, (
        source, _reward_model(metrics.get("reward_model")),
        f"All stages took {format_duration(seconds)} and at most {peak:,} MiB.")))


def _against_start(metrics: dict, policy: str) -> str:
    against, wording = against_start(metrics["at_best"][policy]), find_wording(metrics["policies"])
    measure = choose_measure(against)
    before, after = (mean_score(metrics["policies"][f"{name}{BEST}"], measure)
                     for name in (start_model(metrics["policies"]), policy))
    how = AGAINST_START[change_direction(difference_at_best(against, measure))]
    fell = change_direction(against["gold"].get("correct")) < 0
    return (f"Each at its best temperature, {display_name(policy)} {how} {wording.start} in "
            f"{MEASURES.get(measure, wording.measure)}: {before:z.2f} → {after:z.2f}"
            f"{', but correctness alone fell' if fell else ''}.")


def _against_best_of_n(metrics: dict, policy: str) -> str | None:
    """Compare with the strongest best-of-n, which costs as many samples an answer as its name says."""
    against = metrics["at_best"][policy]
    best_of_n = strongest_best_of_n(against)
    if best_of_n is None:
        return None
    measure = choose_measure(against_start(against))
    how = AGAINST_POLICY[change_direction(difference_at_best(against[best_of_n], measure))]
    return (f"The best of {samples_per_answer(best_of_n)} answers of {find_wording(metrics['policies']).start} by the "
            f"same reward does {how}: {mean_score(metrics['policies'][best_of_n], measure):z.2f}.")


def _hacking(metrics: dict, policy: str) -> str:
    hacking = metrics["hacking"][policy]
    return (f"{HACKING.get(hacking['verdict'], 'Not flagged as reward hacking')}: {len(hacking['moved'])} of "
            f"{len(hacking['monitors'])} monitors moved for the worse.")


def _reward_model(reward: dict | None) -> str | None:
    if reward is None:
        return None
    if not reward["best_cheap_baseline"]:
        return "The reward model could not be judged: there is no held-out pair."
    ours, baseline = reward["accuracy"], reward["baselines"][reward["best_cheap_baseline"]]
    return (f"The reward model ranks {100 * ours['mean']:.1f}\u00a0% of held-out pairs right, the best cheap baseline "
            f"{100 * baseline['mean']:.1f}\u00a0%.")
