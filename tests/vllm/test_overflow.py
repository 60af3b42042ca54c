"""What goes wrong in one request stays in it, and what lies beside pages is in the account."""

import math
import random
import re

import psutil
import pytest
from conftest import LARGE_TOKEN, MIB, NAN_TOKEN, run
from test_engine import difference, prompt, scored


@pytest.mark.parametrize("scheme", ["exact", "int8"])
def test_one_request_with_rows_that_no_f16_holds_harms_no_other(odd, tmp_path, scheme):
    rng = random.Random(8)
    good = [{"ids": [token for token in prompt(rng, length) if token not in (NAN_TOKEN, LARGE_TOKEN)],
             "sampling": {"max_tokens": 4}} for length in (20, 140, 300, 500)]
    bad = [{"ids": [*prompt(rng, 150), token, *prompt(rng, 150)], "sampling": {"max_tokens": 4}}
           for token in (NAN_TOKEN, LARGE_TOKEN)]
    jobs = [{"generate": scored(good)}, {"forget": True}, {"generate": bad + scored(good)}, {"forget": True},
            {"generate": scored(good)}, {"statistics": True}]
    engine = run(odd, jobs, tmp_path, scheme)
    before, _, beside, _, after, statistics = engine.results
    assert [len(answer["ids"]) for answer in beside[:2]] == [4, 4]
    assert all(math.isfinite(x) for answer in before for x in answer["prompt"])
    # In other company, products are summed in another order, and int8 may round the other way.
    most = 1e-4 if scheme == "exact" else 0.01
    assert difference(beside[2:], before) < most and difference(after, before) < most
    assert statistics["saturated_numbers"] > 0
    assert engine.log.count("keys or values are NaN (stored as 0), infinite or above 65504") == 1


def test_sinks_are_taken_off_the_tokens_announced(llama, tmp_path):
    """Where vLLM measures the memory (4 GiB less what the process has taken, rounded to .01 in its log): each page may
    begin a request, and then has five exact rows beside it."""
    row, gib = 3 * 2 * 2 * 64 * 4, 1 << 30  # bytes of a token in three layers
    for sinks in (0, 5):
        engine = run(llama, [{"statistics": True}], tmp_path, f"lowkv2.8,sinks={sinks}", kv_cache_memory_bytes=None,
                     gpu_memory_utilization=4 * gib / psutil.virtual_memory().total)
        measured = float(re.search(r"Auto set \(([\d.]+)/", engine.log)[1]) * gib
        said = r"(\d+) tokens fit: ([\d.]+) times .* at most (\d+) MiB, and sinks at most (\d+) MiB"
        tokens, factor, windows, beside = re.search(said, engine.log).groups()
        assert int(tokens) == engine.tokens
        pages, page = engine.tokens / 128, 128 * row / float(factor)
        assert abs(int(beside) * MIB - pages * sinks * row) <= MIB
        assert pages * (page + sinks * row) + int(windows) * MIB == pytest.approx(measured, rel=0.01)
