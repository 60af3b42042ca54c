#!/usr/bin/env python3
"""Lines of the product: C++ and Python without blanks, comments and docstrings, by folder."""
import ast
import io
import re
import sys
import tokenize
from pathlib import Path

FOLDERS = ("include", "src", "python", "plugins", "cli")
# A literal, which may hold what looks like a comment, or a comment.
CPP = re.compile(r'R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|//[^\n]*|/\*.*?\*/', re.DOTALL)


def cpp_lines(text):
    text = CPP.sub(lambda m: "\n" * m[0].count("\n") if m[0].startswith(("//", "/*")) else m[0], text)
    return sum(bool(line.strip()) for line in text.splitlines())


def python_lines(text):
    lines, docs = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
                              tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            docs.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines - docs)


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    total = 0
    for folder in FOLDERS:
        files = [path for path in (root / folder).rglob("*") if path.suffix in (".h", ".cpp", ".py") and path.is_file()]
        count = sum((python_lines if path.suffix == ".py" else cpp_lines)(path.read_text()) for path in files)
        total += count
        print(f"{folder:10} {count:7,}  in {len(files)} files")
    print(f"{'all':10} {total:7,}")


if __name__ == "__main__":
    main()
