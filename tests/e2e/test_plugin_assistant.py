"""Gemma 4's assistant: a draft model that stores nothing and attends to its target's caches."""

import re

import pytest
from models.gemma import gemma4, gemma4_assistant
from plugin_tools import server, text

# A drafted token's first candidate, with its probability.
DRAFTED = r"draft candidate   0, pos +\d+: +(\d+) \( +([\d.]+)\)"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assistant")
    return gemma4(folder / "gemma4.gguf"), gemma4_assistant(folder / "assistant.gguf")


def draft(tmp_path, files, scheme):
    target, assistant = files
    device = ("-devd", "LOWKV") if scheme else ()
    with server(tmp_path, "-c", 2048, "-np", 1, "-md", assistant, "--spec-type", "draft-mtp", "--spec-draft-n-max", 3,
                "-fit", "off", *device, "-v", scheme=scheme, model=target) as s:
        answers = [s.complete(text(i, 300 + 200 * i), tokens=24) for i in range(3)]
    assert all(a["timings"]["draft_n"] > 0 for a in answers)
    return [a["content"] for a in answers], re.findall(DRAFTED, s.log_text()), s.log_text()


def test_it_drafts_as_by_stock(tmp_path, files):
    """With flash attention, as its target: without, it would take the target's values for transposed ones."""
    answers, drafted, _ = draft(tmp_path, files, None)
    ours, our_drafts, log = draft(tmp_path, files, "exact")
    assert "Flash Attention not supported" not in log and "failed to compute graph" not in log, log[-3000:]
    assert ours == answers and len(our_drafts) == len(drafted) > 100
    # llama.cpp adds values up in f16, we in f32: near ties may fall otherwise, and what is drafted behind them.
    assert sum(a == b for (a, _), (b, _) in zip(drafted, our_drafts, strict=True)) > 0.9 * len(drafted)


def test_its_drafts_read_packed_rows(tmp_path, files):
    _, _, log = draft(tmp_path, files, "kivi4,window=32,sinks=0")
    assert "lowkv: active: scheme kivi4" in log and "NOT active" not in log, log[-3000:]
    assert "Flash Attention not supported" not in log and "failed to compute graph" not in log, log[-3000:]
