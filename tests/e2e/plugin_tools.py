"""What the plug-in's tests share: paths, running stock llama.cpp tools, talking to llama-server."""

import contextlib
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def read_paths():
    """deps/setup.py's paths; LOWKV_PATHS_JSON names a file that replaces or adds some."""
    setup = [sys.executable, str(ROOT / "deps/setup.py"), "--paths"]
    found = json.loads(subprocess.run(setup, capture_output=True, text=True, check=True).stdout)
    override = os.environ.get("LOWKV_PATHS_JSON")
    if override:
        found.update(json.loads(Path(override).read_text()))
    return found


PATHS = read_paths()
TOOLS = Path(PATHS["LOWKV_LLAMA_BUILD"])
MODEL = PATHS["LOWKV_MODEL"]
BUILD = Path(os.environ.get("LOWKV_BUILD_DIR", ROOT / "build/release"))
PLUGIN = PATHS.get("LOWKV_PLUGIN", str(BUILD / "lib/libggml-lowkv.so"))
THREADS = ["-t", "1"]
DEVICE = os.environ.get("LOWKV_DEVICE")  # where the tests' caches are, of a build that has it


def environment(scheme, **more):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LOWKV_", "GGML_", "LLAMA_"))}
    if scheme is not None:
        env.update(LOWKV_SCHEME=scheme, GGML_BACKEND_PATH=PLUGIN)
    if DEVICE:
        env["LOWKV_DEVICE"] = DEVICE
    env.update(more)
    return env


class Run:
    def __init__(self, done):
        self.code, self.out = done.returncode, done.stdout
        self.err = done.stderr
        self.both = done.stdout + done.stderr

    def said(self, pattern):
        found = re.search(pattern, self.both)
        assert found, f"no {pattern!r} in:\n{self.both[-3000:]}"
        return found


def tool(name, *args, scheme=None, model=MODEL, device=True, env=None, timeout=300):
    """Runs a stock tool: with the plug-in if a scheme is given, else as it comes."""
    command = [str(TOOLS / name), "-m", str(model), *THREADS, *map(str, args)]
    if scheme is not None and device:
        command += ["-dev", "LOWKV"]
    done = subprocess.run(command, env=environment(scheme, **(env or {})), stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, errors="replace", timeout=timeout)
    return Run(done)


def complete(*args, prompt="Once upon a time", tokens=32, **kw):
    return tool("llama-completion", "-p", prompt, "-n", tokens, "--temp", "0", "-no-cnv",
                "--ignore-eos", *args, **kw)


def assert_same_text(one, other, at_least):
    """llama.cpp's tools print from a thread that they don't wait for at exit, so the last tokens of
    an output may be missing."""
    shorter, longer = sorted((one, other), key=len)
    shorter = shorter.rstrip("\n\ufffd")
    assert longer.startswith(shorter), f"{shorter!r}\n{longer!r}"
    assert len(shorter) >= at_least, shorter


def text(seed, n):
    """Characters that every byte tokenizer knows, the same for the same seed."""
    source = random.Random(seed)
    return "".join(source.choice("abcdefgh ijklmnop,.") for _ in range(n))


class Server:
    """A llama-server with the plug-in, on a free port."""

    def __init__(self, process, port, log):
        self.process, self.port, self.log = process, port, log

    def request(self, method, path, body=None, timeout=120):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None,
                               {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null")
        finally:
            connection.close()

    def complete(self, prompt, tokens=16, **more):
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": True,
                "ignore_eos": True, **more}
        status, answer = self.request("POST", "/completion", body)
        assert status == 200, answer
        return answer

    def cancel_early(self, prompt, tokens):
        """Starts to stream and hangs up after the first bytes."""
        body = json.dumps({"prompt": prompt, "n_predict": tokens, "stream": True,
                           "ignore_eos": True, "cache_prompt": True}).encode()
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as s:
            s.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                      b"Content-Length: %d\r\n\r\n" % len(body) + body)
            s.recv(64)

    def memory_kib(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status).group(1))

    def log_text(self):
        return Path(self.log).read_text(errors="replace")

    def positions_by_cell(self):
        """The last map of the cells in the log (see LOG_CELLS): positions, None where a cell is empty."""
        found, in_map = [], False
        for line in self.log_text().splitlines():
            words = line.removesuffix(" *").split()
            is_row = len(words) == 64 and all(w == "." or w.isdigit() for w in words)
            if is_row:
                found = found if in_map else []
                found += [None if w == "." else int(w) for w in words]
            in_map = is_row
        assert found, "no map of the cells in the log"
        return found


# llama.cpp then logs the position of each cell before every batch (Server.positions_by_cell).
LOG_CELLS = {"args": ("-lv", 5), "env": {"LLAMA_KV_CACHE_DEBUG": "3"}}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def server(tmp_path, *args, scheme, model=MODEL, env=None, by=(), program=None):
    """`by`: a command that starts it, and sets what it needs, in place of the scheme. `program`: a llama-server of
    another project's."""
    port = free_port()
    log = tmp_path / f"server-{port}.log"
    start = [program] if program else [TOOLS / "llama-server", "--no-ui"]
    command = [str(word) for word in (*by, *start, *THREADS, "--port", port, *args)]
    if model is not None:
        command += ["-m", str(model)]
    if scheme is not None:
        command += ["-dev", "LOWKV"]
    with open(log, "w") as out:
        process = subprocess.Popen(command, env=environment(scheme, **(env or {})), stdout=out,
                                   stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    running = Server(process, port, log)
    try:
        for _ in range(600):
            assert process.poll() is None, running.log_text()[-3000:]
            with contextlib.suppress(OSError, ValueError):
                if running.request("GET", "/health", timeout=5)[0] == 200:
                    break
            time.sleep(0.1)
        else:
            raise AssertionError("llama-server did not become ready\n" + running.log_text()[-3000:])
        yield running
        assert process.poll() is None, running.log_text()[-3000:]
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
