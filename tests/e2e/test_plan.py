"""`lowkv plan` against the papers' own figures (SKVQ, KVQuant), and what goes wrong when its
arguments are wrong."""

import json
import re
import subprocess

import gguf
import pytest
from plugin_tools import BUILD, MODEL, PATHS, Run, environment

COMMAND = BUILD / "bin/lowkv"
GIB = 2**30


def plan(*args):
    done = subprocess.run([str(COMMAND), "plan", *map(str, args)], env=environment(None),
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    return Run(done)


@pytest.fixture
def figures(tmp_path):
    def reckon(*args):
        file = tmp_path / "plan.json"
        run = plan(*args, "--json", file)
        assert run.code == 0, run.both
        out = json.loads(file.read_text())
        out["rows"] = {row["scheme"]: row for row in out["rows"]}
        return out
    return reckon


# SKVQ, Appendix C, table 5: Llama-2-7B on an A100-80GB, reckoned with LLM-Viewer, in ms, GB and GB
# for FP16, KV4 and KV2. Its k is 1,000, and KV4 and KV2 are plain bits: metadata is left out.
SKVQ = {
    (1, "32k"): ((10.6, 7.5, 7), (21.6, 15.3, 14.3), (29.7, 17.2, 15.1)),
    (1, "128k"): ((23.1, 10.8, 8.7), (47.2, 22, 17.8), (80.1, 29.7, 21.4)),
    (1, "200k"): ((32.5, 13.3, 10), (66.3, 27, 20.5), (118, 39.2, 26.1)),
    (64, "32k"): ((274.1, 76.6, 43.7), (559, 156, 89.1), (1100, 282, 147)),
    (64, "128k"): ((1100, 286.4, 154.8), (2200, 584, 316), (4300, 1100, 551)),
    (64, "200k"): ((1700, 443, 238.1), (3400, 905, 485), (6700, 1700, 853)),
    (128, "32k"): ((541.8, 146.8, 81), (1100, 299, 165), (2200, 550, 282)),
    (128, "128k"): ((2100, 566.4, 303.1), (4400, 1200, 618), (8600, 2200, 1100)),
    (128, "200k"): ((3300, 881.1, 469.7), (6800, 1800, 958), (13400, 3400, 1700)),
}
# What LLM-Viewer counts as weights: the layers' projections (embeddings and head left out).
SKVQ_WEIGHTS = 2 * 32 * (4 * 4096**2 + 3 * 4096 * 11008)


def close_to(printed):
    """The table prints hundreds from 1,000 on; below, it also has small activations (at most 1.2 %)
    that lowkv plan leaves out."""
    return pytest.approx(printed, abs=50 if printed >= 1000 else 0.012 * printed)


@pytest.mark.parametrize("batch, context", SKVQ)
def test_skvq_appendix_c(figures, batch, context):
    out = figures("--shape", "llama-2-7b", "--weights", f"{SKVQ_WEIGHTS}B", "--batch", batch,
                  "--context", context, "--memory", "80GB", "--bandwidth", 2039, "--bits", "4,2",
                  "--unfused")
    rows = [out["rows"][name] for name in ("f16", "4 bits", "2 bits")]
    times, accesses, memories = SKVQ[batch, context]
    for row, time, access, memory in zip(rows, times, accesses, memories, strict=True):
        assert 1e3 * row["seconds_per_step"] == close_to(time)
        assert row["access_bytes"] / 1e9 == close_to(access)
        assert row["total_bytes"] / 1e9 == close_to(memory)


def test_skvq_seven_times_faster_and_a_million_tokens(figures):
    args = ("--shape", "llama-2-7b", "--memory", "80GB", "--bandwidth", 2039, "--bits", "2")
    out = figures(*args, "--batch", 128, "--context", "200k", "--unfused")["rows"]
    faster = out["f16"]["access_bytes"] / out["2 bits"]["access_bytes"]
    assert faster == pytest.approx(7, abs=0.2)
    assert figures(*args, "--context", "1M")["rows"]["2 bits"]["fits"]


# KVQuant, table 1 (kvquant-review.txt, figure 4 and section 4.3): the cache of 128K = 131,072
# tokens in GB = GiB, with the average bits of its table 2.
KVQUANT = {
    "llama-7b": {16: 64.0, 4: 16.0, 4.33: 17.3, 3: 12.0, 3.33: 13.3, 2.33: 9.3},
    "llama-13b": {16: 100.0, 4: 25.0, 4.33: 27.0, 3: 18.8, 3.33: 20.8, 2.33: 14.5},
    "llama-65b": {16: 320.0, 3.33: 66.5},
}


@pytest.mark.parametrize("shape", KVQUANT)
def test_kvquant_cache_sizes(figures, shape):
    bits = ",".join(map(str, KVQUANT[shape]))
    rows = figures("--shape", shape, "--context", "128Ki", "--bits", bits)["rows"]
    for bits, size in KVQUANT[shape].items():
        # Both are printed rounded: the size to 0.1, the bits to 0.01.
        rounding = 0.05 + (size * 0.005 / bits if bits % 1 else 0)
        assert rows[f"{bits} bits"]["kv_bytes"] / GIB == pytest.approx(size, abs=rounding + 1e-6)


def test_kvquant_share_of_the_cache(figures):
    # Section 2: 2 % of LLaMA-7B's memory at 512 tokens, 84 % at 128K.
    for context, share in (("512", 0.02), ("128Ki", 0.84)):
        row = figures("--shape", "llama-7b", "--context", context)["rows"]["f16"]
        assert row["kv_bytes"] / row["total_bytes"] == pytest.approx(share, abs=0.005)


def test_kvquant_longest_contexts(figures):
    # Table of section 9: how far the 64 GB of 128K tokens at f16 reach ("~").
    rows = figures("--shape", "llama-7b", "--weights", "0B", "--memory", "64GiB", "--bits",
                   "4.33,3.33,2.33")["rows"]
    for bits, thousands in (("4.33", 475), ("3.33", 615), ("2.33", 883)):
        assert rows[f"{bits} bits"]["longest_context"] / 1024 == pytest.approx(thousands, rel=0.006)

    # 1M tokens on one A100-80GB (its memory is 80 GiB) and 10M on eight, at 2 bits with f16
    # weights. With 1 % of outliers (2.33 bits) f16 weights leave room for a little less.
    for devices, tokens in ((1, 1e6), (8, 1e7)):
        rows = figures("--shape", "llama-7b", "--memory", f"{80 * devices}GiB", "--bits",
                       "2,2.33")["rows"]
        assert tokens <= rows["2 bits"]["longest_context"] < 1.11 * tokens
        assert 0.87 * tokens < rows["2.33 bits"]["longest_context"] < tokens


def test_window_and_sinks_are_counted_as_held(figures):
    # One layer, one head of 64: a token takes 256 bytes at f16; kivi2 holds 3 bits an element.
    shape = ("--layers", 1, "--kv-heads", 1, "--head-dim", 64, "--schemes")
    packed, exact = 32 * 64 * 2 * 3 / 8, 32 * 256

    def held(scheme, tokens):
        rows = figures(*shape, scheme, "--context", tokens)["rows"]
        return rows[scheme.replace("+", ",")]["kv_bytes"]

    assert held("kivi2", 128) == 4 * exact
    assert held("kivi2", 1) == exact
    # 1,023 tokens: 32 blocks, and 27 are out of the window of 128; the first holds the sinks.
    assert held("kivi2", 1023) == 26 * packed + 6 * exact
    assert held("kivi2+sinks=0", 1023) == 27 * packed + 5 * exact
    assert held("kivi2", 1024) == 27 * packed + 5 * exact
    # KIVI's sawtooth holds 128 tokens more before it packs them at once.
    assert held("kivi2+flush=128", 1023) == 23 * packed + 9 * exact


@pytest.mark.parametrize("scheme", ["kivi2", "k=token-3-head-normal-hadamard-mean+v=token-2-g32"])
def test_a_real_cache_is_as_planned(figures, tmp_path, scheme):
    file = tmp_path / "compare.json"
    subprocess.run([str(COMMAND), "compare", "-m", MODEL, "-f", PATHS["LOWKV_DEMO_TEXT"],
                    "--schemes", scheme, "--stock", "none", "--tokens", "300", "--chunk", "64",
                    "--skip", "200", "--no-speed", "--json", str(file)],
                   env=environment(None), check=True, capture_output=True, timeout=120)
    found = json.loads(file.read_text())
    planned = figures("-m", MODEL, "--context", found["cached"], "--schemes", f"exact,{scheme}")["rows"]
    for row in found["rows"]:
        assert planned[row["scheme"]]["kv_bytes"] == row["kv_bytes"]


def test_longest_context_is_the_last_that_fits(figures):
    args = ("--shape", "smollm2-135m", "--memory", "2GB", "--batch", 3, "--schemes",
            "exact,kivi2,kivi2+flush=96,k=channel-3-g128+v=token-2-g32")
    longest = {name: row["longest_context"] for name, row in figures(*args)["rows"].items()}
    assert len(longest) == 5
    for name, tokens in longest.items():
        assert figures(*args, "--context", tokens)["rows"][name]["fits"]
        assert not figures(*args, "--context", tokens + 1)["rows"][name]["fits"]


def test_conversations_that_share_a_context_each_have_a_window(figures):
    shared = ("--shape", "llama-3.1-8b", "--weights", "elsewhere", "--memory", "16GiB", "-c", "32Ki")
    one, eight = (figures(*shared, *more)["rows"] for more in ((), ("-np", 8)))
    block = 32 * 2 * 1024 * 2 * 128  # unquantized, in all layers
    assert eight["f16"]["kv_bytes"] == one["f16"]["kv_bytes"]
    more = eight["lowkv2.8"]["kv_bytes"] - one["lowkv2.8"]["kv_bytes"]
    assert 7 * 2 * block * 0.8 < more < 7 * 4 * block
    assert eight["lowkv2.8"]["longest_context"] < one["lowkv2.8"]["longest_context"]
    assert figures(*shared, "--parallel", 8)["rows"] == eight


def test_a_gguf_file_is_read(figures):
    out = figures("-m", MODEL, "--memory", "1GiB")
    assert out["layers"] == 30 * [{"kv_heads": 3, "head_dim": 64}]
    assert out["context"] == 8192
    assert 0.9e8 < out["weights_bytes"] < 1e8
    assert out["rows"]["f16"]["kv_bytes"] == 23040 * out["context"]
    assert out["bandwidth_bytes_per_s"] is None and out["rows"]["f16"]["seconds_per_step"] is None
    used = ["f16", "exact", "lowkv1.5", "lowkv2", "lowkv2.8", "lowkv3", "lowkv4"]
    assert list(out["rows"]) == used
    every = list(figures("-m", MODEL, "--all")["rows"])
    assert every[:len(used)] == used and {"kivi2", "turboquant4-qr"} < set(every)


def test_what_is_not_shown_is_counted(figures):
    args = ("--shape", "smollm2-135m", "--context", 100)
    hidden = len(figures(*args, "--all")["rows"]) - len(figures(*args)["rows"])
    assert f"\n{hidden} more presets, to compare with: add --all.\n" in plan(*args).out
    for more in (("--all",), ("--schemes", "kivi2")):
        assert "more presets" not in plan(*args, *more).out
    assert plan(*args, "--all", "--schemes", "kivi2").code == 2


def header_only(path, architecture="llama", layers=4, kv_heads=2, **more):
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(512)
    writer.add_head_count(8)
    writer.add_head_count_kv(kv_heads)
    for key, value in more.items():
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        add(key.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_kv_heads_may_differ_by_layer(figures, tmp_path):
    file = header_only(tmp_path / "some.gguf", kv_heads=[2, 0, 8, 2])
    out = figures("-m", file, "--context", 1000)
    assert [layer["kv_heads"] for layer in out["layers"]] == [2, 0, 8, 2]
    assert out["rows"]["f16"]["kv_bytes"] == 1000 * 4 * 64 * (2 + 8 + 2)


def test_latent_rows_are_stored_once(figures, tmp_path):
    file = header_only(tmp_path / "some.gguf", "deepseek2", kv_heads=1, **{
        "deepseek2__attention__key_length": 576, "deepseek2__attention__value_length": 512,
        "deepseek2__attention__key_length_mla": 192, "deepseek2__attention__value_length_mla": 128})
    out = figures("-m", file, "--context", 1000, "--schemes", "exact,lowkv3")
    assert out["layers"] == 4 * [{"kv_heads": 1, "head_dim": 576, "value_dim": 512}]
    assert out["rows"]["f16"]["kv_bytes"] == 1000 * 4 * 2 * 576
    assert out["rows"]["f16"]["bits_per_element"] == out["rows"]["exact"]["bits_per_element"] == 16
    assert out["rows"]["lowkv3"]["bits_per_element"] == 3.375
    assert "576, whose first 512 channels are the values" in plan("-m", file, "--context", 1000).out


def test_layers_that_only_draft_have_no_cache(figures, tmp_path):
    file = header_only(tmp_path / "some.gguf", "glm4moe", glm4moe__nextn_predict_layers=1)
    assert len(figures("-m", file)["layers"]) == 3
    # Gemma 4's assistant is nothing but such layers, and is planned for as a model.
    file = header_only(tmp_path / "some.gguf", "gemma4-assistant", **{"gemma4-assistant__nextn_predict_layers": 4})
    assert len(figures("-m", file)["layers"]) == 4


@pytest.mark.parametrize("architecture, more, sliding", [
    ("gemma2", {}, [0, 2]),
    ("afmoe", {}, [0, 1, 2]),
    ("gemma3", {"gemma3__attention__sliding_window_pattern": 3}, [0, 1, 3]),
    ("some", {"some__attention__sliding_window_pattern": [True, False, False, True]}, [0, 3]),
])
def test_layers_that_slide_hold_their_window(figures, tmp_path, architecture, more, sliding):
    more = more | {f"{architecture}__attention__sliding_window": 1000}
    file = header_only(tmp_path / "some.gguf", architecture, **more)
    out = figures("-m", file, "--context", 10000, "--schemes", "kivi2")
    assert [i for i, layer in enumerate(out["layers"]) if "window" in layer] == sliding
    # A window and a micro-batch of 512, in steps of 256 cells; 512 bytes a token and layer.
    assert out["rows"]["f16"]["kv_bytes"] == 512 * ((4 - len(sliding)) * 10000 + len(sliding) * 1536)
    few = figures("-m", file, "--context", 100)["rows"]["f16"]["kv_bytes"]
    assert few == 512 * 4 * 100
    longest = out["rows"]["kivi2"]["longest_context"]
    args = ("-m", file, "--schemes", "kivi2", "--context")
    assert figures(*args, longest)["rows"]["kivi2"]["fits"]
    assert not figures(*args, longest + 1)["rows"]["kivi2"]["fits"]


def test_windows_of_an_unknown_pattern_are_counted_in_full(tmp_path):
    file = header_only(tmp_path / "some.gguf", "some", some__attention__sliding_window=1000)
    assert "counted in full: an upper bound" in plan("-m", file).out


def test_a_model_whose_layers_all_slide_takes_any_context(tmp_path):
    file = header_only(tmp_path / "some.gguf", "some", some__attention__sliding_window=1000,
                       some__attention__sliding_window_pattern=4 * [True])
    run = plan("-m", file, "--schemes", "kivi2")
    assert run.code == 0 and run.out.count(" any |") == 2, run.both


@pytest.mark.parametrize("more, words", [
    ({"deepseek2__attention__indexer__top_k": 8}, "sparse attention"),
    ({"deepseek2__ssm__state_size": 16}, "recurrent layers"),
    ({"deepseek2__attention__key_length": 96, "deepseek2__attention__value_length": 64},
     "keys of 96 and values of 64"),
    ({"split__count": 3}, "--weights"),
])
def test_files_that_can_not_be_planned_for(tmp_path, more, words):
    run = plan("-m", header_only(tmp_path / "other.gguf", "deepseek2", **more))
    assert run.code in (1, 2) and not run.out and words in run.err, run.both


def test_a_filter_is_refused():
    run = plan("--shape", "llama-2-7b", "--schemes", "kivi2+filter=random+evict=50%")
    assert run.code == 1 and "filter=, keep= and evict= are not served in llama.cpp" in run.err, run.both


def test_a_file_without_the_keys_names_the_missing_one(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "clip.gguf"), "clip")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    run = plan("-m", tmp_path / "clip.gguf")
    assert run.code == 1 and "clip.block_count" in run.err and "--layers" in run.err, run.both


@pytest.mark.parametrize("args, words", [
    ((), "--shape NAME"),
    (("--layers", 4), "--kv-heads"),
    (("--shape", "llama-2-7b", "-m", MODEL), "only one"),
    (("--shape", "llama-9"), "llama-2-7b"),
    (("-m", "/no/such.gguf"), "/no/such.gguf"),
    (("-m", __file__), "not a GGUF file"),
    (("--layers", 4, "--kv-heads", 2, "--head-dim", 64), "--context 32Ki"),
    (("--layers", 4, "--kv-heads", 2, "--head-dim", 100, "--context", 9), "multiple of 16"),
    (("--shape", "llama-2-7b", "--memory", "80"), "16GB"),
    (("--shape", "llama-2-7b", "--memory", "1e300TB"), "16GB"),
    (("--shape", "llama-2-7b", "--weights", "12 apples"), "--weights 12 apples"),
    (("--shape", "llama-2-7b", "--context", "0"), "at least 1"),
    (("--shape", "llama-2-7b", "--context", "128KB"), "32Ki (32,768)"),
    (("--shape", "llama-2-7b", "--bandwidth", "fast"), "2.039TB/s"),
    (("--shape", "llama-2-7b", "--schemes", "kivi3"), "kivi2"),
    (("--shape", "llama-2-7b", "--bits", "99"), "--bits"),
    (("--shape", "llama-2-7b", "--json", "/no/such/folder/x.json"), "/no/such/folder"),
    (("--layers", 4, "--kv-heads", 2, "--head-dim", 64, "--context", 9, "--unfused"), "--heads"),
])
def test_wrong_arguments_say_what_is_right(args, words):
    run = plan(*args)
    assert run.code in (1, 2) and not run.out, run.both
    assert words in run.err, run.both
    assert len(run.err.strip().splitlines()) <= 2, run.both


def test_help_teaches_three_examples():
    assert plan("--help").out.count("\n  lowkv plan ") == 3


def test_sizes_are_decimal_or_binary_as_written(figures):
    for text, size in (("16G", 16e9), ("16GB", 16e9), ("16GiB", 16 * GIB), ("512MiB", 2**29)):
        assert figures("--shape", "llama-2-7b", "--memory", text)["memory_bytes"] == size
    for text, tokens in (("32k", 32000), ("32Ki", 32768), ("1.5M", 1500000), ("777", 777)):
        assert figures("--shape", "llama-2-7b", "--context", text)["context"] == tokens
    for text in ("2039", "2039GB/s", "2.039TB/s"):
        out = figures("--shape", "llama-2-7b", "--bandwidth", text)
        assert out["bandwidth_bytes_per_s"] == pytest.approx(2.039e12)
        row = out["rows"]["f16"]
        assert row["seconds_per_step"] == pytest.approx(row["access_bytes"] / 2.039e12)


def test_weights_elsewhere_leave_the_memory_to_the_cache():
    words = ["--shape", "llama-3.1-8b", "-c", "128Ki", "--memory", "16GB", "-s", "lowkv2.8"]
    here, there = plan(*words), plan(*words, "--weights", "elsewhere")
    assert here.code == there.code == 0, there.both
    there.said(r"The weights, 15\.0 GiB, lie elsewhere: the memory is the cache's alone\.")
    assert re.search(r"lowkv2.8.*\| +no \|", here.out) and re.search(r"lowkv2.8.*\| +yes \|", there.out), there.out
