"""Render the data set card of a posts or pairs folder (README.md), so that the folder can be uploaded as it is.

Counts come from the stage's metrics; what they do not contain is left out. Names in them (sites, licences, reasons)
come from the data and are escaped in stages/render/markdown_tables.py.
"""

from itertools import pairwise

from huggingface_hub import DatasetCardData

from stages.cards.sections import (
    format_section,
    hub_license,
    join_blocks,
    licence_section,
    limits_section,
    settings_table,
    sites_table,
)
from stages.render.markdown_tables import (
    add_funnel_sum,
    add_sum_row,
    clean_name,
    escape_cell,
    format_histogram,
    format_table,
    top_rows,
)
from stages.stackexchange.pairs.table import SPLITS

TAGS = ["stack-exchange", "human-feedback"]
POSTS_TITLE = "Stack Exchange questions with scored answers"
PAIRS_TITLE = "Stack Exchange preference pairs"
PURPOSES = {"finetune": "supervised fine-tuning", "reward": "the reward model",
            "rl": "prompts of PPO; pairs of the judge", "evaluation": "held out; never trained on"}

POSTS_COLUMNS = [
    ("`question_id`", "integer", "number of the question on its site"),
    ("`site`", "text", "host name of the site; with `question_id` it names a question"),
    ("`title`", "text", "title of the question; empty where the source has none"),
    ("`question`", "text", "body of the question, raw"),
    ("`markup`", "text", "`html` or `markdown`: of the question and its answers"),
    ("`tags`", "list of text", "tags of the question"),
    ("`date`", "text", "when the question was posted, as the source writes it (dumps: ISO 8601, UTC)"),
    ("`url`", "text", "address of the question"),
    ("`author`", "text", "name of who asked; `user N` or `unknown` where the source has no name"),
    ("`author_url`", "text", "address of their profile; empty where it is not known"),
    ("`license`", "text", "licence of the question"),
    ("`answers`", "list of struct", "its answers: the fields below"),
    ("`answers.id`", "integer", "number of the answer on its site"),
    ("`answers.text`", "text", "body of the answer, raw"),
    ("`answers.author`, `answers.author_url`, `answers.license`", "text", "as above, of the answer"),
    ("`answers.date`", "text", "when the answer was posted; empty where the source does not say"),
    ("`answers.votes`", "integer, votes", "net, or up votes (see the rule below); null where the source does not say"),
    ("`answers.accepted`", "boolean", "who asked accepted this answer"),
    ("`answers.score`", "integer", "rank among the question's answers: the rule is below"),
]
PAIRS_COLUMNS = [
    ("`qid`", "integer", "number of the question on its site"),
    ("`site`", "text", "host name of the site; with `qid` it names a question"),
    ("`question`", "text", "the question, in Markdown"),
    ("`response_j`", "text", "the better answer, in Markdown"),
    ("`response_k`", "text", "the worse answer, in Markdown"),
    ("`score_j`, `score_k`", "integer", "their scores (the rule is below): `score_j` is the higher one"),
    ("`date`", "text", "when the question was posted, as the source writes it (dumps: ISO 8601, UTC)"),
    ("`metadata`", "list of text", "address of the question, of its site, and of the profile of who asked"),
    ("`answer_j`, `answer_k`", "integer", "numbers of the two answers on their site"),
    ("`date_j`, `date_k`", "text", "when the two answers were posted; empty where the source does not say"),
    ("`authors`", "list of text", "names of who wrote the question, `response_j` and `response_k`"),
    ("`author_urls`", "list of text", "addresses of their profiles, in this order; empty where not known"),
    ("`licenses`", "list of text", "licences of the three posts, in this order"),
]

SCORE_RULE = (
    "An answer's score is `round(log2(1 + votes))`, plus 1 if who asked accepted it, and -1 if its votes are negative "
    "(accepted or not). Votes are net (up minus down), or up votes where the posts were made with `votes: up`.")
