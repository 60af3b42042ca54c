"""Signals to `lowkv run`: its program gets each once, whoever sent it. llama-server ends at once at a second one, with
status 1."""

import contextlib
import fcntl
import http.client
import os
import pty
import re
import select
import signal
import socket
import subprocess
import termios
import time
from pathlib import Path

import plugin_models as models
import pytest
from plugin_tools import BUILD, TOOLS, environment


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return models.llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")


def healthy(port):
    with contextlib.suppress(OSError):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


@contextlib.contextmanager
def served(tmp_path, model, *before, terminal=None):
    """A llama-server under `lowkv run` in a session of its own, once it serves; and its log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path / "server.log"
    command = [*before, BUILD / "bin/lowkv", "run", "--", TOOLS / "llama-server", "-m", model, "-t", "1", "-c", "512",
               "--port", str(port), "--no-ui"]

    def take_terminal():
        if terminal is not None:
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    with open(log, "w") as out:
        process = subprocess.Popen(list(map(str, command)), env=environment(None), stdout=out, stderr=out,
                                   stdin=subprocess.DEVNULL if terminal is None else terminal, start_new_session=True,
                                   preexec_fn=take_terminal)
    try:
        end = time.monotonic() + 60
        # It answers for its health before it takes signals, which it does before it says that it listens.
        while not healthy(port) or "listening on" not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.1)
        yield process, log
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def assert_ended_once(process, log):
    assert process.wait(30) == 0, log.read_text()[-3000:]
    assert "second interrupt" not in log.read_text()
    assert "lowkv: active" in log.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_to_the_process_group(tmp_path, tiny, number):
    with served(tmp_path, tiny) as (process, log):
        os.killpg(process.pid, number)
        assert_ended_once(process, log)


def test_to_lowkv_run_alone(tmp_path, tiny):
    with served(tmp_path, tiny) as (process, log):
        process.terminate()
        assert_ended_once(process, log)


def test_of_timeout(tmp_path, tiny):
    """It signals its command, and then its process group."""
    with served(tmp_path, tiny, "timeout", "300") as (process, log):
        process.terminate()
        assert process.wait(30) == 0, log.read_text()[-3000:]
        assert "second interrupt" not in log.read_text()


def test_of_a_terminal(tmp_path, tiny):
    """Ctrl-C goes to all of the foreground."""
    ours, its = os.openpty()
    try:
        with served(tmp_path, tiny, terminal=its) as (process, log):
            os.write(ours, b"\x03")
            assert_ended_once(process, log)
    finally:
        os.close(ours)
        os.close(its)


def test_a_second_one_is_passed_on(tmp_path):
    """Who presses Ctrl-C twice means it."""
    script = 'trap "echo one; trap \'echo two; exit 9\' INT" INT; echo ready; while :; do sleep 0.05; done'
    with subprocess.Popen([BUILD / "bin/lowkv", "run", "--", "sh", "-c", script], env=environment(None),
                          stdout=subprocess.PIPE, text=True, start_new_session=True,
                          # Where we run in the background SIGINT is ignored, and no trap can change that.
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as process:
        assert process.stdout.readline() == "ready\n"
        for word in ("one\n", "two\n"):
            os.killpg(process.pid, signal.SIGINT)
            assert process.stdout.readline() == word
            time.sleep(0.3)
        assert process.wait(30) == 9


def ignoring_children():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


@pytest.mark.parametrize("code", [0, 7])
def test_it_ends_where_its_parent_ignores_children(code):
    """Perl and some supervisors start programs so; then the system forgets how a child ends."""
    done = subprocess.run([BUILD / "bin/lowkv", "run", "--", "sh", "-c", f"exit {code}"], env=environment(None),
                          capture_output=True, text=True, timeout=30, preexec_fn=ignoring_children)
    assert done.returncode == (code or 1), done.stderr


def test_it_ends_by_a_signal_where_its_parent_ignores_children():
    with subprocess.Popen([BUILD / "bin/lowkv", "run", "--", "sh", "-c", "echo ready; exec sleep 60"],
                          env=environment(None), stdout=subprocess.PIPE, text=True, start_new_session=True,
                          preexec_fn=ignoring_children) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(10) == 128 + signal.SIGTERM


def test_it_goes_on_when_nobody_reads_its_messages(tmp_path):
    """As stock llama-server does. A program that it starts has SIGPIPE as its own parent would have left it."""
    script = f"for i in 1 2 3 4 5 6 7 8; do echo noise >&2; sleep 0.1; done; echo done >{tmp_path}/done; kill -PIPE $$"
    with subprocess.Popen([BUILD / "bin/lowkv", "run", "--", "sh", "-c", script], env=environment(None),
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        process.stderr.readline()
        process.stderr.close()
        assert process.wait(20) == 128 + signal.SIGPIPE
    assert (tmp_path / "done").exists()


def test_it_ends_with_its_program_though_something_still_writes(tmp_path):
    script = "(while :; do echo noise >&2 || exit; sleep 0.05; done) & exit 7"
    done = subprocess.run([BUILD / "bin/lowkv", "run", "--", "sh", "-c", script], env=environment(None),
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=20)
    assert done.returncode == 7


class Shell:
    """An interactive one, with a terminal of its own."""

    def __init__(self):
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.execvpe("bash", ["bash", "--norc", "--noediting", "-i"], environment(None, PS1="", TERM="dumb"))
        self.said = ""

    def type(self, text):
        os.write(self.terminal, text.encode())

    def wait_for(self, pattern, seconds=20):
        """Takes what comes up to there."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.said)):
            assert time.monotonic() < end, f"no {pattern!r} in {self.said!r}"
            if select.select([self.terminal], [], [], 0.1)[0]:
                self.said += os.read(self.terminal, 65536).decode(errors="replace")
        self.said = self.said[found.end():]
        return found

    def end(self):
        for status in Path("/proc").glob("[0-9]*/stat"):  # all of its session
            with contextlib.suppress(OSError):
                if int(status.read_text().rpartition(")")[2].split()[3]) == self.pid:
                    os.kill(int(status.parent.name), signal.SIGKILL)
        os.close(self.terminal)
        os.waitpid(self.pid, 0)


