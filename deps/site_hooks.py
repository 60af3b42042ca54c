"""What MkDocs needs to know of this repository (hooks of mkdocs.yml): the pages outside docs/, the API reference of the
Python package where `make docs` has made it, and links out of docs/, which lead to files that are not in the site."""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md")  # of the root; in the site they lie beside those of docs/
API = ROOT / "build/docs"
API_PAGE = "reference/python.md"
# Where the sources can be read, for links to them: https://.../blob/main. Without it such links are plain text.
SOURCES = os.environ.get("LOWKV_SOURCES_URL", "").rstrip("/")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files, config):
    for name in PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    for path in API.rglob("*") if API.is_dir() else ():
        if path.is_file():
            inside = path.relative_to(API).as_posix()
            files.append(File.generated(config, f"api/{inside}", abs_src_path=str(path)))
    return files


def moved(page, link):
    """A page's link as the site has it; None if it leads to a file that the site lacks."""
    path, mark, anchor = link.partition("#")
    if not path or re.match(r"[a-z]+:", link):
        return link
    folder = "" if page in PAGES else posixpath.join("docs", posixpath.dirname(page))
    target = posixpath.normpath(posixpath.join(folder, path))
    if target in PAGES:
        inside = target
    elif target.startswith("docs/") and not path.endswith("/"):
        inside = target.removeprefix("docs/")
    else:
        return f"{SOURCES}/{target}{mark}{anchor}" if SOURCES else None
    return posixpath.relpath(inside, posixpath.dirname(page) or ".") + mark + anchor


def on_post_build(config):
    """Nothing is fetched from elsewhere by whoever reads the site."""
    loads = re.compile(r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="((?:https?:)?//[^"]*)"')
    for path in Path(config.site_dir).rglob("*.html"):
        if path.relative_to(config.site_dir).parts[0] != "api" and (found := loads.search(path.read_text())):
            raise PluginError(f"{path} loads {found[1]}")


def on_page_markdown(markdown, page, config, files):
    name = page.file.src_uri

    def link(found):
        mark, text, target = found.groups()
        to = moved(name, target)
        return text if to is None else f"{mark}[{text}]({to})"

    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    markdown = "".join(part if place % 2 else LINK.sub(link, part) for place, part in enumerate(parts))
    if name == API_PAGE and files.get_file_from_path("api/lowkv.html"):
        markdown += "\nThis site has it: [lowkv](../api/lowkv.html).\n"
    return markdown
