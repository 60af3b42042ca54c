"""Standard input, output and messages that are full, closed or nobody's: what is lost is an error, of every command."""

import os
import re
import subprocess

import pytest
from plugin_tools import BUILD, MODEL, environment
from test_command import TEXT, lowkv

COMMANDS = re.findall(r"^  ([a-z]+)  ", lowkv("--help").out.split("Subcommands:")[1], re.M)
MEASURED = ("--schemes", "kivi2", "--tokens", 64, "--threads", 1)
# What has output beside its help.
WORDS = [(name, "--help") for name in COMMANDS] + [
    ("--help",), ("--version",), ("schemes",), ("schemes", "--all"), ("schemes", "lowkv2"), ("plan", "-m", MODEL),
    ("doctor",),
    pytest.param(("attention", *MEASURED, "--peers", "none"), marks=pytest.mark.long),
    ("generate", "-m", MODEL, "-p", "Once", "-n", 2, "--no-chat", "-t", 1),
    pytest.param(("compare", "-m", MODEL, "-f", TEXT, "--schemes", "kivi2", "--tokens", 300, "--chunk", 64,
                  "--no-speed", "-t", 1), marks=pytest.mark.long)]


def with_output(words, stdout, **more):
    program = "lowkv-bench" if words[0] == "attention" else "lowkv"
    return subprocess.run([str(BUILD / "bin" / program), *map(str, words)], env=environment(None),
                          stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120,
                          **more)


@pytest.mark.parametrize("words", WORDS, ids=lambda words: " ".join(map(str, words[:2])))
def test_output_that_is_lost_is_an_error(words):
    whole = with_output(words, subprocess.PIPE)
    assert whole.stdout and (whole.returncode == 0 or words[0] == "doctor"), whole
    with open("/dev/full", "w") as full:
        lost = [with_output(words, full)]
    lost.append(with_output(words, None, preexec_fn=lambda: os.close(1)))
    for done, why in zip(lost, ("No space left on device", "Bad file descriptor"), strict=True):
        said = "lowkv: stdout did not take all of the output: "
        assert done.returncode == 1 and done.stderr.splitlines()[-1] in (said + why, said + os.strerror(5)), done


@pytest.mark.parametrize("closed", range(8))
def test_run_whichever_of_the_files_are_closed(tmp_path, closed):
    """What is opened next would take their numbers: a pipe that of stderr."""
    files = [number for number in range(3) if closed >> number & 1]
    words = ("run", "--", "sh", "-c", f"echo said >&2; echo done >{tmp_path}/done; exit 7")
    done = with_output(words, subprocess.PIPE, preexec_fn=lambda: [os.close(number) for number in files])
    assert done.returncode == 7 and (tmp_path / "done").exists(), done
    assert 2 in files or done.stderr == "said\n", done
