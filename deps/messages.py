#!/usr/bin/env python3
"""The errors and warnings that users can meet, collected from the sources, against docs/troubleshooting.

A message is a string in a call that throws, raises or reports (SPEAKERS, and those of Python), or one that is worded
where it isn't said (RETURNED, WORDED). Its variable parts are left out. A page of docs/troubleshooting has messages in
blocks of ```text, one a line, with <...> for what varies; a line stands for each message that has its words in its
order. Every message needs a line, and every line a message. `deps/lint.py --check documents` runs this."""

import argparse
import ast
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("cli", "bench/kernels", "plugins", "src", "guests", "include", "python", "devices",
           "deps/plugin_for.py")
PAGES = "docs/troubleshooting"
SPEAKERS = {"Error", "Failure", "FileInUse", "UsageError", "runtime_error", "refuse", "reject", "fail", "bad", "report",
            "report_once", "say", "first_broken", "learn_refusal", "learn_unsupported"}
WHOLE = {"Error", "refuse", "reject", "fail"}
PRINTERS = {"fprintf", "snprintf"}  # in programs, of lines that begin with "lowkv: ", which the plug-in's all do
REASONS = {"reason", "why", "problem"}  # variables of C++ that hold a message
LEAST = 4  # words of a message in these:
# Sources whose functions return messages, and those in which strings are messages wherever they stand.
RETURNED = ("cli/run/memory.cpp", "cli/run/watcher.cpp", "plugins/llama.cpp/attention_op.cpp",
            "plugins/llama.cpp/backend_type.cpp", "plugins/llama.cpp/host.cpp", "plugins/llama.cpp/layer_cache.cpp")
WORDED = ("cli/common/program_options.cpp", "plugins/llama.cpp/buffer_state.cpp",
          "src/scheme/unserved.cpp")
# Messages that need no entry, and why.
EXCLUDED = {
    "src/attention/": "arguments of a program that links the library; the message names the argument and what is legal",
    "src/cache/batch": "the same",
    "src/cache/kv_cache.cpp": "the same",
    "src/cache/paged": "the same, and vLLM's pages, of which our own plug-in gives the arguments",
    "src/cache/query_energy.cpp": "the same",
    "src/cache/blocks": "the same",
    "src/c/": "the same, in C",
    "guests/filters/": "the same",
    "src/codec/": "the same",
    "src/plan/": "the same: shapes and calibrations that a program makes itself; those of files are checked in "
                 "guests/calibration/file/",
    "guests/row/rope_table.cpp": "the same",
    "guests/row/calibration_check.cpp": "the same",
    "guests/row/neutral_calibration.cpp": "the same",
    "guests/row/tests/": "tests",
    "guests/calibration/tests/": "tests",
    "guests/filters/tests/": "tests",
    "include/": "the same",
    "python/src/": "arguments between the Python package and its extension, which a user does not write",
    "plugins/llama.cpp/c_api.cpp": "JSON for lowkv.llama_cpp.stats()",
    "python/cuda/": "the emulation of CUDA, for tests",
    "devices/host/": "what a device's own code relies on; failures on the way are said by devices/*/queue.cpp",
}
# ... but for these, which users meet.
INCLUDED = ("src/cache/image.cpp", "src/plan/plan.cpp", "python/src/device.cpp", "python/src/openmp.cpp",
            "python/src/scheme.cpp", "devices/host/memory.cpp", "devices/host/plan.cpp", "devices/host/queue.cpp")
TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|R"\((?P<raw>.*?)\)"|"(?P<string>(?:\\.|[^"\\\n])*)"|\'(?:\\.|[^\'\\])+\'|'
                   r"(?P<name>[A-Za-z_]\w*)|(?P<sign>\S)", re.DOTALL)


class Message(NamedTuple):
    source: str
    line: int
    text: str  # with "..." for variable parts


class Token(NamedTuple):
    kind: str
    text: str
    line: int


def tokens(text):
    for found in TOKEN.finditer(text):
        kind = found.lastgroup
        if kind is not None:
            value = found[kind]
            if kind == "string":
                value = re.sub(r"\\[nt]", " ", value).replace('\\"', '"')
            yield Token("string" if kind == "raw" else kind, value, text.count("\n", 0, found.start()) + 1)


def arguments(found, begin):
    """The arguments of the call whose bracket opens at `begin`, each a list of tokens."""
    depth, out = 0, [[]]
    for token in found[begin:]:
        if token.kind == "sign" and token.text in "([{":
            depth += 1
            if depth == 1:
                continue
        elif token.kind == "sign" and token.text in ")]}":
            depth -= 1
            if depth == 0:
                return out
        if depth == 1 and token.text == "," and token.kind == "sign":
            out.append([])
        else:
            out[-1].append(token)
    return out


def worded(run):
    """The text of an expression: its strings, and "..." for what stands between them."""
    text = ""
    for token in run:
        if token.kind == "string":
            text += token.text
        elif not text.endswith("..."):
            text += "..."
    return text


def statement(found, begin):
    """The tokens up to the next semicolon."""
    end = next((place for place in range(begin, len(found)) if found[place].text == ";"), len(found))
    return found[begin:end]


