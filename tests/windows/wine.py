"""Windows programs under Wine, as the tests run them."""

import os
import subprocess
from pathlib import Path

from plugin_tools import PATHS, ROOT, Run

WINE = "/usr/lib/wine/wine64"
BUILD = ROOT / "build/windows"
MODEL = PATHS["LOWKV_MODEL"]
PREFIX = Path(os.environ.get("WINEPREFIX", Path(PATHS["LOWKV_CACHE_DIR"]) / "wine"))


def windows(path):
    return "Z:" + str(path).replace("/", "\\")


def environment(**more):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LOWKV_", "GGML_", "LLAMA_"))}
    return {**env, "WINEPREFIX": str(PREFIX), "WINEDEBUG": "-all", "OMP_WAIT_POLICY": "passive", **more}


def run(program, *args, env=None, timeout=120, **how):
    done = subprocess.run([WINE, str(program), *map(str, args)], env=environment(**(env or {})),
                          stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False, **how)
    done.stdout = done.stdout.decode(errors="replace").replace("\r\n", "\n")
    done.stderr = done.stderr.decode(errors="replace").replace("\r\n", "\n")
    return Run(done)
