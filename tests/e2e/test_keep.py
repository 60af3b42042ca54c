"""`lowkv run --keep FOLDER -- llama-server`: conversations in slots survive restarts and kills."""

import contextlib
import os
import signal
import subprocess
import time

import pytest
from plugin_tools import BUILD, MODEL, TOOLS, environment, free_port, server, text
from test_command import lowkv

CONTEXT = ("-c", 8192, "-np", 4)


def by(folder, *options):
    return [BUILD / "bin/lowkv", "run", "--keep", folder, *options, "--"]


@contextlib.contextmanager
def keeping(tmp_path, *words, options=(), **more):
    """With what was kept, once that is back: clients that come with the first milliseconds may be before it."""
    kept = bool(files(tmp_path))
    with server(tmp_path, *CONTEXT, *words, scheme=None, by=by(tmp_path / "kept", *options), **more) as running:
        for _ in range(100 if kept else 0):
            if "lowkv: --keep:" in running.log_text():
                break
            time.sleep(0.1)
        yield running


def talk(running, seed, answer="", length=700):
    return running.complete(text(seed, length) + answer, 8, n_probs=5)


def assert_same_answer(one, other):
    """But for what follows a near tie: one token more in a batch rounds otherwise."""
    for a, b in zip(one["completion_probabilities"], other["completion_probabilities"], strict=True):
        if a["id"] != b["id"]:
            others = {token["id"]: token["logprob"] for token in a["top_logprobs"]}
            assert a["logprob"] - others[b["id"]] < 0.1, (a, b)
            return


def files(tmp_path):
    return sorted((tmp_path / "kept").glob("*/slot-*.bin"))


def wait_for_files(tmp_path, count):
    for _ in range(300):
        if len(files(tmp_path)) >= count:
            return
        time.sleep(0.1)
    raise AssertionError(files(tmp_path))


def evaluated(answer):
    return answer["timings"]["prompt_n"]


def test_conversations_go_on_after_a_restart(tmp_path):
    with server(tmp_path, *CONTEXT, "--no-cache-idle-slots", scheme=None, by=by(tmp_path / "other")) as running:
        alone = [talk(running, i)["content"] for i in range(3)]
        on = [talk(running, i, alone[i] + " and") for i in range(3)]
    with keeping(tmp_path) as running:
        assert [talk(running, i)["content"] for i in range(3)] == alone
    assert len(files(tmp_path)) == 3
    with keeping(tmp_path) as running:
        again = [talk(running, i, alone[i] + " and") for i in range(3)]
    for one, other in zip(on, again, strict=True):
        assert_same_answer(one, other)
        assert evaluated(other) <= evaluated(one) + 1 < 30


@pytest.mark.long
def test_files_are_private_and_small(tmp_path):
    with keeping(tmp_path) as running:
        talk(running, 1, length=2500)
    folder = tmp_path / "kept"
    assert folder.stat().st_mode & 0o777 == 0o700 and files(tmp_path)[0].parent.stat().st_mode & 0o777 == 0o700
    status = files(tmp_path)[0].stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 < status.st_size / 2


@pytest.mark.long
def test_a_kill_loses_what_was_not_saved_yet_and_no_more(tmp_path):
    with contextlib.suppress(AssertionError), keeping(tmp_path) as running:
        first = talk(running, 1)["content"]
        wait_for_files(tmp_path, 1)
        talk(running, 2)
        running.process.send_signal(signal.SIGKILL)
        running.process.wait()
    time.sleep(1)  # the server itself
    assert len(files(tmp_path)) == 1
    with keeping(tmp_path) as running:
        assert evaluated(talk(running, 1, first + " and")) < 30
        assert evaluated(talk(running, 2)) > 300


@pytest.mark.parametrize("options, words, said", [
    (("--scheme", "lowkv4"), (), '"scheme: lowkv2.8" there, "scheme: lowkv4" here'),
    pytest.param((), ("--rope-freq-scale", "0.5"), '"-np 4" there, "--rope-freq-scale 0.5" here',
                 marks=pytest.mark.long)])