def begins(found, place):
    """Whether a string begins here; C++ has it in one piece or several."""
    return found[place].kind == "string" and (place == 0 or found[place - 1].kind != "string")


def ending(found, place):
    return next(after for after in range(place, len(found)) if found[after].kind != "string")


def called(found, place, source):
    """What a call says if it is one that speaks: its arguments with strings in them."""
    name, given = found[place].text, arguments(found, place + 1)
    flat = [part for argument in given for part in (*argument, Token("sign", ",", 0))][:-1]
    if name == "first_broken":  # a table of rules: {{condition, message}, ...}
        return [flat[place:ending(flat, place)] for place in range(len(flat)) if begins(flat, place)]
    said = [argument for argument in given if any(part.kind == "string" for part in argument)]
    if name in WHOLE and said:  # its arguments make one message
        return [flat]
    if name in PRINTERS and said and (source.startswith("plugins/") or worded(said[0]).startswith("lowkv: ")):
        text = re.sub(r"%[-.\d]*(?:ll|l|z)?[a-z]", "...", worded(said[0]))
        return [[Token("string", text, found[place].line)]] if len(text.split()) >= LEAST else []
    return said if name in SPEAKERS else []


def of_cpp(path, name):
    found = list(tokens(path.read_text()))
    for place, token in enumerate(found[:-1]):
        said = []
        if name in WORDED and begins(found, place):
            said = [found[place:ending(found, place)]]
        elif token.text == "return" and name in RETURNED:
            said = [statement(found, place + 1)]
        elif token.text in REASONS and found[place + 1].text == "=" != found[place + 2].text:
            said = [statement(found, place + 2)]
        said = [run for run in said if len(worded(run).split()) >= LEAST]
        if token.kind == "name" and found[place + 1].text == "(":
            said += called(found, place, name)
        for run in said:
            yield Message(name, token.line, worded(run))


def string_of(node):
    """The text of a Python expression, as worded() has it."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "..."
    if isinstance(node, ast.JoinedStr):
        return "".join(map(string_of, node.values))
    if isinstance(node, ast.BinOp):
        return string_of(node.left) + string_of(node.right)
    return "..."


def strings(node):
    """The outermost strings of an expression, such as those of a list of reasons."""
    if isinstance(node, (ast.JoinedStr, ast.Constant, ast.BinOp)):
        return [node]
    return [text for child in ast.iter_child_nodes(node) for text in strings(child)]


def of_python(path, name):
    for node in ast.walk(ast.parse(path.read_text())):
        texts = []
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            texts = node.exc.args[:1]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in (
                "warn", "warning", "error"):
            texts = node.args[:1]
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "wrong":
            texts = strings(node.value)
        for text in map(string_of, texts):
            if text.count(" ") >= 2:
                yield Message(name, node.lineno, text)


def collected(root=ROOT):
    """All messages that need an entry."""
    out = []
    for source in map(root.joinpath, SOURCES):
        for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
            name = path.relative_to(root).as_posix()
            out_of_bounds = name not in INCLUDED and name.startswith(tuple(EXCLUDED))
            if not path.is_file() or out_of_bounds:
                continue
            if path.suffix in (".h", ".cpp"):
                out += of_cpp(path, name)
            elif path.suffix == ".py":
                out += of_python(path, name)
    return [message for message in out if len(words(message.text)) >= 2]


def words(text):
    return re.findall(r"[\w%+=-]*\w[\w%=]*", text.lower())


def pattern(line):
    """What a message's words, with a blank before and after each, must have."""
    parts = ["  ".join(words(part)) for part in re.split(r"<[^<>]*>|\.\.\.", line)]
    return re.compile(".*".join(re.escape(f" {part} ") for part in parts if part))


def entries(root=ROOT):
    """The lines of the blocks of ```text: page, line and pattern."""
    for page in sorted((root / PAGES).glob("*.md")):
        for block in re.findall(r"^```text\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                if len(words(re.sub(r"<[^<>]*>|\.\.\.", " ", line))) < 2:
                    raise SystemExit(f"{page.relative_to(root)}: {line}: too few words to stand for messages")
                yield page.relative_to(root).as_posix(), line, pattern(line)


def problems(root=ROOT):
    """Messages without an entry, and entries without a message."""
    messages, lines = collected(root), list(entries(root))
    spoken = [f" {'  '.join(words(re.sub('[.][.][.]', ' ', message.text)))} " for message in messages]
    used, out = set(), []
    for message, text in zip(messages, spoken, strict=True):
        found = [place for place, (_, _, wanted) in enumerate(lines) if wanted.search(text)]
        used.update(found)
        if not found:
            out.append(f"{message.source}:{message.line}: no entry in {PAGES} for: {message.text}")
    out += [f"{page}: no source says: {line}" for place, (page, line, _) in enumerate(lines) if place not in used]
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the messages")
    args = parser.parse_args()
    found = collected() if args.list else problems()
    print(*(f"{m.source}:{m.line}: {m.text}" for m in found) if args.list else found, sep="\n")
    return 1 if found and not args.list else 0


if __name__ == "__main__":
    sys.exit(main())
