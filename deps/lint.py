#!/usr/bin/env python3
"""Checks the form of our own files: clang-format, ruff, clang-tidy (on what build/release and, if it was built,
the Python package compile), the links between documents, the documents that comments name, an entry in
docs/troubleshooting for every message, and what the program itself makes of documents. Needs `make build` first, and
`make package` for the Python package, for the compile commands."""

import argparse
import ast
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import time
import tokenize
from pathlib import Path

import command_reference
import messages
import scheme_tables

ROOT = Path(__file__).resolve().parent.parent
CODE = ("include", "src", "guests", "devices", "plugins", "python", "cli", "tests", "examples", "bench")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "eval", "bench", "examples")
NAMING = (*CODE, *DOCUMENTS, "deps", "tools", "cmake", "Makefile", "CMakeLists.txt", ".ci")  # what names documents
SYNONYMS = {"rung": re.compile(r"(?<![a-z])(?:tiers?|finer)(?![a-z])|step of the ladder", re.IGNORECASE)}
LONG = 400
PAGE = 200  # lines that a page may have
SHORTER = {"README.md": 150, "CONTRIBUTING.md": 150}
RELEASE, PACKAGE = ROOT / "build" / "release", ROOT / "build" / "python" / "cmake"


def lint_tool(name):
    """The pinned program from the environment venv-lint, which is made if it is not there."""
    subprocess.run([sys.executable, ROOT / "deps" / "setup.py", "venv-lint"], check=True)
    paths = subprocess.run([sys.executable, ROOT / "deps" / "setup.py", "--paths"], check=True,
                           capture_output=True, text=True).stdout
    return str(Path(json.loads(paths)["LOWKV_LINT_PYTHON"]).parent / name)


def our_code():
    return sorted(path for folder in CODE for path in (ROOT / folder).rglob("*")
                  if path.suffix in (".h", ".cpp") and path.is_file())


def check_format(rewrite):
    tool, files = lint_tool("clang-format"), our_code()
    print(f"clang-format: {len(files)} files", flush=True)
    mode = ["-i"] if rewrite else ["--dry-run", "-Werror"]
    return subprocess.run([tool, *mode, *map(str, files)], check=False).returncode == 0


def check_python():
    return subprocess.run([lint_tool("ruff"), "check", ROOT], check=False).returncode == 0


def gcc_includes():
    """omp.h is GCC's. Searched last, so that clang's own intrinsics headers stay in front of GCC's."""
    found = subprocess.run(["g++", "-print-file-name=include"], capture_output=True, text=True, check=False)
    return ["--extra-arg=-idirafter", f"--extra-arg={found.stdout.strip()}"] if found.returncode == 0 else []


def check_tidy(builds, only):
    ours, folders = set(map(str, our_code())), {}  # of a file: the first build that compiles it
    for build in builds:
        for command in json.loads((build / "compile_commands.json").read_text()):
            folders.setdefault(command["file"], str(build))
    files = sorted(f for f in folders.keys() & ours
                   if not only or any(word in str(Path(f).relative_to(ROOT)) for word in only))
    if not files:
        print(f"clang-tidy: no file's path has {' or '.join(only)}", flush=True)
        return False
    arguments = [lint_tool("clang-tidy"), "--quiet", "--extra-arg=-w",  # warnings are the compiler's
                 *gcc_includes()]
    print(f"clang-tidy: {len(files)} files", flush=True)

    def tidy(file):
        start = time.monotonic()
        done = subprocess.run([*arguments, "-p", folders[file], file], capture_output=True, text=True, check=False)
        return file, done, time.monotonic() - start

    good = True
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        jobs = [pool.submit(tidy, file) for file in files]
        for count, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            file, done, seconds = job.result()
            print(f"[{count}/{len(files)}] {Path(file).relative_to(ROOT)}: {seconds:.0f} s", flush=True)
            if done.returncode != 0:
                good = False
                print(done.stdout, done.stderr, sep="\n", flush=True)
    return good


def headings(text):
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return {heading.replace("`", "") for heading in re.findall(r"^#+ +(.*?) *#*$", text, re.MULTILINE)}


def anchors(text):
    """The names that GitHub gives to a document's headings."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings(text)}


def words_of(path):
    """A file's prose, one line: of Python the comments and the strings with blanks in them, of others all."""
    if path.suffix == ".py":
        with tokenize.open(path) as file:
            tokens = list(tokenize.generate_tokens(file.readline))
        comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
        strings = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        # Comments of several lines are joined, and a string's end is none's beginning.
        return re.sub(r"\s+#?\s*", " ", "\n".join(comments) + "\n" + "\n|\n".join(
            text for text in strings if isinstance(text, str) and re.search(r"\s", text)))
    text = path.read_text(errors="replace")
    if path.suffix == ".md":
        text = re.sub(r"^```.*?^```|\[[^\]]*\]\([^)]*\)", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r'"\s*\n\s*"', "", text)  # one C++ string in two lines
    return re.sub(r"\s*\n\s*(?://+|#+)?\s*", " ", text)


def wrong_mention(path, mention):
    """What is wrong with a document's name in a file's prose, with its heading where one follows; or None."""
    name, heading, number = mention.groups()
    if name.startswith(("/", "build/")):
        return None  # not a file of ours, or made by a test
    folders = (ROOT, ROOT / "src", ROOT / "guests", path.parent)
    found = [folder / name for folder in folders if (folder / name).is_file()]
    if not found:
        return "no such file"
    if number:
        return "name the section by its heading, in quotes"
    return "no such heading" if heading and heading not in headings(found[0].read_text()) else None


