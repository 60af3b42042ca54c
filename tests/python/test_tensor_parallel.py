"""Two processes that share the heads give the tokens of one."""

import subprocess
import sys
from pathlib import Path

import pytest
from families import build

SCHEMES = ["exact", "int8,window=0"]


def run(processes, folder):
    """For each scheme, the kv heads of a process and the tokens."""
    script = Path(__file__).with_name("tensor_parallel.py")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                           str(processes), script, folder, *SCHEMES], capture_output=True, text=True, check=False,
                          timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("heads")]
    return [int(line[1]) for line in lines], [line[3:] for line in lines]


@pytest.mark.long
def test_two_processes_give_the_tokens_of_one(tmp_path):
    build("llama")[0].save_pretrained(tmp_path)
    heads, want = run(1, tmp_path)
    shared, got = run(2, tmp_path)
    assert (heads, shared) == ([2, 2], [1, 1])
    assert all(len(tokens) == 20 for tokens in want) and got == want
