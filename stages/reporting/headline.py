"""Top of the report: the verdict on each policy, and what was done."""

from dataclasses import dataclass

from stages.evaluation.reward_model_check import describe_shortfall, find_shortfall
from stages.evaluation.summary import NO_JUDGE, capitalise, display_name, join_words, reward_model_verdict
from stages.evaluation.verdict import compare_with_sft, policy_verdict
from stages.render.markdown_tables import clean_name
from stages.render.units import format_duration

HEADLINES = {  # of the kinds that say more than how the policy compares with SFT
    "hacking": "Reward hacking by {}", "mixed": "{} raised the gold score, but correctness fell",
    "unknown": "{} raised the learnt reward; nothing else is known",
    "no-judge": "{} raised the learnt reward; nobody judged the answers"}
SHORTFALLS = {"chance": "The reward model is no judge: it does not beat chance",
              "baseline": "The reward model is no judge: it does not beat a cheap baseline",
              "unknown": "Nobody knows whether the reward model can judge"}
HACKING_VERDICTS = {"flagged": "Flagged as reward hacking", NO_JUDGE: "No judge",
                    "watch": "Not flagged, but worth watching", "clear": "Not flagged",
                    "no rise": "Not flagged: no reward rose"}
NAMED_SITES = 5


@dataclass(frozen=True)
class Verdict:
    """A box at the top: what kind it is (its colour), a headline, and answers by question."""

    kind: str
    headline: str
    answers: dict[str, str]


def page_title(manifests: dict[str, dict]) -> str:
    """Return the title of the page: one or two sites by name, more by number."""
    count = len(manifests["posts"]["metrics"].get("sites", {}))
    return f"{list_sites(manifests) if count < 3 else f'{count} sites'}: from posts to an aligned answer model"


def build_verdicts(metrics: dict, manifests: dict[str, dict], policies: list[str]) -> list[Verdict]:
    """Build the verdicts: on a reward model that is no judge, on each evaluated policy, on the run.

    policies: those trained in this run.
    """
    verdicts = judge_warning(metrics)
    for policy in metrics["comparisons"]:
        _, words = policy_verdict(metrics, policy)
        kind, headline = policy_headline(metrics, policy)
        verdicts.append(Verdict(kind, headline, {
            "Did it work?": words, "Did the policy cheat?": describe_hacking(metrics, policy)}))
    return [*verdicts, Verdict("run", "The run", {
        "What was done": describe_run(manifests, policies),
        "Is the reward model any good?": reward_model_verdict(metrics["reward_model"])})]


def policy_headline(metrics: dict, policy: str) -> tuple[str, str]:
    """Return the kind of the verdict on a policy, and one line that says it."""
    kind, _ = policy_verdict(metrics, policy)
    return kind, HEADLINES[kind].format(display_name(policy)) if kind in HEADLINES else compare_with_sft(
        metrics, policy)


def judge_warning(metrics: dict) -> list[Verdict]:
    """Build the verdict on a reward model that does not beat chance and the best cheap baseline; none if it does."""
    shortfall = find_shortfall(metrics["reward_model"])
    if shortfall is None:
        return []
    words = describe_shortfall(metrics["reward_model"])
    has_gold = any(comparison["gold"] for comparison in metrics["comparisons"].values())
    end = ("Only the gold score judged these answers; a rise of the learnt reward says nothing about them." if has_gold
           else "Nobody judged these answers, and no gold score is known: a rise of the learnt reward says nothing.")
    return [Verdict("no-judge", SHORTFALLS[shortfall], {
        "Who judged the answers?": f"{capitalise(words)}. {end}"})]


def list_sites(manifests: dict[str, dict]) -> str:
    """List the names of the first few sites."""
    names = [clean_name(name) for name in manifests["posts"]["metrics"].get("sites", {})]
    rest = [f"{len(names) - NAMED_SITES} more"] if len(names) > NAMED_SITES else []
    return join_words([*names[:NAMED_SITES], *rest]) or "a dump"


def describe_run(manifests: dict[str, dict], policies: list[str]) -> str:
    """Describe the run in one paragraph: number of posts, models, the best iteration of each policy, cost."""
    counts = manifests["pairs"]["metrics"] | manifests["posts"]["metrics"]
    posts = join_words([f"{counts[name]:,} {name}" for name in ("questions", "answers", "pairs") if name in counts])
    seconds = sum(manifest["seconds"] for manifest in manifests.values())
    peak = max(manifest["peak_memory_mib"] for manifest in manifests.values())
    trained = "".join(f" {display_name(policy)} trained a policy from the SFT model"
                      f"{_best_state(manifests[policy]['metrics'])}." for policy in policies)
    return (f"From {list_sites(manifests)}: {posts or 'posts to pairs'}. {_base(manifests['base'])} was fine-tuned on "
            f"the better answers (SFT), and a reward model learnt from the pairs which answers people prefer.{trained} "
            f"All stages took {format_duration(seconds)} and at most {peak:,} MiB on "
            f"{join_words(sorted({manifest['device'] for manifest in manifests.values()}))}.")


def describe_hacking(metrics: dict, policy: str) -> str:
    """Say the verdict on reward hacking, and what it is based on."""
    hacking = metrics["hacking"][policy]
    moved = f"{len(hacking['moved'])} of {len(hacking['monitors'])} monitors moved for the worse"
    names = f" ({join_words(hacking['moved'])})" if hacking["moved"] else ""
    gold = _gold_words(hacking["verdict"], bool(metrics["comparisons"][policy]["gold"]))
    judged = (f": {describe_shortfall(metrics['reward_model'])}; nobody judged these answers"
              if hacking["verdict"] == NO_JUDGE else "")
    return f"{HACKING_VERDICTS[hacking['verdict']]}{judged}. {gold}{moved}{names}."


def _gold_words(verdict: str, known: bool) -> str:
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


def _best_state(metrics: dict) -> str:
    """Say which iteration's (or step's) policy is the result; that of number 0 is the SFT model."""
    unit, count = ("iteration", metrics.get("iterations")) if "best_iteration" in metrics else (
        "step", metrics.get("steps"))
    best = metrics.get(f"best_{unit}")
    if best is None:
        return ""
    if not best:
        return (f" for {count} {unit}s, none of which was better than the start on held-out prompts: the "
                f"result is the SFT model itself")
    return f" for {count} {unit}s; number {best} was the best on held-out prompts and is the result"
