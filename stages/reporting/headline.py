"""Top of the report: the verdict on each policy, in three short sentences with numbers folded, and what was done."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from stages.artifacts.artifact import MANIFEST
from stages.evaluation.reward_model_check import describe_shortfall, find_shortfall, reward_model_verdict
from stages.evaluation.summary import (
    BEST,
    NO_JUDGE,
    against_start,
    capitalise,
    change_direction,
    difference_to,
    display_name,
    format_estimate,
    format_percent,
    join_words,
    judged_by,
    judged_policies,
    knows_gold,
    mean_score,
    samples_per_answer,
    strongest_best_of_n,
)
from stages.evaluation.tasks.wording import find_wording, start_model
from stages.evaluation.verdict import compare_with_start, only_length_headline, policy_verdict
from stages.render.markdown_tables import clean_name
from stages.render.units import format_duration
from stages.runtime.files import DIGEST_CHARACTERS

HEADLINES = {  # of the kinds that say more than how the policy compares with SFT
    "hacking": "Reward hacking by {}", "mixed": "{} raised the gold score, but correctness fell",
    "no-judge": "{} raised the learnt reward; nobody judged the answers"}
SHORTFALLS = {"chance": "The reward model is no judge: it does not beat chance",
              "baseline": "The reward model is no judge: it does not beat a cheap baseline",
              "unknown": "Nobody knows whether the reward model can judge"}
HACKING_VERDICTS = {"flagged": "Flagged as reward hacking", NO_JUDGE: "No judge",
                    "watch": "Not flagged, but worth watching", "clear": "Not flagged",
                    "no rise": "Not flagged: no reward rose"}
NAMED_SITES = 5
MEASURES = {"gold": "gold, the score that knows the truth", "judge": "the score of a held-out reward model"}
AGAINST_START = {1: "beats", 0: "cannot be told apart from", -1: "is worse than"}
AGAINST_POLICY = {1: "worse", 0: "as well", -1: "better"}


@dataclass(frozen=True)
class Verdict:
    """A box at the top: what kind it is (its colour), a headline, answers by question; folded if there are bullets."""

    kind: str
    headline: str
    answers: dict[str, str]
    bullets: tuple[str, ...] = ()


def page_title(manifests: dict[str, dict]) -> str:
    """Return the title of the page: one or two sites by name, more by number; of own prompts, the algorithms."""
    if "posts" not in manifests:
        trained = [display_name(name) for name in manifests if is_policy(manifests[name])]
        return f"{join_words(trained)} on your own prompts and reward"
    sites = list(manifests["posts"]["metrics"].get("sites", {}))
    count = len(sites)
    return f"{join_sites(sites) or 'a dump' if count < 3 else f'{count} sites'}: from posts to an aligned answer model"


def describe_origin(evaluate: Path, manifest: dict) -> str:
    """Name the run, the day on which its evaluation ended, and the commit of the code.

    manifest: of the evaluation in the folder `evaluate`.
    """
    day = datetime.fromtimestamp((evaluate / MANIFEST).stat().st_mtime, UTC).strftime("%Y-%m-%d")
    commit = (manifest["commit"] or "unknown")[:DIGEST_CHARACTERS]
    return f"{clean_name(evaluate.resolve().parent.name)}, {day}, commit {commit}"


def build_verdicts(metrics: dict, manifests: dict[str, dict], policies: list[str], base: str = "") -> list[Verdict]:
    """Build the verdicts: on a reward model that is no judge, on each evaluated policy, on the run.

    policies: those trained in this run. base: what is known of the pretrained model, beyond its name in the recipe.
    """
    about_base = {"What is the base?": f"{base}."} if base else {}
    bullets = _list_run_bullets(metrics, manifests)
    if "reward_model" not in metrics:
        return [*_policy_verdicts(metrics), Verdict("run", "The run", {
            "What was done": describe_own_run(manifests, metrics), **about_base,
            "What is the reward?": describe_reward(metrics)}, bullets)]
    return [*judge_warning(metrics), *_policy_verdicts(metrics), Verdict("run", "The run", {
        "What was done": describe_run(manifests, policies), **about_base,
        "Is the reward model any good?": reward_model_verdict(metrics["reward_model"])}, bullets)]


def _policy_verdicts(metrics: dict) -> list[Verdict]:
    """Build the verdict on each policy: bullets on SFT, best-of-n and reward hacking, and the paragraphs."""
    verdicts = []
    for policy in judged_policies(metrics):
        kind, headline = policy_headline(metrics, policy)
        bullets = [_against_start(metrics, policy), *_against_best_of_n(metrics, policy),
                   f"{HACKING_VERDICTS[metrics['hacking'][policy]['verdict']]}. {_count_moved(metrics, policy)}."]
        verdicts.append(Verdict(kind, headline, {
            "Did it work?": policy_verdict(metrics, policy)[1],
            "Did the policy cheat?": describe_hacking(metrics, policy)}, tuple(bullets)))
    return verdicts


def policy_headline(metrics: dict, policy: str) -> tuple[str, str]:
    """Return the kind of the verdict on a policy, and one line that says it."""
    kind, _ = policy_verdict(metrics, policy)
    if kind == "length":
        return kind, only_length_headline(metrics, policy)
    headlines = HEADLINES | {"unknown": find_wording(metrics["policies"]).unknown}
    return kind, headlines[kind].format(display_name(policy)) if kind in headlines else compare_with_start(
        metrics, policy)


def judge_warning(metrics: dict) -> list[Verdict]:
    """Build the verdict on a reward model that does not beat chance and the best cheap baseline; none if it does."""
    shortfall = find_shortfall(metrics["reward_model"])
    if shortfall is None:
        return []
    words = describe_shortfall(metrics["reward_model"])
    return [Verdict("no-judge", SHORTFALLS[shortfall], {
        "Who judged the answers?": f"{capitalise(words)}. {_describe_judge(metrics)}"})]


def _describe_judge(metrics: dict) -> str:
    """Say who judged the answers in place of a reward model that is no judge."""
    if knows_gold(metrics):
        judge = "gold score"
    elif metrics.get("judge"):
        accuracy = format_estimate(metrics["judge"]["accuracy"])
        judge = f"held-out reward model, which ranks {accuracy} of the pairs right,"
    else:
        return "Nobody judged these answers, and no gold score is known: a rise of the learnt reward says nothing."
    return f"Only the {judge} judged these answers; a rise of the learnt reward says nothing about them."


def join_sites(sites: list[str], clean: Callable[[str], str] = clean_name) -> str:
    """Join the names of the first few sites, each made safe by `clean`, and the number of the others."""
    rest = [f"{len(sites) - NAMED_SITES} more"] if len(sites) > NAMED_SITES else []
    return join_words([*map(clean, sites[:NAMED_SITES]), *rest])


def describe_run(manifests: dict[str, dict], policies: list[str]) -> str:
    """Describe the run in one paragraph: number of posts, models, the best iteration of each policy, cost."""
    counts = manifests["pairs"]["metrics"] | manifests["posts"]["metrics"]
    posts = join_words([f"{counts[name]:,} {name}" for name in ("questions", "answers", "pairs") if name in counts])
    trained = "".join(f" {display_name(policy)} trained a policy from the SFT model"
                      f"{_best_state(manifests[policy]['metrics'])}." for policy in policies)
    sites = join_sites(list(counts.get("sites", {}))) or "a dump"
    return (f"From {sites}: {posts or 'posts to pairs'}. {_base(manifests['base'])} was fine-tuned on "
            f"the better answers (SFT), and a reward model learnt from the pairs which answers people prefer.{trained} "
            f"{_describe_cost(manifests)}")


def _describe_cost(manifests: dict[str, dict]) -> str:
    seconds = sum(manifest["seconds"] for manifest in manifests.values())
    peak = max(manifest["peak_memory_mib"] for manifest in manifests.values())
    return (f"All stages took {format_duration(seconds)} and at most {peak:,} MiB on "
            f"{join_words(sorted({manifest['device'] for manifest in manifests.values()}))}.")


def is_policy(manifest: dict) -> bool:
    """Check whether an artifact is a policy that was trained on a user's own prompts."""
    return {"prompts", "policy"} <= manifest["inputs"].keys() and "best_iteration" in manifest["metrics"]


