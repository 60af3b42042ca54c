"""The scripts of eval/ and deps/ import each other by name."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "eval"), str(ROOT / "deps")]
