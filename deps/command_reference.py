#!/usr/bin/env python3
"""docs/reference/command*.md: what `lowkv COMMAND --help` prints, for every command, and lowkv-bench's. Writes the
pages, or with --check says which differ. `deps/lint.py --check tables` runs this. Needs `make build`."""

import os
import re
import subprocess
import sys

from scheme_tables import ROOT, write_or_check

FOLDER = ROOT / "docs/reference"
# The pages and their commands; those that are not named are on the first one.
FIRST, BENCH = "command", "command-measuring"
PAGES = {FIRST: (), "command-models": ("generate", "compare", "calibrate"), "command-plans": ("plan",),
         BENCH: ("lowkv-bench",)}


def help_of(command, words):
    """Its text, as it is without settings in the environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("LOWKV_", "GGML_"))}
    # What is set here keeps the command from starting itself anew beside busy neighbours.
    done = subprocess.run([command, *words, "--help"], check=True, capture_output=True, text=True,
                          env={**clean, "OMP_WAIT_POLICY": "passive"})
    # How many threads is a matter of the machine.
    return re.sub(r"(--threads UINT:INT in \[[^]]*\])=\S+", r"\1", done.stdout.rstrip())


def subcommands(text):
    listed = text.partition("\nSubcommands:\n")[2].partition("\n\n")[0]
    return re.findall(r"^  ([a-z][\w-]*) ", listed, re.MULTILINE)


def pages(command):
    """The text of each page."""
    first = help_of(command, [])
    links = {name: f"[{', '.join(names) or 'the first'}]({name}.md)" for name, names in PAGES.items()}
    out = {name: [f"# The command lowkv{': ' if names else ''}{', '.join(names)}", ""] for name, names in PAGES.items()}
    for name in out:
        out[name] += ["Written by `deps/command_reference.py` from `lowkv --help`. Other pages: " + ", ".join(
            link for other, link in links.items() if other != name) + ".", ""]
    out[FIRST] += ["```text", first, "```", ""]
    bench = command.with_name("lowkv-bench")
    named = [(command, name, next((page for page, names in PAGES.items() if name in names), FIRST))
             for name in subcommands(first)]
    named += [(bench, name, BENCH) for name in subcommands(help_of(bench, []))]
    for program, name, page in named:
        out[page] += [f"## {program.name} {name}", "", "```text", help_of(program, [name]), "```", ""]
    return {name: "\n".join(lines) for name, lines in out.items()}


def problems(command, rewrite=False):
    """Pages that are not what the command says."""
    if not command.exists():
        return [f"{command} is not there: make build"]
    out = []
    for name, text in pages(command).items():
        page = FOLDER / f"{name}.md"
        if not page.exists() or page.read_text() != text:
            if rewrite:
                page.write_text(text)
            else:
                out.append(f"docs/reference/{page.name} is not what --help says: deps/command_reference.py writes it")
    return out


if __name__ == "__main__":
    sys.exit(write_or_check(problems, __doc__))
