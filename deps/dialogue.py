"""Plain dialogue out of PyPI's chatterbot-corpus: pages of short exchanges in one shape of YAML."""

import re
import zipfile

LEFT_OUT = "coding"  # its answers are programs


def exchanges(page):
    """Each exchange of a page, the list of what is said. ("- - " begins one, "  - " what is said next.)"""
    found = []
    for line in page.splitlines():
        if said := re.match(r"(- - |  - )(.*\S)", line):
            if said[1] == "- - ":
                found.append([])
            found[-1].append(said[2].strip("\"'"))
    return found


def from_wheel(path):
    """All English pages, each exchange once, two speakers taking turns."""
    with zipfile.ZipFile(path) as archive:
        pages = sorted(name for name in archive.namelist() if re.search(r"data/english/\w+\.yml$", name))
        told = [tuple(said) for name in pages if LEFT_OUT not in name
                for said in exchanges(archive.read(name).decode("utf-8"))]
    return "\n\n".join("\n".join(f"{('User', 'Assistant')[i % 2]}: {words}" for i, words in enumerate(said))
                       for said in dict.fromkeys(told)) + "\n"
