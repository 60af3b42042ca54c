"""What fuzz targets in Python share: `NAME.py --seeds FOLDER` writes the seeds, anything else is libFuzzer's, which
calls try_bytes() with bytes that it changes. What a target does not catch is a finding."""

import sys
from pathlib import Path

import atheris


def run(seeds, try_bytes):
    """Never returns."""
    if sys.argv[1:2] == ["--seeds"]:
        for number, data in enumerate(seeds()):
            (Path(sys.argv[2]) / f"seed-{number}").write_bytes(data)
        sys.exit(0)
    atheris.Setup(sys.argv, try_bytes)
    atheris.Fuzz()


def require(holds, what):
    """Raises where it does not hold."""
    if not holds:
        raise RuntimeError(what)
