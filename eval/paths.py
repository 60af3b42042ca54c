"""Where things are: the repository, and what deps/setup.py has fetched and built."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def set_up_paths():
    """deps/setup.py's own answer: {"LOWKV_MODEL": "/...gguf", ...}."""
    return json.loads(subprocess.check_output(
        [sys.executable, ROOT / "deps/setup.py", "--paths"], text=True))


def fingerprint(path):
    """The first 12 digits of a file's SHA-256: enough to tell one build or one text from another."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]
