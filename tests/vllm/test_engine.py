"""lowkv's cache in vLLM, against vLLM's own: engines that get the same requests."""

import math
import random
import re
from pathlib import Path

import pytest
from conftest import run

VOCABULARY = 512


def prompt(rng, length, prefix=()):
    return [*prefix, *(rng.randrange(2, VOCABULARY) for _ in range(length))]


def mixed(seed):
    """32 requests: short and long, some of one prefix, prompts longer than a step takes."""
    rng = random.Random(seed)
    prefix = prompt(rng, 300)
    requests = []
    for number in range(32):
        ids = prompt(rng, rng.choice([3, 40, 127, 128, 129, 500, 700]), prefix if number % 3 == 0 else ())
        requests.append({"ids": ids, "sampling": {"max_tokens": rng.choice([1, 12, 40])}})
    return requests


def scored(requests):
    """The same, for the log probabilities of their prompts."""
    return [{"ids": request["ids"], "sampling": {"max_tokens": 1, "prompt_logprobs": 0}} for request in requests]


def jobs():
    """Mixed requests; the same again, whose prefixes are cached by now; aborts; and again."""
    requests = mixed(5)
    return [{"generate": requests}, {"generate": requests[::-1]}, {"abort": requests, "after": 9},
            {"generate": requests[3:12]}, {"generate": scored(requests[:8])}]


def ids(results):
    return [[answer["ids"] for answer in job] for job in results]


def difference(a, b):
    """Of the prompts' log probabilities, on average."""
    pairs = [(x, y) for one, other in zip(a, b, strict=True)
             for x, y in zip(one["prompt"], other["prompt"], strict=True)]
    mean = sum(abs(x - y) for x, y in pairs) / len(pairs)
    print(f"{len(pairs)} tokens, mean difference {mean:.5f}")
    return mean


@pytest.fixture(scope="module")
def stock(llama, tmp_path_factory):
    return run(llama, jobs(), tmp_path_factory.mktemp("stock"), mib=48)


def test_exact_pages_give_the_same_tokens(llama, stock, tmp_path):
    """Continuous batching, chunked prefill, prefixes from the cache, aborts."""
    exact = run(llama, jobs(), tmp_path, "exact", mib=48)
    assert "lowkv: scheme exact" in exact.log and "1.00 times as many as in 32 bits" in exact.log
    assert exact.tokens == stock.tokens
    assert ids(exact.results) == ids(stock.results)
    cached = [answer["cached"] for answer in exact.results[1]]
    assert sum(cached) > 1000 and cached == [answer["cached"] for answer in stock.results[1]]
    assert difference(exact.results[4], stock.results[4]) < 1e-4


def test_preempted_requests_go_on_as_they_were(llama, stock, tmp_path):
    """Memory for three of the requests that run at once: pages are taken away, handed to others, computed again."""
    memory = 30 * 128 * 3 * 2 * 2 * 64 * 4 / (1 << 20)  # 30 pages of three layers
    few = run(llama, jobs()[:2], tmp_path, "exact", mib=memory, max_model_len=1200, disable_log_stats=False)
    assert ids(few.results) == ids(stock.results[:2])


def test_packed_pages(llama, stock, tmp_path):
    """Several times the tokens in the same memory; what is lost shows in the prompts' log probabilities."""
    packed = run(llama, [*jobs(), {"statistics": True}], tmp_path, "lowkv2.8", mib=48)
    factor = packed.tokens / stock.tokens
    assert factor > 9  # of float32
    said = re.search(r"lowkv: scheme lowkv2\.8, (\d+) tokens fit: ([\d.]+) times as many as in 32 bits", packed.log)
    assert int(said.group(1)) == packed.tokens and abs(float(said.group(2)) - factor) < 0.1
    assert difference(packed.results[4], stock.results[4]) < 0.2
    statistics = packed.results[5]
    assert statistics["packed"] > 100 and statistics["sink_bytes"] > 0
    assert statistics["reopened"] == statistics["evicted"] == statistics["replaced"] == 0
    # Idle ones, 16 a layer at most, and those of the last step.
    assert statistics["exact_pages"] <= 3 * (16 + 2 * 16)


def test_little_memory_for_packed_pages(llama, stock, tmp_path):
    """As with exact ones, where int8 makes a difference that is next to nothing."""
    memory = 30 * 128 * 3 * 2 * (72 + 68) / (1 << 20)  # 30 pages of three layers: keys of 9 bits, values of 8.5
    few = run(llama, [*jobs()[:2], jobs()[4], {"statistics": True}], tmp_path, "int8", mib=memory,
              max_model_len=1200)
    assert few.tokens == 3 * 1200  # three requests of ten pages each, as vLLM counts
    # Scores have a standard deviation of 10 or so in this model, and int8 rounds keys by half a percent of theirs.
    assert difference(few.results[2], stock.results[4]) < 0.03
    first = [answer["ids"][0] for answer in few.results[0]]
    assert sum(x == y["ids"][0] for x, y in zip(first, stock.results[0], strict=True)) >= 30
    assert few.results[3]["replaced"] == 0


def test_a_sliding_window(mistral, tmp_path):
    asked = [{"generate": mixed(6)}, {"generate": scored(mixed(6)[:6])}]
    stock = run(mistral, asked, tmp_path)
    exact = run(mistral, asked, tmp_path, "exact")
    assert exact.tokens == stock.tokens
    assert ids(exact.results) == ids(stock.results)
    packed = run(mistral, asked, tmp_path, "lowkv4")
    assert packed.tokens > 6 * stock.tokens
    assert difference(packed.results[1], stock.results[1]) < 0.1


def test_a_real_model(smollm2, tmp_path):
    """Negative log-likelihood of a text, and how much of it fits in the memory of vLLM's own cache."""
    from transformers import AutoTokenizer

    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    tokens = AutoTokenizer.from_pretrained(smollm2)(text)["input_ids"][:1024]
    asked = [{"generate": scored([{"ids": tokens}])}]
    losses, fits = {}, {}
    for scheme in (None, "lowkv2.8"):
        engine = run(smollm2, asked, tmp_path, scheme, "bfloat16", mib=256, max_num_batched_tokens=512)
        found = engine.results[0][0]["prompt"]
        losses[scheme], fits[scheme] = -sum(found) / len(found), engine.tokens
    print(losses, fits)
    assert math.isfinite(losses[None]) and losses["lowkv2.8"] < losses[None] + 0.05
    assert fits["lowkv2.8"] >= 5 * fits[None]
