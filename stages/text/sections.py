"""The report's sections, each a function of facts that are already there: metrics, manifests, rows of samples."""

from stages.text.elements import Html, element, joined, link, quoted, table
from stages.text.figures import Bars
from stages.text.findings import estimate_text

HEADLINES = {
    "better": "PPO made the answers better", "worse": "PPO made the answers worse", "hacking": "Reward hacking",
    "mixed": "The gold score rose, but correctness fell", "flat": "No gain shown",
    "unknown": "The learnt reward rose; nothing else is known"}
HACKING = {"flagged": "Flagged as reward hacking", "watch": "Not flagged, but one to watch", "clear": "Not flagged",
           "no rise": "Not flagged: no reward rose"}
COUNTED_BY_VALUE = {  # title, value, what is counted; lengths are in bins that begin at these
    "scores": ("scores of answers", "score", "answers"), "score_gaps": ("gaps of pairs", "score gap", "pairs"),
    "years": ("questions by year", "year", "questions"),
    "question_characters": ("length of questions", "characters, from", "questions"),
    "answer_characters": ("length of answers", "characters, from", "answers")}
WRITERS = (("SFT", "sft"), ("PPO", "ppo"), ("Best human", "human"))


def verdict_box(kind: str, words: str) -> Html:
    """The one paragraph that says whether it worked."""
    return element("div", element("strong", HEADLINES[kind]), element("p", words), class_=f"verdict {kind}")


def pipeline(manifests: dict[str, dict]) -> Html:
    """Each stage with its time and memory."""
    longest = max(made["seconds"] for made in manifests.values()) or 1
    rows = [[stage, _clock(made["seconds"]), _bar(made["seconds"] / longest), f"{made['peak_memory_mib']:,} MiB",
             made["device"], made["threads"]] for stage, made in manifests.items()]
    return table(["stage", "time", "", "peak memory", "device", "threads"], rows)


def counts(metrics: dict) -> Html:
    """Every count of a stage; a mapping (drop reasons, sites, splits) becomes rows below its name.

    What is counted by value is for `histograms`.
    """
    rows = []
    for name, value in metrics.items():
        if name in COUNTED_BY_VALUE:
            continue
        if isinstance(value, dict):
            inner = [(key, part) for key, part in value.items() if _is_count(part)]
            rows += [[f"{_words(name)}: {key}", f"{part:,}"] for key, part in inner]
            rows += [[f"{_words(name)}: {key}", _listed(part)] for key, part in value.items() if isinstance(part, dict)]
        elif _is_count(value):
            rows.append([_words(name), f"{value:,}"])
    return table(["", "count"], rows)


def histograms(stage: str, metrics: dict) -> dict[str, Bars]:
    """Figures of a data stage by file name."""
    return {f"{stage}-{name.replace('_', '-')}": Bars(f"{stage.capitalize()}: {title}", axis, unit, metrics[name])
            for name, (title, axis, unit) in COUNTED_BY_VALUE.items() if metrics.get(name)}


def reward_accuracy(reward: dict) -> Html:
    """Share of held-out pairs ranked right: the reward model, its baselines, and where it holds."""
    rows = [["reward model", *_estimate_cells(reward["accuracy"])]]
    rows += [[f"baseline: {name}", *_estimate_cells(found)] for name, found in reward["baselines"].items()]
    if reward["best_cheap_baseline"]:
        rows.append([f"reward model minus “{reward['best_cheap_baseline']}”",
                     *_estimate_cells(reward["above_best_cheap_baseline"], signed=True)])
    if reward["oracle"]:
        rows.append(["an oracle that knows the truth (ceiling)", *_estimate_cells(reward["oracle"])])
    rows += [["reward model, both answers have code", *_estimate_cells(reward["both_have_code"])]]
    if reward["oracle_both_have_code"]:
        rows.append(["the oracle, both answers have code", *_estimate_cells(reward["oracle_both_have_code"])])
    rows += [[f"reward model, better answer {how} in length", *_estimate_cells(found)]
             for how, found in reward["by_length"].items()]
    rows += [[f"reward model, scores {gap} apart", *_estimate_cells(found)]
             for gap, found in reward["by_score_gap"].items()]
    rows += [["calibration: expected error", f"{reward['calibration']['expected_error']:.3f}", "–",
              f"{reward['pairs']:,}"]]
    for kind in ("site", "tag"):
        rows += [[f"reward model, {kind} {name}", *_estimate_cells(found)]
                 for name, found in reward[f"by_{kind}"].items()]
    return table(["pairs ranked right", "share", "95 % interval", "pairs"], rows)


