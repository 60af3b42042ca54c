"""`lowkv calibrate`: files that hold what the model computed, and clear refusals."""

import json
import random
import struct
import subprocess

import gguf
import numpy as np
import plugin_models as models
import pytest
from plugin_tools import BUILD, MODEL, PATHS, ROOT, Run, environment

COMMAND = BUILD / "bin/lowkv"
GROUPED = "k=token-2-g32-reorder-clip-pre-fp8,v=token-2-g32-reorder-clip-fp8,window=32"


def lowkv(*args, timeout=300, **env):
    done = subprocess.run([str(COMMAND), *map(str, args)], env=environment(None, **env),
                          stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=timeout)
    return Run(done)


def read_tensors(path):
    """Metadata and arrays of a safetensors file, by the format's description alone."""
    data = path.read_bytes()
    length, = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + length])
    types = {"F32": "<f4", "U16": "<u2"}
    arrays = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        arrays[name] = np.frombuffer(data[begin:end], types[entry["dtype"]]).reshape(entry["shape"])
    return header["__metadata__"], arrays


def write_tensors(path, metadata, arrays):
    header, data = {"__metadata__": metadata}, b""
    for name, array in arrays.items():
        begin = len(data)
        dtype, stored = ("U16", "<u2") if array.dtype == np.uint16 else ("F32", "<f4")
        data += array.astype(stored).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape),
                        "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("calibrate")


@pytest.fixture(scope="module")
def text(folder):
    source = random.Random(1)
    path = folder / "text.txt"
    path.write_text("".join(source.choice("abcdefgh ijklmnop,.\n") for _ in range(1000)))
    return path


@pytest.fixture(scope="module")
def model(folder):
    return models.llama(folder / "model.gguf")


@pytest.fixture(scope="module")
def calibrate(model, text, folder):
    def run(scheme, *more, model=model, text=text):
        file = folder / "out.safetensors"
        run = lowkv("calibrate", "-m", model, "--text", text, "--scheme", scheme, "-t", 1,
                    "-o", file, *more)
        assert run.code == 0, run.both
        return run, *read_tensors(file)
    return run


def exact_keys(model, text):
    """Layer 0's keys before RoPE and its values, from the file's weights."""
    reader = gguf.GGUFReader(str(model))
    weights = {tensor.name: tensor.data for tensor in reader.tensors}
    x = weights["token_embd.weight"][np.frombuffer(text, np.uint8)].astype(np.float64)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weights["blk.0.attn_norm.weight"]
    return x @ weights["blk.0.attn_k.weight"].T, x @ weights["blk.0.attn_v.weight"].T


def test_ranges_are_those_of_the_keys_before_rope(calibrate, model, text):
    run, said, found = calibrate("kvquant2,window=16", "--tokens", 600, "--context", 300)
    keys, _ = exact_keys(model, text.read_bytes()[:600])
    kept = np.delete(keys, [0, 300], axis=0)  # each window's first token is no part of it
    assert found["layers.0.key.low"] == pytest.approx(kept.min(0), abs=0.01)
    assert found["layers.0.key.high"] == pytest.approx(kept.max(0), abs=0.01)
    assert said["format"] == "lowkv-calibration" and said["version"] == "1"
    assert said["scheme"] == "kvquant2,window=16" and said["tokens"] == "600"
    assert said["text"] == text.name and said["tool"].startswith("lowkv ")
    assert (said["layers"], said["kv_heads"], said["head_dim"]) == ("2", "2", "64")
    assert said["model"] == ("architecture=llama layers=2 heads=4 kv_heads=2 head_dim=64 "
                             "vocabulary=258 rope_base=none name=")
    assert sorted({name.split(".", 2)[2] for name in found}) == [
        "key.boundaries", "key.high", "key.levels", "key.low", "value.boundaries", "value.levels"]
    run.said("LOWKV_CALIBRATION=")


def test_outliers_leave_the_ranges(calibrate, model, text):
    _, _, found = calibrate("kvquant3-1%", "--tokens", 600, "--context", 600)
    keys, _ = exact_keys(model, text.read_bytes()[:600])
    ordered = np.sort(keys[1:], axis=0)
    tail = int(0.005 * 599)
    assert found["layers.0.key.low"] == pytest.approx(ordered[tail], abs=0.01)
    assert found["layers.0.key.high"] == pytest.approx(ordered[-1 - tail], abs=0.01)
    assert len(found["layers.1.value.levels"]) == 8


def test_groups_and_clips(calibrate):
    run, _, found = calibrate(GROUPED)
    for layer in range(2):
        for part in ("key", "value"):
            group = found[f"layers.{layer}.{part}.group"]
            clip = found[f"layers.{layer}.{part}.clip"]
            assert group.shape == (128,) and set(group) == {0, 1, 2, 3} and clip.shape == (4,)
            assert (clip >= 0.3).all() and (clip <= 1).all()
    row = run.said(r"\| 1 +\| +([\d.]+) % \| +([\d.]+) % \|")
    assert float(row[2]) < float(row[1])
    _, _, again = calibrate(GROUPED)
    assert all((again[name] == found[name]).all() for name in found)


