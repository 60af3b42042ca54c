#!/usr/bin/env python3
"""Process memory of stock llama-completion at a full 8192-token context, f16 against the plug-in.

Peak resident memory is the operating system's own count for the finished process. Everything but the
cache is the same in both, and llama.cpp touches all of its f16 cache when it clears it, so the
cache's share is the f16 buffer in one run, and what is left of it after the difference in the other.

    make build && python3 eval/memory.py
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from paths import ROOT, set_up_paths

CONTEXT = 8192


def run(paths, build, text, scheme):
    """Peak memory in MiB and llama.cpp's own "KV buffer size" in MiB."""
    command = [f"{paths['LOWKV_LLAMA_BUILD']}/llama-completion", "-m", paths["LOWKV_MODEL"],
               "-f", text, "-c", str(CONTEXT), "-n", "16", "-t", "2", "-fa", "on", "-no-cnv",
               "--temp", "0", "--no-warmup", "--verbose"]
    environment = dict(os.environ)
    if scheme:
        command += ["-dev", "LOWKV"]
        environment |= {"GGML_BACKEND_PATH": str(build / "lib/libggml-lowkv.so"),
                        "LOWKV_SCHEME": scheme}
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        _, status, usage = os.wait4(child.pid, 0)
        log.seek(0)
        output = log.read()
    if status or ("lowkv: active" in output) != bool(scheme):
        sys.exit(f"{' '.join(command)} failed:\n{output[-2000:]}")
    return usage.ru_maxrss / 1024, float(re.findall(r"KV buffer size = +([\d.]+)", output)[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build/release", type=Path)
    parser.add_argument("--scheme", default="kivi2")
    args = parser.parse_args()
    paths = set_up_paths()
    handbook = Path(paths["LOWKV_HANDBOOK_TEXT"]).read_text()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text")
        text.write_text(handbook[:34000])
        stock, stock_buffer = run(paths, args.build, text, None)
        packed, packed_buffer = run(paths, args.build, text, args.scheme)
    share = stock_buffer - (stock - packed)
    print("| cache | KV buffer size, MiB | peak process memory, MiB | of that the cache, MiB |")
    print("|---|---|---|---|")
    print(f"| stock f16 | {stock_buffer:.1f} | {stock:.0f} | {stock_buffer:.0f} |")
    print(f"| {args.scheme} | {packed_buffer:.1f} | {packed:.0f} | {share:.0f} |")
    print(f"\nThe cache's share of process memory falls by {100 * (1 - share / stock_buffer):.0f} %.")


if __name__ == "__main__":
    main()