def test_other_settings_start_empty(tmp_path, options, words, said):
    with keeping(tmp_path) as running:
        talk(running, 1)
    with keeping(tmp_path, *words, options=options) as running:
        assert evaluated(talk(running, 1)) > 300
        assert "are of other settings" in running.log_text() and said.split(", ")[1] in running.log_text()
    with keeping(tmp_path) as running:
        assert evaluated(talk(running, 1)) < 30


def flip(path):
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 3)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("damage", [
    flip, *(pytest.param(lambda path, left=left: os.truncate(path, int(path.stat().st_size * left)),
                         marks=pytest.mark.long) for left in (0, 0.5))])
def test_a_damaged_file_is_named_and_left_out(tmp_path, damage):
    with keeping(tmp_path) as running:
        talk(running, 1)
        talk(running, 2)
    damage(files(tmp_path)[0])
    (files(tmp_path)[1].parent / "slot-3-part").write_bytes(b"half")
    with keeping(tmp_path) as running:
        assert sorted(evaluated(talk(running, i)) > 300 for i in (1, 2)) == [False, True]
        assert running.log_text().count("is damaged and was removed") == 1
    assert not list((tmp_path / "kept").glob("*/*-part"))


def test_one_server_to_a_folder(tmp_path):
    with keeping(tmp_path):
        run = lowkv("run", "--keep", tmp_path / "kept", "--", TOOLS / "llama-server", "-m", MODEL)
        assert run.code == 1 and "another server keeps its conversations in" in run.err, run.both


@pytest.mark.long
def test_the_oldest_goes_first(tmp_path):
    with keeping(tmp_path, options=("--keep-size", "16MiB")) as running:
        for i in range(4):
            talk(running, i)
            wait_for_files(tmp_path, 1)
            time.sleep(6)
    taken = sum(path.stat().st_blocks * 512 for path in files(tmp_path))
    assert 0 < len(files(tmp_path)) < 4 and taken <= 16 << 20, files(tmp_path)


@pytest.mark.long
def test_keys_and_prefixes(tmp_path):
    """The server is asked with its first key, at its prefix."""
    port = free_port()
    command = [*by(tmp_path / "kept"), TOOLS / "llama-server", "-m", MODEL, *CONTEXT, "-t", 1, "--port", port,
               "--no-ui", "--api-key", "secret,other", "--api-prefix", "/below"]
    for evaluates in (True, False):
        with open(tmp_path / "log", "w") as log:
            running = subprocess.Popen(list(map(str, command)), env=environment(None), stderr=log, stdout=log)
        curl = ["curl", "-s", "--retry", "50", "--retry-connrefused", "--retry-all-errors", "--retry-delay", "1", "-f",
                f"127.0.0.1:{port}/below/completion", "-H", "Authorization: Bearer other", "-d",
                '{"prompt":"' + text(1, 700) + '","n_predict":2}']
        answer = subprocess.run(curl, capture_output=True, text=True, timeout=100).stdout
        running.terminate()
        assert running.wait(30) == 0, (tmp_path / "log").read_text()
        found = int(answer.partition('"prompt_n":')[2].partition(",")[0])
        assert (found > 300) == evaluates, answer


@pytest.mark.parametrize("words", [("--slot-save-path", "/tmp"), ("--ssl-key-file", "key.pem")])
def test_what_can_not_be_kept_is_refused(tmp_path, words):
    run = lowkv("run", "--keep", tmp_path / "kept", "--", TOOLS / "llama-server", "-m", MODEL, *words)
    assert run.code == 2 and f"--keep can't be used with {words[0]}" in run.err, run.both
    run = lowkv("run", "--keep", tmp_path / "kept", "--", TOOLS / "llama-completion", "-m", MODEL)
    assert run.code == 2 and "--keep is for llama-server" in run.err, run.both