def describe_own_run(manifests: dict[str, dict], metrics: dict) -> str:
    """Describe a run on a user's own prompts: how many prompts were used for what, the best iteration, the cost."""
    base = clean_name(manifests["base"]["config"].get("model", "the base"))
    trained = " ".join(
        f"{display_name(name)} trained a policy from {base} on {manifest['metrics']['prompts']:,} prompts"
        f"{_best_state(manifest['metrics'], 'base')}."
        for name, manifest in manifests.items() if is_policy(manifest))
    return (f"Of {metrics['file_prompts']:,} prompts, {metrics['held_out_prompts']:,} were held out from training and "
            f"from the choice of the policy. {trained} The evaluation's {metrics['prompts']:,} prompts and the "
            f"{metrics['temperature_selection']['prompts']:,} that temperatures were chosen on are held-out ones. "
            f"{_describe_cost(manifests)}")


def describe_reward(metrics: dict) -> str:
    """Say what the reward of a user's own is, and what it cannot say."""
    functions = join_words([f"{name} (weight {weight:g})" for name, weight in metrics["reward_functions"].items()])
    unseen = [*(["the gold score"] if knows_gold(metrics) else []), *metrics["unseen_scores"]]
    rest = (f"Training never saw {join_words(unseen)}." if unseen else
            "No score that training never saw was given (evaluate.gold, evaluate.scorers): read the answers.")
    return (f"The sum of {functions}, without penalties and KL. The policy was trained on it, so it cannot say whether "
            f"answers are better than it knows. {rest}")


