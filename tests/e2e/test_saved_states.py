"""Saved states take the room of their codes on the disk. tests/cli/saved_states.cpp is about any files."""

import fcntl
import gzip
import os
import random
import re
import subprocess
import time
from pathlib import Path

import plugin_models as models
import pytest
from plugin_tools import BUILD, environment, server, text

CLI = BUILD / "bin/lowkv"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def holes(folder):
    """Some file systems have no leases, or no holes: there `lowkv` leaves files as they are."""
    file = folder / "lease"
    file.write_bytes(bytes(1 << 20))
    with open(file, "r+b") as opened:
        try:
            fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            pytest.skip(f"no leases on {folder}: {error}")
    return folder


@pytest.fixture(scope="module")
def tiny(folder):
    return models.llama(folder / "llama.gguf", layers=6)


def on_disk(path):
    return path.stat().st_blocks * 512


def bytes_read(pid):
    return int(re.search(r"rchar: (\d+)", Path(f"/proc/{pid}/io").read_text())[1])



def mostly_zeros(path, size=24 << 20, seed=1):
    chance = random.Random(seed)
    data = bytearray(size)
    for _ in range(200):
        at = chance.randrange(size - 9000)
        data[at:at + 9000] = chance.randbytes(9000)
    path.write_bytes(data)


def wait_until_small(file, part=0.5):
    for _ in range(100):
        if on_disk(file) < part * file.stat().st_size:
            break
        time.sleep(0.1)
    assert on_disk(file) < part * file.stat().st_size


@pytest.mark.usefixtures("holes")
def test_run_shrinks_what_a_server_saves(folder, tiny):
    slots = folder / "slots"
    slots.mkdir()
    args = ("-np", 1, "-c", 8192, "-cram", 0, "--slot-save-path", slots)
    prompt = text(3, 3500)
    with server(folder, *args, scheme=None, model=tiny, by=(CLI, "run", "--scheme", "lowkv2", "--")) as s:
        mostly_zeros(slots / "another programs")
        s.complete(prompt, tokens=8, id_slot=0)
        for _ in range(3):  # it is overwritten and shrunk again
            assert s.request("POST", "/slots/0?action=save", {"filename": "a.bin"})[0] == 200
        file = slots / "a.bin"
        wait_until_small(file)
        assert on_disk(slots / "another programs") >= 24 << 20
        with open(file, "rb"):  # a backup reads while it is saved anew
            assert s.request("POST", "/slots/0?action=save", {"filename": "a.bin"})[0] == 200
            time.sleep(1)
            before = bytes_read(s.process.pid)
            time.sleep(1)
            assert bytes_read(s.process.pid) - before < 1 << 20, "lowkv run tries the file again and again"
            assert on_disk(file) > 0.5 * file.stat().st_size
        wait_until_small(file)  # nobody saves it again
        assert s.request("POST", "/slots/0?action=save", {"filename": "a.bin"})[0] == 200
        time.sleep(1)
        before = bytes_read(s.process.pid)
        time.sleep(1)
        assert bytes_read(s.process.pid) - before < 1 << 20, "lowkv run reads the file again and again"
        straight = s.complete(prompt, tokens=8, id_slot=0)
        s.request("POST", "/slots/0?action=erase", None)
        assert s.request("POST", "/slots/0?action=restore", {"filename": "a.bin"})[0] == 200
        again = s.complete(prompt, tokens=8, id_slot=0)
        assert again["timings"]["prompt_n"] <= 2 and again["content"] == straight["content"]


@pytest.mark.usefixtures("holes")
def test_what_is_read_while_it_is_shrunk_is_shrunk_all_the_same(folder):
    """As a state that is restored at once, at any moment of the work."""
    slots = folder / "restored"
    slots.mkdir()
    fake = folder / "llama-server"
    fake.write_text(f"#!/bin/sh\necho \"lowkv: active$LOWKV_RUN_MARK\" >&2\necho ready\nwhile read name; do\n"
                    f"cp {folder}/source {slots}/$name; echo saved; done\n")
    fake.chmod(0o755)
    mostly_zeros(folder / "source", size=48 << 20)
    with open(folder / "source", "r+b") as source:
        source.write((0x67677371).to_bytes(4, "little"))
    command = [CLI, "run", "--", fake, "-m", "x", "--slot-save-path", slots]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          env=environment(None)) as run:
        assert run.stdout.readline() == "ready\n"
        for turn in range(12):
            file = slots / f"{turn}.bin"
            run.stdin.write(file.name + "\n")
            run.stdin.flush()
            assert run.stdout.readline() == "saved\n"
            end = time.monotonic() + 5
            while on_disk(file) > file.stat().st_size - (turn << 21) and time.monotonic() < end:
                pass  # until so much of it is done
            file.open("rb").close()
            wait_until_small(file, 0.1)
        run.stdin.close()


EARLIER = sorted((Path(__file__).parent.parent / "saved").glob("*/slot.bin.gz"))


@pytest.mark.parametrize("path", EARLIER or [None], ids=[p.parent.name for p in EARLIER])
def test_slot_files_of_earlier_versions(folder, path):
    """Of a model that is written here, in a cache of lowkv2.8. LOWKV_WRITE_SAVED=FOLDER writes this version's."""
    model = models.llama(folder / "earlier.gguf", head_dim=64, heads=2, kv_heads=1, layers=2, width=64)
    slots = folder / "earlier"
    slots.mkdir(exist_ok=True)
    prompt = text(11, 700)
    args = ("-np", 1, "-c", 1024, "-cram", 0, "--slot-save-path", slots)
    write = os.environ.get("LOWKV_WRITE_SAVED")
    with server(folder, *args, scheme="lowkv2.8,window=32,sinks=0", model=model, env={"LOWKV_VERBOSE": "1"}) as s:
        ask = {"id_slot": 0, "n_probs": 50, "tokens": 1}
        if write:
            s.complete(prompt, **ask)
            assert s.request("POST", "/slots/0?action=save", {"filename": "slot.bin"})[0] == 200
            with gzip.GzipFile(Path(write) / "slot.bin.gz", "wb", mtime=0) as out:
                out.write((slots / "slot.bin").read_bytes())
            return
        (slots / "slot.bin").write_bytes(gzip.decompress(path.read_bytes()))
        status, answer = s.request("POST", "/slots/0?action=restore", {"filename": "slot.bin"})
        assert status == 200 and answer["n_restored"] >= 700, answer
        restored = s.complete(prompt, **ask)
        assert restored["timings"]["prompt_n"] <= 1
        s.request("POST", "/slots/0?action=erase", None)
        assert s.complete(prompt, **ask)["timings"]["prompt_n"] >= 700
        anew = s.complete(prompt, **ask)  # as restored: its last token alone, what is before it is packed
        log = s.log
    assert "restored cells packed again 0" in log.read_text()
    first, second = ({t["id"]: t["logprob"] for t in a["completion_probabilities"][0]["top_logprobs"]}
                     for a in (restored, anew))
    shared = first.keys() & second.keys()
    assert len(shared) > 35 and max(abs(first[t] - second[t]) for t in shared) < 0.3