@pytest.fixture
def shell():
    it = Shell()
    try:
        it.type("stty -echo; set -m; PS1=; echo ready\n")
        it.wait_for("ready\r")
        yield it
    finally:
        it.end()


READER = "'echo began >&2; read line; echo got $line >&2; read line; echo then $line >&2; exit 7'"


@pytest.mark.parametrize("before, last", [("", "echo ended $?\n"), ("sh -c '\"$@\"; echo ended $?' sh ", "")],
                         ids=["alone", "of a script"])
def test_fg_gives_the_program_the_terminal(shell, before, last):
    """Started with `&`, stopped where it asks for the terminal, as any program; Ctrl-Z stops it again."""
    shell.type(f"{before}{BUILD / 'bin/lowkv'} run -- sh -c {READER} &\n")
    shell.wait_for("began")
    time.sleep(1)
    shell.type("jobs\n")
    shell.wait_for("Stopped")
    shell.type("fg\n")
    time.sleep(1)
    shell.type("one\n")
    shell.wait_for("got one")
    shell.type("\x1a")
    shell.wait_for("Stopped")
    shell.type("echo at the prompt\n")
    shell.wait_for("at the prompt")
    shell.type("fg\n")
    time.sleep(1)
    shell.type("two\n")
    shell.wait_for("then two")
    shell.type(last)
    shell.wait_for("ended 7")
    shell.type("echo at the prompt\n")
    shell.wait_for("at the prompt")


def test_a_running_program_gets_keys_after_fg(shell, tmp_path):
    ticks = tmp_path / "ticks"

    def runs():
        time.sleep(0.5)
        before = ticks.stat().st_size
        time.sleep(0.5)
        return ticks.stat().st_size > before

    script = f"'trap \"echo stopped by a key >&2; exit 5\" INT; while :; do echo >>{ticks}; sleep 0.05; done'"
    shell.type(f"{BUILD / 'bin/lowkv'} run -- sh -c {script} &\n")
    time.sleep(1)
    assert runs()
    shell.type("fg\n")
    assert runs()
    shell.type("\x1a")
    shell.wait_for("Stopped")
    assert not runs()
    shell.type("bg\n")
    assert runs()
    shell.type("jobs\n")
    shell.wait_for("Running")
    shell.type("fg\n")
    assert runs()
    shell.type("\x03")
    shell.wait_for("stopped by a key")
    shell.type("echo ended $?\n")
    shell.wait_for("ended 5")


def test_a_script_in_the_foreground_keeps_its_keys(shell, tmp_path):
    """As one that starts a server, and others, and waits for them."""
    script = tmp_path / "script"
    script.write_text(f'trap "echo stopped by a key; exit 5" INT; {BUILD / "bin/lowkv"} run -- sleep 60 & wait')
    shell.type(f"sh {script} &\n")
    time.sleep(1)
    shell.type("fg\n")
    time.sleep(1)
    shell.type("\x03")
    shell.wait_for("stopped by a key")


def test_as_process_1_of_a_container(tmp_path, tiny):
    alone = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*alone, "true"], check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no namespace of processes can be made here")
    with served(tmp_path, tiny, *alone) as (process, log):
        [first] = children(process.pid)
        [server] = children(first)
        subprocess.run(["nsenter", "--target", str(first), "--pid", "sh", "-c", "sleep 1 &"], check=True)
        assert len(children(first)) == 2  # its parent has ended
        end = time.monotonic() + 30
        while children(first) != [server]:
            assert time.monotonic() < end, "it is left as a zombie"
            time.sleep(0.1)
        os.kill(first, signal.SIGTERM)
        assert_ended_once(process, log)
