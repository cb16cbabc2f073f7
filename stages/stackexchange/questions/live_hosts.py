"""Name the live hosts of sites whose dumps have another name: links must lead to the live site, for attribution.

Source: sedd/data/files_map.py of github.com/LunarWatcher/se-data-dump-transformer, read in 2026. Everywhere else a site
keeps the name of its dump, so that the order of its questions does not change.
"""

RENAMED = {"avp": "video", "beer": "alcohol", "cogsci": "psychology", "health": "medicalsciences",
           "materials": "mattermodeling", "moderators": "communitybuilding", "writers": "writing"}
SUFFIXES = (".stackexchange.com", ".meta.stackexchange.com")
LIVE_HOSTS = {old + suffix: new + suffix for old, new in RENAMED.items() for suffix in SUFFIXES}


def site_url(site: str) -> str:
    """Return the address of a site, given by the name of its dump."""
    return f"https://{LIVE_HOSTS.get(site, site)}"