LIMITS = [
    "In net votes, 100 up and 100 down look like none at all. Votes show what readers liked, not what is true, and "
    "older posts had more time to get them.",
    "Published tables used as a source give no votes, titles, tags or dates of answers. The scores of "
    "`stack-exchange-preferences` are kept as published; `stack-exchange-paired` publishes none, so its better answer "
    "has 1 and the other one 0.",
    "A text is its last revision in the source; the author is who posted it first. Editors are not named.",
    "People wrote the texts, and nobody checked them: they can be wrong, out of date or hostile, and hold personal "
    "data. The authors' names are there because the licence asks for them.",
]
RAW_LIMIT = "Bodies are raw HTML (or Markdown) from strangers: sanitise them before a browser shows them."
MARKDOWN_LIMIT = "Markdown can carry HTML and links from strangers: sanitise what it renders to before it is shown."
ROWS_KEPT = {"questions": "kept: questions", "answers": "kept: answers", "rows_set_aside": "in `quarantine.jsonl`"}
HISTOGRAMS = [("scores", ["score", "answers"]), ("score_gaps", ["`score_j - score_k`", "pairs"]),
              ("question_characters", ["characters", "questions"]), ("answer_characters", ["characters", "answers"]),
              ("years", ["year", "questions"])]


def render_posts_card(config: dict, metrics: dict) -> str:
    """Render README.md of a posts folder from the stage's settings and metrics."""
    at_least = f" with at least {escape_cell(config['min_answers'])} answers" if "min_answers" in config else ""
    return join_blocks(
        _front_matter(POSTS_TITLE, metrics, metrics.get("questions"), {"train": "part-*.parquet"}, TAGS),
        f"# {POSTS_TITLE}",
        f"Questions{at_least} from Stack Exchange sites, each with its answers, their votes and a score that ranks "
        f"them.{_sizes(metrics, 'questions', 'answers')} Texts are as in the source.",
        _loading_example("train"),
        format_section("A row is a question", format_table(["column", "type, unit", "meaning"], POSTS_COLUMNS)),
        format_section("How it was made", SCORE_RULE, settings_table(config)),
        format_section("Counts", sites_table(metrics, "questions", "answers"),
                       _more_counts(metrics, bytes_read="bytes read", accepted_answers_not_in_the_file=(
                           "accepted answers that the source does not hold"))),
        format_section("From rows to posts", _funnel(metrics, "rows of the source", ROWS_KEPT, "dropped", "rows_read"),
                       _reasons(metrics, "dropped_questions", "questions")),
        _histograms(metrics),
        licence_section(metrics, "`license` is the question's, `answers.license` an answer's; `url`, authors and "
                                 "profiles stand beside them."),
        limits_section(*LIMITS, RAW_LIMIT)) + "\n"


def render_pairs_card(config: dict, metrics: dict) -> str:
    """Render README.md of a pairs folder from the stage's settings and metrics."""
    counts = metrics.get("pairs_by_split", {})
    filled = [name for name in SPLITS if counts.get(name) != 0] or SPLITS  # an empty split may have no file
    return join_blocks(
        _front_matter(PAIRS_TITLE, metrics, metrics.get("pairs"), {name: f"{name}/part-*.parquet" for name in filled},
                      [*TAGS, "preference", "rlhf", "reward-model"]),
        f"# {PAIRS_TITLE}",
        "Pairs of answers to one question from Stack Exchange sites, first the one with the higher score."
        f"{_sizes(metrics, 'pairs', 'questions')} Texts are Markdown; the columns are those of "
        "`lvwerra/stack-exchange-paired` and more.",
        _loading_example(filled[0]),
        format_section("A row is a pair of answers", format_table(["column", "type, unit", "meaning"], PAIRS_COLUMNS)),
        format_section("How it was made", SCORE_RULE, _drawing_rule(config), settings_table(config)),
        format_section("Counts", _splits(metrics), sites_table(metrics, "questions", "pairs"),
                       _more_counts(metrics, conversions="posts converted to Markdown")),
        format_section("From posts to pairs",
                       _funnel(metrics, "posts in", {"posts_out": "kept"}, "dropped_posts", "posts_in"),
                       _funnel(metrics, "questions in", {"questions": "kept"}, "dropped_questions"),
                       _funnel(metrics, "pairs drawn", {"pairs": "kept"}, "dropped_pairs", "pairs_drawn"),
                       _reasons(metrics, "posts_not_converted", "posts")),
        _histograms(metrics),
        licence_section(metrics, "`licenses` are those of the question, `response_j` and `response_k`, as are "
                                 "`authors` and `author_urls`; `metadata` begins with the link. HTML was converted to "
                                 "Markdown: say so."),
        limits_section(*LIMITS, MARKDOWN_LIMIT)) + "\n"