def test_q_norm_and_fisher_weights_change_the_levels(calibrate, folder):
    _, _, plain = calibrate("kvquant2,window=16")
    _, _, moved = calibrate("kvquant2,window=16", "--q-norm")
    assert (moved["layers.0.key.boundaries"] == plain["layers.0.key.boundaries"]).all()
    assert moved["layers.0.key.levels"][-1] > plain["layers.0.key.levels"][-1]
    weights = {f"layers.{i}.{part}": np.ones(128) for i in range(2) for part in ("key", "value")}
    weights["layers.0.key"][1:] = 1e-6  # one channel alone counts, in whatever order
    about = {"format": "lowkv-fisher", "version": "1", "layers": "2", "pairs": "halves"}
    file = write_tensors(folder / "fisher.safetensors", about, weights)
    _, _, weighted = calibrate("kvquant2,window=16", "--fisher", file)
    assert (weighted["layers.0.key.levels"] != plain["layers.0.key.levels"]).any()
    assert weighted["layers.1.key.levels"] == pytest.approx(plain["layers.1.key.levels"])
    about["layers"] = "3"
    write_tensors(file, about, weights)
    run = lowkv("calibrate", "-m", folder / "model.gguf", "--text", folder / "text.txt",
                "--scheme", "kvquant2", "--fisher", file, "-o", folder / "none.safetensors")
    assert run.code == 1 and "a model of 3 layers; this one has 2" in run.err, run.both
    assert not (folder / "none.safetensors").exists()


def test_the_package_safetensors_opens_it(calibrate, folder):
    _, said, found = calibrate(GROUPED)
    script = ("import json, sys; from safetensors import safe_open\n"
              "with safe_open(sys.argv[1], 'np') as f:\n"
              "    print(json.dumps([f.metadata(), {k: f.get_tensor(k).tolist() for k in f.keys()}]))")
    done = subprocess.run([PATHS["LOWKV_TRANSFORMERS_PYTHON"], "-c", script, folder / "out.safetensors"],
                          capture_output=True, text=True, check=True)
    metadata, arrays = json.loads(done.stdout)
    assert metadata == said and arrays == {name: a.tolist() for name, a in found.items()}


@pytest.mark.long
def test_fisher_weights_of_the_real_model(calibrate, folder):
    file, text = folder / "real.safetensors", PATHS["LOWKV_HANDBOOK_TEXT"]
    done = subprocess.run([PATHS["LOWKV_TRANSFORMERS_PYTHON"], ROOT / "tools/fisher.py", "-m", MODEL,
                           "--text", text, "-o", file, "-n", "128", "-c", "64", "-t", "1"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    said, weights = read_tensors(file)
    assert (said["layers"], said["pairs"], said["tokens"]) == ("30", "halves", "128")
    assert len(weights) == 60 and all((w >= 0).all() and w.any() for w in weights.values())
    short = ("kvquant3", "--tokens", 256, "--context", 256)
    _, _, plain = calibrate(*short, model=MODEL, text=text)
    _, _, found = calibrate(*short, "--fisher", file, model=MODEL, text=text)
    for name in plain:
        assert (plain[name] == found[name]).all() == name.endswith(("low", "high")), name


@pytest.mark.long
def test_other_models(calibrate, folder):
    """Soft-capped scores and sliding windows; no rotary embedding (ALiBi)."""
    for make in (models.gemma2, models.bloom):
        other = make(folder / f"{make.__name__}.gguf")
        scheme = "k=token-4-g64-reorder-clip-pre,v=token-4-g64-reorder-clip,window=32"
        run, _, found = calibrate(scheme, model=other)
        assert all((array <= 1).all() for name, array in found.items() if name.endswith("clip"))
        run.said("Written: ")


@pytest.mark.long
def test_the_real_model(calibrate, folder):
    run, said, found = calibrate("skvq-k2v2", "--tokens", 256, "--context", 256, model=MODEL,
                                 text=PATHS["LOWKV_HANDBOOK_TEXT"])
    assert said["layers"] == "30" and "rope_base=100000" in said["model"]
    assert set(found["layers.29.key.group"]) == {0, 1}
    rows = [line.split("|") for line in run.out.splitlines() if line.endswith("% |")]
    assert len(rows) == 8
    for row in rows:
        before, after = (float(cell.strip(" %")) for cell in row[-3:-1])
        assert after < before


@pytest.mark.parametrize("args, words", [
    (("--scheme", "kivi2"), "kivi2 needs no calibration: use it as it is. These do: skvq-k4v4"),
    (("--scheme", "skvq-k3v3"), "skvq-k2v2"),
    (("--tokens", 5000), "has 1,000 tokens; --tokens 5,000 were asked for"),
    (("--context", 8192), "longer than the model's of 4,096"),
    (("--context", 128), "windows of 125 tokens are too short"),
    (("--tokens", 100), "give it more --tokens"),
    (("--scheme", "skvq-k2v2,window=2048"), "give it a longer"),
    (("-o", "/no/such/folder/file"), "there is no folder /no/such/folder"),
    (("--fisher", "/no/such/file"), "/no/such/file: there is no such file"),
    (("--fisher", "/no/such/file", "--scheme", "k=channel-2-static-learned,v=exact"), "add -pre"),
    (("--text", "/no/such/text"), "can't read the text file /no/such/text"),
])
def test_wrong_arguments_say_what_is_right(model, text, folder, args, words):
    defaults = {"--text": text, "-o": folder / "wrong.safetensors", "-t": 1}
    defaults.update(zip(args[::2], args[1::2], strict=True))
    run = lowkv("calibrate", "-m", model, *(word for pair in defaults.items() for word in pair))
    assert run.code in (1, 2) and not run.out and words in run.err, run.both
    assert not (folder / "wrong.safetensors").exists()


def test_models_without_a_cache_in_every_layer_are_refused(folder, text):
    run = lowkv("calibrate", "-m", models.lfm2(folder / "lfm2.gguf"), "--text", text, "-o",
                folder / "lfm2.safetensors")
    assert run.code == 1 and "layer 0 has no attention" in run.err, run.both
