"""A short trial of bench/hostile.py: what a hostile client sends costs the others no memory and no answer. How fast
they stay is for longer ones."""

import sys
from pathlib import Path

import pytest
from plugin_tools import ROOT

sys.path.append(str(ROOT / "bench"))
import hostile


@pytest.mark.long
def test_a_hostile_client_costs_the_others_no_memory(tmp_path: Path):
    found = hostile.attack(hostile.arguments(["--minutes", "0", "--window", "3", "--most", "inf"]), tmp_path)
    assert all(good for _, _, good in found), found
