"""Real weights: SmolLM2-135M from the GGUF file that the set-up fetches (LOWKV_MODEL)."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import lowkv
import pytest
import torch
import transformers_caches as benchmark
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

MODEL = Path(os.environ["LOWKV_MODEL"]) if "LOWKV_MODEL" in os.environ else None
pytestmark = pytest.mark.skipif(MODEL is None, reason="LOWKV_MODEL is not set; make test-python does")
PROMPT, NEW = 512, 200
SORTED = "k=sorted-4211-head-2rows,v=token-2-head-normal-hadamard-unbiased"


@pytest.fixture(scope="module")
def loaded():
    model = AutoModelForCausalLM.from_pretrained(MODEL.parent, gguf_file=MODEL.name, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(MODEL.parent, gguf_file=MODEL.name)


@pytest.fixture(scope="module")
def prompt(loaded):
    # An older docs/architecture.md, as it was: the figures must not depend on how a page is worded.
    text = Path(__file__).with_name("smollm2_prompt.dat").read_text()
    return loaded[1](text, return_tensors="pt").input_ids[:, :PROMPT]


@pytest.fixture(scope="module")
def reference(loaded, prompt):
    return continued(loaded[0], prompt, DynamicCache(config=loaded[0].config))


@torch.inference_mode()
def continued(model, prompt, cache):
    output = model.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, past_key_values=cache,
                            pad_token_id=0)
    return output[0, PROMPT:]


@pytest.mark.long
def test_exact_gives_the_same_200_tokens(loaded, prompt, reference):
    assert torch.equal(continued(loaded[0], prompt, lowkv.Cache.from_model(loaded[0], "exact")), reference)


@torch.inference_mode()
@pytest.mark.parametrize("scheme,least", [("kivi4", 0.95), ("kivi2", 0.7), ("lowkv2.8", 0.85), (SORTED, 0.85)])
def test_packed_schemes_agree_token_by_token(loaded, prompt, reference, scheme, least):
    """Fed with the reference's own tokens, so that one other choice does not change all that follow; a few at a
    time, which is quicker."""
    model, cache = loaded[0], lowkv.Cache.from_model(loaded[0], scheme)
    model(prompt, past_key_values=cache, logits_to_keep=1)
    choices = [model(part[None], past_key_values=cache).logits[0].argmax(-1) for part in reference[:-1].split(20)]
    match = (torch.cat(choices) == reference[1:]).float().mean().item()
    print(f"{scheme}: {match:.1%} of {NEW - 1} tokens")
    assert match >= least


@torch.inference_mode()
@pytest.mark.long
@pytest.mark.parametrize("side,paddings", [("left", (100, 410)), ("right", (230,))])
def test_padding_loses_nothing(loaded, prompt, reference, side, paddings):
    """Mean KLD to the scheme `exact` of what follows a prompt, whatever padding stands before or behind it."""
    model = loaded[0]

    def predictions(padding, scheme):
        cache, pads = lowkv.Cache.from_model(model, scheme), torch.zeros(1, padding, dtype=torch.long)
        parts = [pads, prompt, reference[None]] if side == "left" else [prompt, pads, reference[None]]
        keep = torch.cat([torch.full_like(part, part is not pads) for part in parts], dim=1)
        tokens, places = torch.cat(parts, dim=1), (keep.cumsum(1) - 1).clamp_min(0)
        first = padding + PROMPT
        found = []
        for start, stop in [(0, first), *((first + i, first + i + 50) for i in range(0, NEW, 50))]:
            out = model(tokens[:, start:stop], attention_mask=keep[:, :stop], cache=cache,
                        position_ids=places[:, start:stop], logits_to_keep=stop - start if start else 1)
            found.append(out.logits[0])
        return torch.cat(found)[-NEW:].double().log_softmax(-1)

    def kld(padding):
        exact, packed = predictions(padding, "exact"), predictions(padding, "lowkv2.8")
        return (exact.exp() * (exact - packed)).sum(-1).mean().item()

    without = kld(0)
    for padding in paddings:
        lost = kld(padding)
        print(f"{side}: {without:.4f} without padding, {lost:.4f} with {padding}")
        assert lost < 1.5 * without


def test_generate_in_one_call(loaded, capfd):
    text = lowkv.generate(*loaded, "Once upon a time", max_new_tokens=12, verbose=True)
    assert text.startswith("Once upon a time") and len(text) > 30
    assert re.search(r"12/12 .*cache [0-9.]+ MiB, float32 [0-9.]+ MiB", capfd.readouterr().err)


def test_the_loop_of_the_intel_package(loaded):
    """Its README's example, with the imports changed."""
    model, tokenizer = loaded
    cache = lowkv.KiviCache.from_model(model, group_size=32, residual_length=128)
    input_ids = tokenizer("Hello world. " * 100, return_tensors="pt").input_ids
    with torch.no_grad():
        out = model(input_ids, use_cache=True)
    cache.add_tokens(out.past_key_values)
    next_id = out.logits[:, -1, :].argmax(dim=-1).unsqueeze(1)
    for _ in range(8):
        past = cache.get_full_cache()
        with torch.no_grad():
            out = model(next_id, past_key_values=past, use_cache=True)
        cache.add_tokens(out.past_key_values)
        next_id = out.logits[:, -1, :].argmax(dim=-1).unsqueeze(1)
    stats = cache.get_stats(layer=0)
    assert stats["tokens"] == input_ids.shape[1] + 8
    assert stats["compression"] == stats["fp32_bytes"] / stats["kivi_bytes"] > 1.4
    cache.reset()
    assert cache.get_stats(layer=0)["tokens"] == 0


