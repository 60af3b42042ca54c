"""What the documents must name and lead to: pages within reach, and references that leave nothing out."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SOURCES = ("cli", "plugins", "src", "guests", "python")


def links(page):
    """The pages that a page leads to, but for the list of pages beside each in the site."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = {(page.parent / link.partition("#")[0]).resolve() for link in re.findall(r"\]\(([^)\s]+)\)", text)}
    return {target for target in found if target.suffix == ".md" and target.is_file()}


def within(clicks):
    """The pages that can be reached from the first one by so many clicks."""
    reached = edge = {DOCS / "README.md"}
    for _ in range(clicks):
        edge = set().union(*map(links, edge)) - reached
        reached = reached | edge
    return reached


@pytest.mark.parametrize("page, heading", [
    ("schemes.md", "# Choose a scheme"),
    ("schemes.md", "## Will it fit?"),
    ("troubleshooting/not-active.md", "## No layer is packed"),
    ("saving.md", "## llama-server"),
    ("saving.md", "## Going back"),
])
def test_a_newcomers_question_is_answered_within_two_clicks(page, heading):
    assert DOCS / page in within(2)
    assert f"{heading}\n" in (DOCS / page).read_text()


def test_every_page_can_be_reached():
    assert set(DOCS.rglob("*.md")) - within(5) == set()


def test_every_page_is_in_the_sites_list():
    listed = set(re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert listed == pages | {"CHANGELOG.md", "CONTRIBUTING.md"}


def test_every_variable_is_named():
    """Those that programs name in quotes, but for two options of the build."""
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in (".cpp", ".h", ".py")]
    text = "".join(path.read_text() for path in files if path.is_file())
    named = set(re.findall(r'"(LOWKV_[A-Z_]+)"', text)) - {"LOWKV_CUDA", "LOWKV_OPENCL"}
    assert len(named) >= 10
    page = (DOCS / "reference/variables.md").read_text()
    assert {name for name in named if f"`{name}`" not in page} == set()


def test_every_function_of_the_c_interface_is_named():
    declared = re.findall(r"LOWKV_API [\w* ]+?[ *](lowkv_\w+)\(", (ROOT / "include/lowkv/lowkv.h").read_text())
    assert len(declared) >= 19
    page = (DOCS / "reference/c.md").read_text()
    assert [name for name in declared if f"`{name}(" not in page] == []


def test_every_name_of_the_python_package_is_named():
    tree = ast.parse((ROOT / "python/lowkv/__init__.py").read_text())
    names = next(ast.literal_eval(node.value) for node in tree.body
                 if isinstance(node, ast.Assign) and node.targets[0].id == "__all__")
    page = (DOCS / "reference/python.md").read_text()
    assert [name for name in names if not re.search(rf"\b{name}\b", page)] == []


def examples():
    """Command lines of lowkv in the programs of the pages: page, subcommand, options before `--`."""
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        for block in (text for language, text in blocks if language in ("sh", "yaml")):
            for words in re.findall(r"(?:^|[ /(])lowkv ([a-z][^#\n]*)", block.replace("\\\n", " "), re.MULTILINE):
                own = re.split(r" --(?: |$)", words)[0].split()
                yield page, own[0], {word for word in own if re.fullmatch(r"--?[a-z][\w-]*", word)}


def test_examples_name_commands_and_options_that_there_are():
    helps = {}
    for page in (DOCS / "reference").glob("command*.md"):
        sections = re.findall(r"^## lowkv (\w+)[^\n]*\n\n```text\n(.*?)^```", page.read_text(), re.M | re.S)
        for name, text in sections:
            helps[name] = helps.get(name, "") + text
    found = list(examples())
    assert len(found) > 20
    for page, command, options in found:
        assert command in helps, f"{page}: lowkv {command}"
        known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", helps[command]))
        assert options <= known, f"{page}: lowkv {command} has no {' '.join(options - known)}"


def test_targets_that_pages_name_are_in_the_makefile():
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]:
        named = set(re.findall(r"(?:`|^)make ([a-z][\w-]*)", page.read_text(), re.MULTILINE))
        assert named <= targets, f"{page}: make {' '.join(named - targets)}"
