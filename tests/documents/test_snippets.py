"""The C and C++ in documents compiles, put into a function that is given what the surrounding program would have."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BEFORE = '#include "lowkv/attention.h"\n#include "lowkv/kv_cache.h"\n#include "lowkv/serial.h"\n#include <iostream>\n'
CPP = [  # what each snippet takes, in the order of pages and lines
    "lowkv::Rows keys, lowkv::Rows values, std::uint32_t tokens, std::span<const lowkv::KvAttention> queries, "
    "const lowkv::AttentionParams& params, lowkv::Executor& executor",
    "const lowkv::Scheme& scheme, const float* keys, const float* values, std::uint32_t tokens, "
    "const lowkv::AttentionIO& io, const lowkv::AttentionParams& params, lowkv::AttentionWorkspace& workspace, "
    "lowkv::Executor& executor",
    "",
]
C = ["lowkv_cache* cache, uint32_t chat, lowkv_rows keys, lowkv_rows values, uint32_t tokens, "
     "lowkv_attention attention"]


def snippets(language):
    """Where each block of code begins, and its text."""
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text()
        for found in re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            yield f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}", found[1]


@pytest.mark.parametrize(("language", "standard", "compiler", "taken", "before"), [
    ("cpp", "c++20", os.environ.get("CXX") or "c++", CPP, BEFORE),
    ("c", "c99", os.environ.get("CC") or "cc", C, '#include "lowkv/lowkv.h"\n')], ids=["cpp", "c"])
def test_the_code_compiles(language, standard, compiler, taken, before):
    for (place, code), arguments in zip(snippets(language), taken, strict=True):
        includes = "".join(line + "\n" for line in code.splitlines() if line.startswith("#include"))
        body = "".join(line + "\n" for line in code.splitlines() if not line.startswith("#include"))
        program = f'{before}{includes}void run({arguments or "void"});\nvoid run({arguments or "void"}) {{\n{body}}}\n'
        run = subprocess.run([compiler, f"-std={standard}", "-fsyntax-only", "-x", "c++" if language == "cpp" else "c",
                              "-I", ROOT / "include", "-"], input=program, text=True, capture_output=True)
        assert run.returncode == 0, f"{place}:\n{run.stderr}"
