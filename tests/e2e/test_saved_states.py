"""Saved states take the room of their codes on the disk: `lowkv run` and `lowkv shrink`."""

import hashlib
import os
import random
import subprocess
import time

import plugin_models as models
import pytest
from plugin_tools import BUILD, server, text

CLI = BUILD / "bin/lowkv"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def tiny(folder):
    return models.llama(folder / "llama.gguf", layers=6)


def on_disk(path):
    return path.stat().st_blocks * 512


def shrink(*paths):
    return subprocess.run([str(CLI), "shrink", *map(str, paths)], capture_output=True, text=True, check=False)


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def mostly_zeros(path, size=24 << 20, seed=1):
    chance = random.Random(seed)
    data = bytearray(size)
    for _ in range(200):
        at = chance.randrange(size - 9000)
        data[at:at + 9000] = chance.randbytes(9000)
    path.write_bytes(data)


def test_run_shrinks_what_a_server_saves(folder, tiny):
    slots = folder / "slots"
    slots.mkdir()
    args = ("-np", 1, "-c", 8192, "-cram", 0, "--slot-save-path", slots)
    prompt = text(3, 3500)
    with server(folder, *args, scheme=None, model=tiny, by=(CLI, "run", "--scheme", "lowkv2", "--")) as s:
        s.complete(prompt, tokens=8, id_slot=0)
        for _ in range(3):  # it is overwritten and shrunk again
            assert s.request("POST", "/slots/0?action=save", {"filename": "a.bin"})[0] == 200
        file = slots / "a.bin"
        for _ in range(100):
            if on_disk(file) < 0.5 * file.stat().st_size:
                break
            time.sleep(0.1)
        assert on_disk(file) < 0.5 * file.stat().st_size
        straight = s.complete(prompt, tokens=8, id_slot=0)
        s.request("POST", "/slots/0?action=erase", None)
        assert s.request("POST", "/slots/0?action=restore", {"filename": "a.bin"})[0] == 200
        again = s.complete(prompt, tokens=8, id_slot=0)
        assert again["timings"]["prompt_n"] <= 2 and again["content"] == straight["content"]


def test_shrink_changes_no_byte(folder):
    file = folder / "zeros.bin"
    mostly_zeros(file)
    before, size = digest(file), file.stat().st_size
    done = shrink(file)
    assert done.returncode == 0 and "on the disk" in done.stdout, done
    assert digest(file) == before and file.stat().st_size == size
    assert on_disk(file) < 0.2 * size
    taken = on_disk(file)
    assert shrink(file).returncode == 0 and on_disk(file) == taken


def test_a_kill_at_any_moment_changes_no_byte(folder):
    file = folder / "killed.bin"
    mostly_zeros(file)
    before = digest(file)
    chance = random.Random(2)
    for _ in range(100):
        if on_disk(file) < file.stat().st_size / 2:
            mostly_zeros(file)
        process = subprocess.Popen([str(CLI), "shrink", str(file)], stdout=subprocess.DEVNULL)
        time.sleep(chance.uniform(0, 0.02))
        process.kill()
        process.wait()
        assert digest(file) == before


def test_who_opens_the_file_meanwhile_has_it(folder):
    """A writer that comes while it is shrunk waits a moment, and what it writes stays."""
    file = folder / "rewritten.bin"
    for seed in range(10):
        mostly_zeros(file, seed=seed)
        process = subprocess.Popen([str(CLI), "shrink", str(file)], stdout=subprocess.DEVNULL)
        time.sleep(0.004 * seed / 2)
        mostly_zeros(file, seed=100 + seed)
        expected = digest(file)
        process.wait()
        assert digest(file) == expected


def test_what_it_refuses(folder):
    file = folder / "open.bin"
    mostly_zeros(file, size=1 << 20)
    with open(file, "rb"):
        done = shrink(file)
        assert done.returncode == 1 and "another program has it open" in done.stderr, done
    done = shrink(folder / "none.bin")
    assert done.returncode == 1 and "No such file" in done.stderr
    done = shrink(folder)
    assert done.returncode == 1 and "Is a directory" in done.stderr
    assert shrink().returncode == 2
    os.chmod(file, 0o400)
    if os.geteuid() != 0:
        assert "Permission denied" in shrink(file).stderr