def hacking(found: dict) -> Html:
    """The monitors, and which of them moved for the worse beyond their thresholds."""
    rows = [[row["label"], f"{row['sft']:z{row['form']}}", f"{row['ppo']:z{row['form']}}",
             estimate_text(row["change"], row["form"], signed=True),
             f"{row['worse']} by {row['threshold']:{row['form']}}", "moved" if row["moved"] else "–"]
            for row in found["monitors"]]
    return table(["monitor", "SFT", "PPO", "change, 95 % interval", "for the worse: more than", ""], rows)


def gold_scores(found: dict) -> Html:
    """What the scorer that knows the truth says."""
    rows = [[name, *("–" if numbers[side] is None else f"{numbers[side]:.3f}" for side in ("sft", "ppo", "human")),
             estimate_text(numbers["difference"], signed=True)] for name, numbers in found.items()]
    return table(["", "SFT", "PPO", "best human answer", "PPO minus SFT, paired"], rows)


def side_by_side(samples: list[dict]) -> Html:
    """Each question with its answers, their rewards and, where known, gold scores."""
    return joined(element("article", _asked(row), quoted(row["question"]), element(
        "div", *(_answer(row, label, name) for label, name in WRITERS), class_="answers")) for row in samples)


def recipe(stage: str, values: dict, published: dict) -> Html:
    """A stage's settings: those that differ from the published default, and the others folded away."""
    present, default = _leaves(values), _leaves(published)
    rows = {True: [], False: []}
    for name, value in present.items():
        same = value == default.get(name)
        rows[same].append([name, _plain(value), *([] if same else [_plain(default.get(name))])])
    words = f"{stage}: {len(rows[False])} of {len(present)} settings differ from the default"
    differing = table(["setting", "here", "default"], rows[False], numeric=False) if rows[False] else ""
    others = element("details", element("summary", f"{len(rows[True])} as by default"),
                     table(["setting", "here"], rows[True], numeric=False))
    return joined([element("h3", words), differing, others])


def provenance(manifests: dict[str, dict], digests: dict[str, str]) -> Html:
    """What made each artifact: commit, versions, and the digest that names its whole ancestry."""
    rows = [[stage, element("code", digests[stage][:16]), element("code", (made["commit"] or "unknown")[:20]),
             ", ".join(sorted(_input_names(made)))] for stage, made in manifests.items()]
    versions = sorted({(name, version) for made in manifests.values() for name, version in made["versions"].items()})
    python = ", ".join(sorted({made["python"] for made in manifests.values()}))
    return joined([table(["artifact", "sha256 of its manifest", "commit", "made from"], rows, numeric=False),
                   element("p", f"Python {python}; " + ", ".join(f"{name} {version}" for name, version in versions),
                           class_="faint")])


def _asked(row: dict) -> Html:
    asker, answerer = [*row["authors"], "", ""][:2]
    parts = [link(f"{row['site']}, question {row['qid']}", row["url"])]
    parts += [", asked by ", element("bdi", asker)] if asker else []
    parts += [", best answer by ", element("bdi", answerer)] if answerer else []
    return element("p", *parts, ". CC BY-SA.", class_="faint")


def _answer(row: dict, label: str, name: str) -> Html:
    numbers = [("reward", row[f"reward_{name}"]), ("gold", row.get(f"gold_{name}"))]
    said = ", ".join(f"{word} {value:.2f}" for word, value in numbers if value is not None)
    return element("div", element("b", label), element("span", said), quoted(row[name]))


def _estimate_cells(found: dict | None, signed: bool = False) -> list[str]:
    if found is None:
        return ["–", "–", "0"]
    form = "+z.3f" if signed else "z.3f"
    interval = "–" if found["low"] is None else f"{found['low']:{form}} to {found['high']:{form}}"
    return [f"{found['mean']:{form}}", interval, f"{found['count']:,}"]


def _input_names(made: dict) -> list[str]:
    given = [value if isinstance(value, list) else [value] for value in made["inputs"].values()]
    return [source["path"].rstrip("/").rsplit("/", 1)[-1] for sources in given for source in sources]


def _bar(share: float) -> Html:
    bar = element("span", class_="bar", style=f"width:{100 * share:.1f}%")
    return element("span", bar, class_="track")


def _leaves(values: dict, prefix: str = "") -> dict[str, object]:
    found = {}
    for name, value in values.items():
        found |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "(none)"
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _listed(found: dict) -> str:
    return ", ".join(f"{count:,} {_words(name)}" for name, count in found.items() if _is_count(count))


def _words(name: str) -> str:
    return name.replace("_", " ")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"