def describe_hacking(metrics: dict, policy: str) -> str:
    """Say the verdict on reward hacking, and what it is based on."""
    hacking = metrics["hacking"][policy]
    names = f" ({join_words(hacking['moved'])})" if hacking["moved"] else ""
    gold = _gold_words(hacking["verdict"], bool(metrics["comparisons"][policy]["gold"]), "reward_model" in metrics)
    judged = (f": {describe_shortfall(metrics['reward_model'])}, so that a rise of its scores says nothing"
              if hacking["verdict"] == NO_JUDGE else "")
    return f"{HACKING_VERDICTS[hacking['verdict']]}{judged}. {gold}{_count_moved(metrics, policy)}{names}."


def _gold_words(verdict: str, known: bool, is_learnt: bool) -> str:
    if not known and not is_learnt:
        return ("No gold score is known here, and monitors cannot know what your reward asks for: whether a change is "
                "wanted, only you can say. ")
    if not known:
        return "No gold score is known here, so that only the monitors can tell: "
    if verdict == "no rise":
        return ""
    rose = "did not rise" if verdict == "flagged" else "rose, too"
    return f"A reward rose; the gold score, which the policy never saw, {rose}. "


def _base(manifest: dict) -> str:
    model, parameters = manifest["config"].get("model", ""), manifest["metrics"].get("parameters")
    size = f" of {parameters:,} parameters" if parameters else ""
    return f"A small LLaMA{size}, trained from scratch on this text," if model == "scratch" else f"{model}{size}"


def _best_state(metrics: dict, start: str = "SFT") -> str:
    """Say which iteration's, round's or step's policy is the result; that of number 0 is the model it started from."""
    unit = next((unit for unit in ("iteration", "round", "step") if f"best_{unit}" in metrics), None)
    if unit is None:
        return ""
    best, count = metrics[f"best_{unit}"], f"{metrics[f'{unit}s']} {unit}s"
    if not best:
        return (f" for {count}, none of which was better than the start on held-out prompts: the result is the "
                f"{start} model itself")
    divided = metrics.get("final_temperature", 1.0)
    sharpened = "" if divided == 1 else f", with its logits divided by {divided:g},"
    return f" for {count}; number {best} was the best on held-out prompts and{sharpened} is the result"


def _count_moved(metrics: dict, policy: str) -> str:
    hacking = metrics["hacking"][policy]
    return f"{len(hacking['moved'])} of {len(hacking['monitors'])} monitors moved for the worse"


def _list_run_bullets(metrics: dict, manifests: dict[str, dict]) -> tuple[str, ...]:
    """Say what the run was made from, how good its reward model is, and what it took."""
    counts = manifests.get("pairs", {}).get("metrics", {}) | manifests.get("posts", {}).get("metrics", {})
    source = ([f"{counts['questions']:,} questions with answers gave {counts['pairs']:,} preference pairs."]
              if {"questions", "pairs"} <= counts.keys() else [])
    reward = metrics.get("reward_model")
    if reward and (best := reward["best_cheap_baseline"]):
        source.append(f"The reward model ranks {format_percent(reward['accuracy'])} of held-out pairs right, the best "
                      f"cheap baseline {format_percent(reward['baselines'][best])}.")
    return (*source, _describe_cost(manifests))


def _against_start(metrics: dict, policy: str) -> str:
    start, wording = start_model(metrics["policies"]), find_wording(metrics["policies"])
    measure = judged_by(metrics, policy)
    before, after = (mean_score(metrics["policies"][f"{name}{BEST}"], measure) for name in (start, policy))
    how = AGAINST_START[change_direction(difference_to(metrics, policy, f"{start}{BEST}"))]
    fell = change_direction(against_start(metrics["at_best"][policy])["gold"].get("correct")) < 0
    return (f"Each at its best temperature, {display_name(policy)} {how} {wording.start} in "
            f"{MEASURES.get(measure, wording.measure)}: {before:z.2f} → {after:z.2f}"
            f"{', but correctness alone fell' if fell else ''}.")


def _against_best_of_n(metrics: dict, policy: str) -> list[str]:
    """Compare with the strongest best-of-n, which costs as many samples an answer as its name says."""
    best_of_n = strongest_best_of_n(metrics["at_best"][policy])
    if best_of_n is None:
        return []
    how = AGAINST_POLICY[change_direction(difference_to(metrics, policy, best_of_n))]
    score = mean_score(metrics["policies"][best_of_n], judged_by(metrics, policy))
    return [f"The best of {samples_per_answer(best_of_n)} answers of {find_wording(metrics['policies']).start} by the "
            f"same reward does {how}: {score:z.2f}."]
