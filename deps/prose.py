"""Plain prose out of HTML and Markdown pages."""

import re
from html.parser import HTMLParser


class _Page(HTMLParser):
    """Collects the text of <div class="para"> (Publican's paragraph) and the address of the next page.
    A paragraph ends where a nested or a following block starts; programs are left out."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.paragraphs, self.text, self.programs, self.next = [], None, 0, None
        self.feed(page.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "link" and attributes.get("rel") == "next":
            self.next = attributes["href"]
        elif tag == "pre":
            self.programs += 1
        elif tag in ("div", "ul", "table"):
            self.flush()
            if attributes.get("class") == "para":
                self.text = []

    def handle_endtag(self, tag):
        if tag == "div":
            self.flush()
        elif tag == "pre":
            self.programs -= 1

    def handle_data(self, data):
        if self.text is not None and not self.programs:
            self.text.append(data)

    def flush(self):
        if self.text is not None:
            paragraph = " ".join("".join(self.text).split())
            if paragraph.count(" ") >= 7:  # shorter ones are captions and labels
                self.paragraphs.append(paragraph)
        self.text = None


def from_html(folder):
    """The paragraphs of a book in reading order: from index.html along the "next" links."""
    paragraphs, name, seen = [], "index.html", set()
    while name and name not in seen:
        seen.add(name)
        page = _Page(folder / name)
        paragraphs += page.paragraphs
        name = page.next
    return "\n\n".join(paragraphs) + "\n"


def from_markdown(pages, characters):
    """Joins paragraphs of the pages up to about `characters`; code, tables and markup are left out."""
    kept, size = [], 0
    for page in pages:
        text = page.read_text(encoding="utf-8")
        text = re.sub(r"^( *)(```|~~~).*?^\1\2", "", text, flags=re.MULTILINE | re.DOTALL)
        text = re.sub(r"<!--.*?-->|<[^<>\n]+>", "", text, flags=re.DOTALL)
        text = re.sub(r"!?\[([^\]]*)\]\((?:[^()]|\([^()]*\))*\)", r"\1", text)
        text = re.sub(r"[*`]{1,3}|\b_|_\b", "", text)
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*[-*+#] )", text):
            paragraph = re.sub(r"^[-+>\s\d.]+", "", paragraph)
            paragraph = " ".join(paragraph.split())
            if paragraph.startswith(("#", "|", "[!")) or paragraph.count(" ") < 15 or "http" in paragraph:
                continue
            if size > characters:
                return "\n\n".join(kept) + "\n"
            kept.append(paragraph)
            size += len(paragraph) + 2
    return "\n\n".join(kept) + "\n"