@pytest.mark.long
def test_the_benchmark_prints_its_table(capfd):
    assert benchmark.main([str(MODEL), "--tokens", "4", "--prompt-tokens", "200", "--scheme", "kivi2"]) == 0
    out = capfd.readouterr().out
    assert "| float32 DynamicCache |" in out and "| kivi2 |" in out and "token match" in out


@pytest.mark.parametrize("words, arguments", [
    ("--scheme|lowkv5", ["--scheme", "lowkv5"]), ("--tokens: 2 or more", ["--tokens", "1"]),
    ("g33", ["--G", "33"]), ("can't write there", ["--json", "/nowhere/results.json"])])
def test_the_benchmark_checks_its_arguments_first(capfd, words, arguments):
    with pytest.raises(SystemExit, match="2"):
        benchmark.main([str(MODEL), *arguments])
    assert re.search(words, capfd.readouterr().err)


def test_a_benchmark_that_fails_says_so_where_its_parent_ignores_children(tmp_path):
    """Perl and some supervisors start programs so; Python then takes a child's exit status for 0."""
    done = subprocess.run([sys.executable, benchmark.__file__, tmp_path / "none.gguf"], capture_output=True,
                          text=True, timeout=100, preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    assert done.returncode == 1 and done.stderr.endswith("float32 DynamicCache: failed, see above\n")


@pytest.mark.parametrize("words, arguments", [
    ("max_length is not for lowkv.generate", {"max_length": 8}),
    ("num_return_sequences is not for", {"num_return_sequences": 3, "do_sample": True}),
    *((f"{name} is not for lowkv.generate", {name: None}) for name in (
        "cache", "past_key_values", "input_ids", "inputs", "inputs_embeds", "attention_mask", "use_cache")),
    ("leave out one of the two", {"verbose": True, "streamer": None})])
def test_what_generate_would_ignore_is_refused(loaded, words, arguments):
    with pytest.raises(lowkv.Error, match=words):
        lowkv.generate(*loaded, "abc", max_new_tokens=2, **arguments)


def test_generate_stops_at_strings_and_needs_a_prompt(loaded):
    long = lowkv.generate(*loaded, "1, 2, 3, 4,", max_new_tokens=20)
    short = lowkv.generate(*loaded, "1, 2, 3, 4,", max_new_tokens=20, stop_strings=["7"])
    assert "8" in long and short.endswith("7")
    with pytest.raises(lowkv.Error, match="the prompt is empty"):
        lowkv.generate(*loaded, "")
