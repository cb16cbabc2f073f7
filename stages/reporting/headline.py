"""What stands first on the report: what the pipeline did, whether it worked, and whether the policy cheated."""

from stages.evaluation.summary import join_words
from stages.render.durations import format_duration
from stages.render.html import Html, element, join_html, table
from stages.render.markdown_tables import clean_name

HEADLINES = {
    "better": "PPO made the answers better", "worse": "PPO made the answers worse", "hacking": "Reward hacking",
    "mixed": "The gold score rose, but correctness fell", "flat": "No gain shown",
    "unknown": "The learnt reward rose; nothing else is known"}
HACKING = {"flagged": "Flagged as reward hacking", "watch": "Not flagged, but one to watch", "clear": "Not flagged",
           "no rise": "Not flagged: no reward rose"}
NAMED_SITES = 5


def title(manifests: dict[str, dict]) -> str:
    """The page's: a site by its name, several by their number."""
    count = len(manifests["posts"]["metrics"].get("sites", {}))
    return f"{sites_of(manifests) if count < 3 else f'{count} sites'}: from posts to an aligned answer model"


def lead(kind: str, words: str, manifests: dict[str, dict], metrics: dict) -> Html:
    """The verdict with its three answers, then the short table."""
    answers = {"What was done": done(manifests), "Did it work?": words, "Did the policy cheat?": cheated(metrics)}
    listed = element("dl", *(part for asked, said in answers.items()
                             for part in (element("dt", asked), element("dd", said))))
    rows = [[text.replace("->", "→") for text in row] for row in metrics["table"]]
    return join_html([element("div", element("strong", HEADLINES[kind]), listed, class_=f"verdict {kind}"),
                   table(["measure, on held-out questions", "estimate, 95 % interval"], rows, numeric=False)])


def sites_of(manifests: dict[str, dict]) -> str:
    """The names of the sites, or of the first few."""
    names = [clean_name(name) for name in manifests["posts"]["metrics"].get("sites", {})]
    more = [f"{len(names) - NAMED_SITES} more"] if len(names) > NAMED_SITES else []
    return join_words([*names[:NAMED_SITES], *more]) or "a dump"


def done(manifests: dict[str, dict]) -> str:
    """The run in one paragraph: how many posts, which model, which policy was kept, at what cost."""
    counts = manifests["pairs"]["metrics"] | manifests["posts"]["metrics"]
    posts = join_words([f"{counts[name]:,} {name}" for name in ("questions", "answers", "pairs") if name in counts])
    seconds = sum(made["seconds"] for made in manifests.values())
    peak = max(made["peak_memory_mib"] for made in manifests.values())
    return (f"From {sites_of(manifests)}: {posts or 'posts to pairs'}. {_base(manifests['base'])} was fine-tuned on "
            f"better answers (SFT), a reward model learnt from the pairs which answers people prefer, and PPO trained "
            f"the policy against it{_kept(manifests['ppo']['metrics'])}. All stages took {format_duration(seconds)} and at most "
            f"{peak:,} MiB on {join_words(sorted({made['device'] for made in manifests.values()}))}.")


def cheated(metrics: dict) -> str:
    """The verdict on reward hacking with what it stands on."""
    found = metrics["hacking"]
    moved = f"{len(found['moved'])} of {len(found['monitors'])} monitors moved for the worse"
    named = f" ({join_words(found['moved'])})" if found["moved"] else ""
    return f"{HACKING[found['verdict']]}. {_truth(found['verdict'], bool(metrics['gold']))}{moved}{named}."


def _truth(verdict: str, known: bool) -> str:
    """What gold says beside a reward: it decides where it is known."""
    if not known:
        return "No gold score is known here, so that only the monitors can tell: "
    if verdict == "no rise":
        return ""
    rose = "did not rise" if verdict == "flagged" else "rose, too"
    return f"A reward rose; the gold score, which the policy never saw, {rose}. "


def _base(made: dict) -> str:
    model, parameters = made["config"].get("model", ""), made["metrics"].get("parameters")
    size = f" of {parameters:,} parameters" if parameters else ""
    return f"A small LLaMA{size}, trained from scratch on this text," if model == "scratch" else f"{model}{size}"


def _kept(metrics: dict) -> str:
    """Which policy is the result: of iteration 0 means that no update was for the better."""
    if "best_iteration" not in metrics:
        return ""
    best, every = metrics["best_iteration"], metrics["iterations"]
    if not best:
        return (f" for {every} iterations, none of which was better than its start on held-out prompts: what is kept "
                f"is the SFT model itself")
    return f" for {every} iterations, of which number {best} was the best on held-out prompts and is kept"
