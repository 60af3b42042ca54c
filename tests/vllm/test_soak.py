"""Hundreds of requests on few pages, and what must be afterwards as it was."""

import random

from conftest import run
from test_engine import ids, mixed, prompt


def crowd(count):
    """Short and long requests, half of which begin with one of four prefixes."""
    rng = random.Random(21)
    prefixes = [prompt(rng, length) for length in (128, 200, 256, 384)]
    return [{"ids": prompt(rng, rng.choice([3, 60, 128, 250, 500]), rng.choice(prefixes) if number % 2 else ()),
             "sampling": {"max_tokens": rng.choice([2, 20, 60])}} for number in range(count)]


def test_five_hundred_requests(llama, tmp_path):
    """Aborted at random, preempted (memory for three of the longest), prefixes found and lost again. The fixed
    questions are asked alone, with no prefix cached, before and after."""
    memory = 26 * 128 * 3 * 2 * 2 * 28 / (1 << 20)  # 30 pages of three layers
    fixed = [job for request in mixed(22)[:6] for job in ({"forget": True}, {"generate": [request]})]
    jobs = [*fixed, {"soak": crowd(500), "together": 24, "seed": 3}, *fixed, {"statistics": True},
            {"metrics": ["num_preemptions"]}]
    engine = run(llama, jobs, tmp_path, "lowkv2.8", mib=memory, max_model_len=1200, disable_log_stats=False)
    before, (ended, aborts), after = engine.results[:12], engine.results[12], engine.results[13:25]
    statistics, (preempted,) = engine.results[25:]
    print(f"{engine.tokens} tokens fit; {ended} ended, {aborts} aborted, {preempted} preempted; {statistics}")
    assert ended + aborts == 500 and aborts > 20 and preempted > 20
    assert all(before[::2]) and all(after[::2])  # no page was held by anyone
    assert ids(after[1::2]) == ids(before[1::2])
    assert statistics["replaced"] == 0
    assert statistics["exact_pages"] <= 3 * (16 + 2 * 16)  # idle ones, 16 a layer at most, and those of the last step
