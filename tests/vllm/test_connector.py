"""Pages that a KV connector carries from one engine to another, as bytes: prompts are read by the first and answered by
the second. vLLM's ExampleConnector keeps them in a folder; it saves a prompt in the step that begins it, so steps take
whole prompts here."""

import random
from pathlib import Path

from conftest import run
from test_engine import ids, prompt

PAGE = 128


def connected(folder):
    """Arguments of an engine that saves prompts' whole pages and loads those that are there."""
    return {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both",
                                   "kv_connector_extra_config": {"shared_storage_path": str(folder)}},
            "max_num_batched_tokens": 4096, "enable_chunked_prefill": False}


def answers(prompts, tokens):
    return [{"ids": ids, "sampling": {"max_tokens": tokens, "logprobs": 0}} for ids in prompts]


def whole_pages(prompts):
    """Tokens that ExampleConnector finds: all but what is computed to have a prediction."""
    return [(len(ids) - 2) // PAGE * PAGE for ids in prompts]


def before_they_part(one, other):
    """Differences of log probabilities, and how many tokens of all are the same from the beginning on."""
    found, tokens = [], 0
    for a, b in zip(one, other, strict=True):
        tokens += len(a["ids"])
        for x, y, p, q in zip(a["ids"], b["ids"], a["answer"], b["answer"], strict=True):
            if x != y:
                break
            found.append(abs(p - q))
    print(f"{len(found)} of {tokens} tokens, mean difference {sum(found) / len(found):.5f}")
    return sum(found) / len(found), len(found) / tokens


def carried(folder):
    """Bytes of pages in a connector's folder."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))


def test_pages_from_another_engine(llama, tmp_path):
    rng = random.Random(31)
    prompts = [prompt(rng, length) for length in (40, 129, 130, 258, 300, 515, 700, 900)]
    # Its own pages, packed, are what the other's scheme without exact rows is to give again.
    packed = "int8,window=0,sinks=0"
    read_twice = [{"generate": answers(prompts, 1)}, {"generate": answers(prompts, 24)}]
    alone = {"exact": run(llama, read_twice[1:], tmp_path, mib=48, max_num_batched_tokens=4096),
             packed: run(llama, read_twice, tmp_path, packed, mib=48, max_num_batched_tokens=4096, max_num_seqs=1)}
    for scheme, one in alone.items():
        read = run(llama, [{"generate": answers(prompts, 1)}], tmp_path, scheme, mib=48, **connected(tmp_path / scheme))
        # Pages on which requests have ended before they were full: the bytes that come count, not those rows.
        left = [{"ids": prompt(rng, 60), "sampling": {"max_tokens": 40}} for _ in range(16)]
        jobs = [{"abort": left, "after": 3}, {"forget": True}, {"generate": answers(prompts, 24)}]
        few = 20 * PAGE * 3 * 2 * 2 * (64 * 4 if scheme == "exact" else 84) / (1 << 20)
        answered = run(llama, [*jobs, {"statistics": True}], tmp_path, scheme, mib=few, max_model_len=1200,
                       **connected(tmp_path / scheme))
        assert [answer["cached"] for answer in read.results[0]] == [0] * len(prompts)
        assert [answer["cached"] for answer in answered.results[2]] == whole_pages(prompts)
        if scheme == "exact":
            assert ids([answered.results[2]]) == ids(one.results)
        else:
            difference, same = before_they_part(answered.results[2], one.results[1])
            assert difference < 2e-3 and same == 1
            assert answered.results[3]["replaced"] > 0


def test_fewer_bytes_are_carried(smollm2, tmp_path):
    """Beside vLLM's own pages; and what is read of them is what one engine alone would read."""
    from transformers import AutoTokenizer

    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    tokens = AutoTokenizer.from_pretrained(smollm2)(text)["input_ids"]
    prompts = [tokens[at:at + 600] for at in (0, 300, 600, 900)]
    options = {"dtype": "bfloat16", "mib": 256}
    found = {}
    for scheme in (None, "lowkv2.8"):
        folder = tmp_path / str(scheme)
        run(smollm2, [{"generate": answers(prompts, 1)}], tmp_path, scheme, **options, **connected(folder))
        found[scheme] = run(smollm2, [{"generate": answers(prompts, 16)}], tmp_path, scheme, **options,
                            **connected(folder)).results[0]
        assert [answer["cached"] for answer in found[scheme]] == whole_pages(prompts)
    ours, theirs = carried(tmp_path / "lowkv2.8"), carried(tmp_path / "None")
    print(f"{sum(whole_pages(prompts))} tokens: {ours} bytes for {theirs}, {theirs / ours:.2f} times as many")
    assert theirs > 4.5 * ours
    alone = run(smollm2, [{"generate": answers(prompts, 16)}], tmp_path, "lowkv2.8", **options)
    difference, same = before_they_part(found["lowkv2.8"], alone.results[0])
    assert difference < .1 and same > .5

    # Another scheme's pages are not read.
    refused = run(smollm2, [{"generate": answers(prompts, 16)}], tmp_path, "lowkv2.8,sinks=4", starts=False, **options,
                  **connected(tmp_path / "lowkv2.8"))
    assert "has not been packed with" in refused.log or "shape mismatch" in refused.log
