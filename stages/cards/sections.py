"""Build the Markdown sections and the metadata that several kinds of cards share.

Names from the data are escaped by stages/render/markdown_tables.py.
"""

import re

from stages.artifacts.lineage import Origin
from stages.render.markdown_tables import add_sum_row, escape_cell, format_table, top_rows

CARD = "README.md"
MAX_LABEL_CHARACTERS = 250
LANGUAGES = {"es.stackoverflow.com": "es", "ja.stackoverflow.com": "ja", "pt.stackoverflow.com": "pt",
             "ru.stackoverflow.com": "ru", "rus.stackexchange.com": "ru"}  # all other sites are in English

# Of the Hub's list (huggingface.co/docs/hub/repositories-licenses); it has no cc-by-sa-2.5.
HUB_LICENSES = {"cc-by-sa-3.0", "cc-by-sa-4.0", "cc-by-3.0", "cc-by-4.0", "cc0-1.0", "unknown"}
LICENSE_LINK = "https://stackoverflow.com/help/licensing"
SHARE_ALIKE = re.compile(r"cc-by-sa-(2\.5|3\.0|4\.0)")
DATES = (
    "What people post on Stack Exchange is licensed under CC BY-SA, in the version of the day (UTC): 2.5 before "
    "2011-04-08, 3.0 from then on, 4.0 since 2018-05-02. An edited post has the version of the day of its last edit. "
    "A dump since 2020 states each post's licence; for an older one it follows from the date (unknown: the date "
    f"cannot be read), and for a published table it is the one on that table's card. See <{LICENSE_LINK}>.")
DUTIES = (
    "Who shows a post or passes it on must say which site it is from, link to the question, name the author of each "
    "post shown and link the name to the profile, name the licence with a link to it, say what was changed, and share "
    "adaptations under the same licence or one that it allows.")


def join_blocks(*parts: str) -> str:
    """Join the non-empty parts by blank lines."""
    return "\n\n".join(part for part in parts if part)


def format_section(title: str, *parts: str) -> str:
    """Build a section from its non-empty parts; "" if all are empty."""
    return join_blocks(f"## {title}", *parts) if any(parts) else ""


def hub_license(names: dict) -> dict:
    """Return the card's license metadata: the Hub's identifiers, or 'other' if it lacks one of them."""
    licenses = sorted({license_identifier(name) for name in names})
    if set(licenses) <= HUB_LICENSES:
        return {"license": licenses[0] if len(licenses) == 1 else licenses} if licenses else {}
    link = {"license_link": LICENSE_LINK} if all(map(SHARE_ALIKE.fullmatch, licenses)) else {}
    return {"license": "other", "license_name": "-and-".join(licenses)[:100], **link}


def origin_metadata(origin: Origin) -> dict:
    """Return language, data sets and licence; no licence for a base that is not the pipeline's own: it is not known."""
    languages = sorted({LANGUAGES.get(str(site).lower(), "en") for site in origin.pairs.get("sites", {})})
    values = {"language": languages, "datasets": origin.datasets}
    return {name: value for name, value in values.items() if value} | (
        hub_license(origin.pairs.get("licenses", {})) if origin.base == "scratch" else {})


def license_identifier(name: object) -> str:
    """Return a licence's name in the Hub's form: 'CC BY-SA 4.0' to 'cc-by-sa-4.0'."""
    return re.sub(r"[^a-z0-9.]+", "-", str(name).lower()).strip("-.") or "unknown"


def settings_table(config: dict) -> str:
    """Build a table of settings; a list is joined by commas."""
    lists = {name: value if isinstance(value, list | tuple) else [value] for name, value in config.items()}
    texts = {name: ", ".join(str(value) for value in values if value is not None) for name, values in lists.items()}
    return format_table(["setting", "value"], [(escape_cell(name), escape_cell(text)) for name, text in texts.items()])


def sites_table(metrics: dict, *names: str) -> str:
    """Build a table of the sites with their counts `names` in the metrics of posts or pairs."""
    sites = metrics.get("sites", {})
    rows = [(escape_cell(site), *(counts.get(name, 0) for name in names)) for site, counts in sites.items()]
    return format_table(["site", *names], add_sum_row(top_rows(rows, rest="more sites")))


def licence_section(metrics: dict, where: str) -> str:
    """Build the section on licences: rules, posts per licence, duties, and where the attribution is."""
    names = format_table(["licence", "posts"], add_sum_row(top_rows([
        (_link_licence(name), count) for name, count in metrics.get("licenses", {}).items()], rest="more licences")))
    return format_section("Licence and attribution", DATES, names, DUTIES, where)


def _link_licence(name: str) -> str:
    version = SHARE_ALIKE.fullmatch(license_identifier(name))
    cell = escape_cell(name)
    return f"[{cell}](https://creativecommons.org/licenses/by-sa/{version[1]}/)" if version else cell


def limits_section(*limits: str) -> str:
    """Build the section on known limits, a list."""
    return format_section("Known limits", "\n".join(f"- {limit}" for limit in limits))