def _front_matter(title: str, metrics: dict, rows: int | None, files: dict[str, str], tags: list[str]) -> str:
    sites = list(metrics.get("sites", {}))
    data = DatasetCardData(
        pretty_name=f"{title}: {clean_name(sites[0])}" if len(sites) == 1 else title,
        **hub_license(metrics.get("licenses", {})), task_categories=["question-answering", "text-generation"],
        tags=tags, size_categories=None if rows is None else [_size_category(rows)],
        configs=[{"config_name": "default", "data_files": [{"split": split, "path": path}
                                                           for split, path in files.items()]}])
    return f"---\n{data.to_yaml()}\n---"


def _size_category(rows: int) -> str:
    """Return the Hub's name for a number of rows: n<1K, 1K<n<10K, ..., n>1T."""
    names = ["1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T"]
    categories = ["n<1K", *(f"{low}<n<{high}" for low, high in pairwise(names)), "n>1T"]
    return categories[sum(rows >= 10 ** power for power in range(3, 13))]


def _sizes(metrics: dict, *names: str) -> str:
    counts = {name: metrics[name] for name in names if name in metrics}
    counts |= {"sites": len(metrics["sites"])} if "sites" in metrics else {}
    return f" In numbers: {', '.join(f'{name} {count:,}' for name, count in counts.items())}." if counts else ""


def _loading_example(split: str) -> str:
    return f'```python\nfrom datasets import load_dataset\n\nrows = load_dataset("THIS_FOLDER", split="{split}")\n```'


def _drawing_rule(config: dict) -> str:
    most = escape_cell(config["max_pairs_per_question"]) if "max_pairs_per_question" in config else "a set number"
    which = " and whose better answer is the later one" if config.get("later_wins") else ""
    return (f"Of the pairs of a question's answers whose scores differ enough{which}, at most {most} are drawn without "
            "replacement, by seed, site and question. The split is drawn by question: no question is in two. A pair is "
            "dropped when a text is empty, outside the set lengths or not to be converted, or both answers are equal.")


def _splits(metrics: dict) -> str:
    pairs, questions = metrics.get("pairs_by_split", {}), metrics.get("questions_by_split", {})
    rows = [(f"`{name}`: {PURPOSES[name]}", pairs.get(name, 0), questions.get(name, 0))
            for name in SPLITS if name in pairs or name in questions]
    return format_table(["split", "pairs", "questions"], add_sum_row(rows))


def _more_counts(metrics: dict, **labels: str) -> str:
    rows = [(label, metrics[name]) for name, label in labels.items() if name in metrics]
    return format_table(["also counted", ""], rows)


def _by_reason(metrics: dict, name: str) -> list[tuple]:
    return top_rows([(f"dropped: {escape_cell(reason)}", n) for reason, n in metrics.get(name, {}).items() if n])


def _reasons(metrics: dict, name: str, counted: str) -> str:
    return format_table([name.replace("_", " "), counted], add_sum_row(_by_reason(metrics, name)))


def _funnel(metrics: dict, head: str, labels: dict[str, str], dropped: str, total: str = "") -> str:
    """Build a table of what was kept (`labels` by metric) and dropped; its sum must equal the metric `total`."""
    rows = [(label, metrics[name]) for name, label in labels.items() if name in metrics] + _by_reason(metrics, dropped)
    return format_table([head, "count"], add_funnel_sum(rows, metrics.get(total)))


def _histograms(metrics: dict) -> str:
    histograms = [format_histogram(metrics.get(name, {}), heads, binned=name.endswith("characters"))
                  for name, heads in HISTOGRAMS]
    return format_section("Histograms", *histograms)