def wrong_mentions():
    """Documents that comments, messages and pages name, `docs/quality.md` or with a heading `..., "Passkey"`."""
    document = re.compile(r'(/?(?:[\w.-]+/)*\w[\w.-]*\.md)\b(?:, "([^"]+)"|,? ((?:sections? )?\d))?')
    files = {p for name in NAMING for p in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
             if p.is_file() and (p.suffix in (".h", ".cpp", ".py", ".md", ".sh", ".txt", ".cmake", "")) and
             "__pycache__" not in p.parts}
    return [f"{path.relative_to(ROOT)}: {mention[0]}: {problem}" for path in sorted(files)
            for mention in document.finditer(words_of(path)) if (problem := wrong_mention(path, mention))]


def synonyms():
    """Other words for what the glossary (docs/architecture.md, "Words") has a word for."""
    ours = [*our_code(), *(p for name in CODE for p in (ROOT / name).rglob("*.py")),
            *(p for name in DOCUMENTS for p in (ROOT / name).rglob("*.md")), ROOT / "README.md"]
    return [f"{path.relative_to(ROOT)}: {found[0]}: say {word}" for path in ours for word, others in SYNONYMS.items()
            for found in others.finditer(path.read_text())]


def named_paths(text):
    """Files that a page's text names by their paths in the tree."""
    folders = "bench|cli|cmake|deps|devices|docs|eval|examples|include|plugins|python|src|tests"
    return sorted(set(re.findall(rf"`((?:{folders})/[\w./-]+)(?: [^`\n]*)?`(?!\)?\s*\(?of commit)", text)))


def wrong_paths(page):
    """Those that are not there."""
    return [f"{page.relative_to(ROOT)}: {path}: no such file" for path in named_paths(page.read_text())
            if not (ROOT / path).exists()]


def recipes():
    """The sections "Adding ..." of CONTRIBUTING.md, and the files that each names."""
    sections = re.split(r"^## ", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    return {section.partition("\n")[0].removeprefix("Adding "): named_paths(section) for section in sections
            if section.startswith("Adding ")}


def unlike_elsewhere(page):
    """What GitHub shows and the site does not: a list without a blank line before it, and blocks within lists."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^(?![-*#|>\s]|\d+\. |<!--).+\n(?:- |\d+\. ).*", text, re.MULTILINE)
    found += re.findall(r"^ {1,3}(?:```|[|]|- |\d+\. ).*", text, re.MULTILINE)
    rule = "the site needs a blank line before a list, and no list, table or program within one"
    return [f"{page.relative_to(ROOT)}: {lines.splitlines()[-1].strip()[:60]}: {rule}" for lines in found]


def wrong_pages(pages):
    """Pages that have grown too long, and recipes without files."""
    lengths = {str(page.relative_to(ROOT)): page.read_text().count("\n") for page in pages}
    most = dict.fromkeys(lengths, PAGE) | SHORTER
    return ([f"{name}: {lines} lines, of {most[name]} at most" for name, lines in lengths.items()
             if lines > most[name]] +
            [f"CONTRIBUTING.md: the recipe for {name} names no files" for name, files in recipes().items()
             if not files])


def check_documents():
    pages = [p for name in DOCUMENTS for p in ([ROOT / name] if name.endswith(".md") else (ROOT / name).rglob("*.md"))]
    mentions = wrong_mentions() + wrong_pages(pages) + messages.problems() + synonyms()
    broken = 0
    for page in pages:
        text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(<?([^)>\s]+)>?(?: \"[^\"]*\")?\)", text):
            if re.match(r"[a-z]+:", link):
                continue  # another site
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists():
                problem = "no such file"
            elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
                problem = "no such heading"
            else:
                continue
            broken += 1
            print(f"{page.relative_to(ROOT)}: {link}: {problem}")
        mentions += unlike_elsewhere(page)
        if page.name != "CHANGELOG.md":  # which tells of the past, too
            mentions += wrong_paths(page)
    print(*mentions, sep="\n", end="\n" if mentions else "")
    for path in our_code() + sorted((ROOT / "deps").glob("*.py")):
        lines = path.read_text().count("\n")
        if lines > LONG:
            print(f"warning: {path.relative_to(ROOT)} has {lines} lines (more than {LONG})")
    print("recipes:", ", ".join(f"{name} ({len(files)} files)" for name, files in recipes().items()))
    print(f"documents: {len(pages)} pages, {broken} broken links, {len(mentions)} wrong names or lengths", flush=True)
    return broken == 0 and not mentions


def check_tables():
    """The figures and words in documents that follow from the program."""
    command = RELEASE / "bin" / "lowkv"
    problems = scheme_tables.problems(command) + command_reference.problems(command)
    print(*problems, f"tables: {len(problems)} problems", sep="\n", flush=True)
    return not problems


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", action="store_true", help="rewrite the code with clang-format, check nothing")
    parser.add_argument("--check", choices=("format", "python", "tidy", "documents", "tables"), help="only this check")
    parser.add_argument("--build", type=Path, action="append", help="folder of compile_commands.json")
    parser.add_argument("only", nargs="*", help="clang-tidy: only files whose path has one of these words")
    args = parser.parse_args()
    if args.format:
        return 0 if check_format(rewrite=True) else 1
    builds = args.build or [RELEASE] + [b for b in (PACKAGE,) if (b / "compile_commands.json").exists()]
    checks = {"format": lambda: check_format(rewrite=False), "python": check_python,
              "documents": check_documents, "tables": check_tables,
              "tidy": lambda: check_tidy([b.resolve() for b in builds], args.only)}
    failed = [name for name, check in checks.items() if args.check in (None, name) and not check()]
    print(f"failed: {', '.join(failed)}" if failed else "lint: all good")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
