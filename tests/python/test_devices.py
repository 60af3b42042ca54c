"""Caches on a device other than the CPU, beside the same on the CPU. The model is on the CPU either way; test_gpu.py
has it on a GPU."""

import os
import subprocess
import sys
import types

import lowkv
import pytest
import torch
from families import CPU_MULTIPLIES_MATRICES, MATRIX_BUDGET, build
from lowkv._core import PagedLayer, Plan, Retention, RowType, Store, parse_scheme
from lowkv.visibility import Visibility

DEVICE = os.environ.get("LOWKV_DEVICE", "cpu")
on_device = pytest.mark.skipif(DEVICE == "cpu", reason="LOWKV_DEVICE names no device; make test-python-opencl does")
on_opencl = pytest.mark.skipif(not DEVICE.startswith("opencl"), reason="LOWKV_DEVICE names no OpenCL device")
on_cuda = pytest.mark.skipif(not DEVICE.startswith("cuda"), reason="LOWKV_DEVICE names no CUDA device; make "
                             "test-python-cuda does")
SCHEMES = ["exact", "lowkv2.8,window=16,sinks=3", "kivi2,window=16"]


def ids(batch, tokens, seed=0):
    return torch.randint(3, 128, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3"])
def model(request):
    return build(request.param)[0]


@torch.no_grad()
def run(model, cache, tokens):
    return model(tokens, past_key_values=cache).logits


def both(model, scheme):
    """The cache to be tested, and the one on the CPU."""
    return lowkv.Cache.from_model(model, scheme, DEVICE), lowkv.Cache.from_model(model, scheme, "cpu")


def near_the_cpu(got, want, bound):
    """On packed rows: within `bound` of the largest, or within that of a CPU that multiplies matrices."""
    if CPU_MULTIPLIES_MATRICES:
        bound = MATRIX_BUDGET
    assert (got - want).abs().max() < bound * want.abs().max()


def close(got, want, scheme):
    """As far apart as two kernels may be for the same rows: the CPU multiplies few queries in integers, with an error
    of up to 2e-3 of an output (tests/attention_check.h)."""
    if scheme == "exact":
        assert (got - want).abs().max() < 1e-5 * want.abs().max()
    else:
        near_the_cpu(got, want, 1e-3)


# ---- names ----


def test_wrong_devices_are_refused_by_name_and_change_nothing(monkeypatch, tmp_path):
    model, stock = build("llama")
    for device, words in (("gpu", "there is no device 'gpu': it is 'cpu', 'opencl',"), ("", "there is no device ''"),
                          ("openclx", "there is no device 'openclx'"), (0, "device must be a str such as 'cpu'")):
        for make in (lambda d: lowkv.Cache.from_model(model, device=d), lambda d: lowkv.Cache("kivi2", [None], d),
                     lambda d: lowkv.KiviCache.from_model(model, device=d),
                     lambda d: lowkv.generate(model, None, "", device=d)):
            with pytest.raises(lowkv.Error, match=words):
                make(device)
    monkeypatch.setenv("LOWKV_DEVICE", "xpu")
    with pytest.raises(lowkv.Error, match="LOWKV_DEVICE in the environment: there is no device 'xpu'"):
        lowkv.Cache.from_model(model)
    assert type(model) is type(stock) and model.config._attn_implementation == "eager"
    cache = lowkv.Cache.from_model(model, "kivi2", "cpu")  # what is named counts
    assert cache.device == "cpu"
    run(model, cache, ids(1, 100))
    cache.save(tmp_path / "prefix")
    with pytest.raises(lowkv.Error, match="there is no device 'gpu'"):
        lowkv.Cache.load(tmp_path / "prefix", model, device="gpu")
    monkeypatch.delenv("LOWKV_DEVICE")
    assert lowkv.Cache.load(tmp_path / "prefix", model).device == "cpu"


@pytest.mark.skipif(DEVICE.startswith("opencl"), reason="this build has OpenCL")
@pytest.mark.parametrize("device", ["opencl", "opencl:pocl"])
def test_a_build_without_opencl_says_so(device):
    with pytest.raises(lowkv.Error, match=f"device '{device}': this build has none such; configure one with -DLOWKV_"):
        lowkv.Cache.from_model(build("llama")[0], device=device)


@on_opencl
def test_an_unknown_opencl_device_is_refused_with_those_that_there_are():
    words = r"no OpenCL device has 'no such' in its name or version; there is:\n  opencl:.+ / .+"
    with pytest.raises(lowkv.Error, match=words):
        lowkv.Cache.from_model(build("llama")[0], device="opencl:no such")


@on_opencl
def test_a_machine_without_a_platform_is_told_what_is_missing(tmp_path):
    done = subprocess.run([sys.executable, "-c", "import lowkv; lowkv.Cache('kivi2', [None])"], capture_output=True,
                          text=True, env=os.environ | {"OCL_ICD_VENDORS": str(tmp_path)}, check=False)
    assert "lowkv._core.Error: LOWKV_DEVICE in the environment: there is no OpenCL device" in done.stderr, done.stderr


@on_opencl
def test_a_device_is_known_by_its_whole_name():
    model, _ = build("llama")
    cache = lowkv.Cache.from_model(model)
    assert cache.device.startswith("opencl:") and " / " in cache.device
    assert lowkv.Cache.from_model(model, device=cache.device).device == cache.device
    assert cache.fork().device == cache.device
    if "Portable Computing Language" in cache.device:
        assert lowkv.Cache.from_model(model, device="opencl:pocl").device == cache.device


@pytest.mark.skipif(DEVICE.startswith("cuda"), reason="lowkv-cuda is there")
def test_without_its_package_cuda_is_refused():
    model, _ = build("llama")
    for device in ("cuda", "cuda:1"):
        with pytest.raises(lowkv.Error, match=f"device '{device}': CUDA devices take the package lowkv-cuda: pip inst"):
            lowkv.Cache.from_model(model, device=device)


def test_a_package_of_other_sources_is_refused(monkeypatch):
    part = types.ModuleType("lowkv_cuda")
    part.interface = "of another day"
    monkeypatch.setitem(sys.modules, "lowkv_cuda", part)
    with pytest.raises(lowkv.Error, match="the packages lowkv and lowkv-cuda are not of the same sources"):
        Store("cuda:7")


@on_cuda
def test_an_unknown_cuda_device_is_refused():
    with pytest.raises(lowkv.Error, match="there is no CUDA device"):
        lowkv.Cache.from_model(build("llama")[0], device="cuda:9")


def test_masks_are_made_where_the_queries_are():
    """torch's device `meta` stands for a GPU: no tensor of it goes together with one of the CPU's."""
    there = dict(device="meta")
    seen = {"keep": torch.ones(2, 90, dtype=torch.bool, **there), "bias": torch.zeros(1, 4, 1, 90, **there)}
    full = torch.zeros(2, 1, 5, 70, **there)
    for arguments in ({}, {"keep": seen["keep"]}, {"bias": seen["bias"]}, seen, {"full": full}):
        for window in (None, 20):
            mask = Visibility(90, 5, window=window, device=there["device"], **arguments).mask(0, 90, 0, 5)
            assert mask.device.type == "meta" and mask.shape[-1] == 90


def test_streams_are_a_gpus():
    if not DEVICE.startswith("cuda"):
        with pytest.raises(lowkv.Error, match="takes no stream of a caller's"):
            Store(DEVICE).use_stream(0)
    else:
        Store(DEVICE).use_stream(0)


@on_device
def test_pages_of_the_hosts_memory_are_refused():
    plan = Plan(parse_scheme("kivi2"), 0, 1, 32, RowType.float16)
    with pytest.raises(lowkv.Error, match="need a store on the CPU, not on '"):
        PagedLayer(Store(DEVICE), plan, Retention(0, 0, 0), 0, 32, torch.zeros(4, 1, 1, 4096, dtype=torch.uint8), 4)


# ---- beside the CPU ----


@on_device
@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_and_bytes_are_the_cpus(model, scheme):
    pairs = both(model, scheme)
    tokens = ids(2, 300)
    for part in (tokens[:, :90], *tokens[:, 90:].split(35, dim=1)):
        for cache in pairs:
            run(model, cache, part)
    got, want = pairs
    assert (got.exact_bytes, got.packed_bytes) == (want.exact_bytes, want.packed_bytes)
    assert got.memory.encoded_blocks == want.memory.encoded_blocks
    # The first layer's keys and values depend on no attention.
    assert (got.layers[0].rows.save() == want.layers[0].rows.save()).all()


@on_device
@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_are_the_cpus(model, scheme, tmp_path):
    """Each step beside one on the CPU with the same rows: keys that err by little may get other codes."""
    cache = lowkv.Cache.from_model(model, scheme)
    tokens = ids(2, 300)
    run(model, cache, tokens[:, :90])
    for part in (tokens[:, 90:200], *tokens[:, 200:].split(20, dim=1), *ids(2, 3, 1).split(1, dim=1)):
        cache.save(tmp_path / "prefix")
        on_cpu = lowkv.Cache.load(tmp_path / "prefix", model, device="cpu")
        close(run(model, cache, part), run(model, on_cpu, part), scheme)


@on_cuda
@pytest.mark.parametrize("scheme", ["exact", "lowkv2.8,window=16,sinks=0", "kivi2,window=16"])
def test_a_prompts_later_chunks_are_the_cpus(model, scheme, tmp_path, monkeypatch):
    """As on a GPU, where torch attends to decoded rows: beside the same on the CPU, and attention to packed rows there,
    which has an error of up to 2e-3, and whose sorted keys decode to 2^-9 of a number (test_layer.py)."""
    cache, tokens = lowkv.Cache.from_model(model, scheme), ids(2, 300)
    run(model, cache, tokens[:, :90])
    for part in tokens[:, 90:].split(70, dim=1):
        cache.save(tmp_path / "prefix")
        on_cpu = [lowkv.Cache.load(tmp_path / "prefix", model, device="cpu") for _ in range(2)]
        packed = run(model, on_cpu[0], part)
        with monkeypatch.context() as patch:
            patch.setattr(lowkv.rows_attention, "on_gpu", lambda rows: True)
            patch.setattr(lowkv.rows_attention, "_MANY", 70)
            patch.setattr(lowkv.layer.Layer, "_attend", None)
            got, decoded = (run(model, each, part) for each in (cache, on_cpu[1]))
        assert torch.equal(got, decoded)
        near_the_cpu(got, packed, 5e-3)


@on_device
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tokens_are_the_cpus(model, scheme):
    results = [model.generate(ids(1, 150, 2), past_key_values=cache, do_sample=False, max_new_tokens=30,
                              min_new_tokens=30) for cache in both(model, scheme)]
    assert torch.equal(*results)


@on_device
@pytest.mark.parametrize("scheme", SCHEMES)
def test_sequences_of_different_lengths(model, scheme):
    tokens, mask = ids(3, 150, 3), torch.ones(3, 150, dtype=torch.long)
    for row, padding in enumerate((0, 31, 120)):
        mask[row, :padding], tokens[row, :padding] = 0, 0
    results = [model.generate(tokens, attention_mask=mask, past_key_values=cache, do_sample=False, max_new_tokens=20,
                              min_new_tokens=20) for cache in both(model, scheme)]
    assert torch.equal(*results)


@on_device
@pytest.mark.parametrize("scheme", SCHEMES)
def test_forks_crops_and_selections(model, scheme):
    """A fork shares blocks; a selection of it is cropped into a packed block, which is copied and decoded."""
    pairs = both(model, scheme)
    for cache in pairs:
        cache.activate_past_recording()
        run(model, cache, ids(2, 200, 4))
        cache.crop(0)  # packs
    held = [cache.packed_bytes for cache in pairs]
    forks = [cache.fork() for cache in pairs]
    assert [fork.packed_bytes for fork in forks] == held
    for fork in forks:
        fork.reorder_cache(torch.tensor([1, 1, 0]))
        fork.crop(-60)
    close(*(run(model, fork, ids(3, 9, 5)) for fork in forks), scheme)
    close(*(run(model, cache, ids(2, 9, 6)) for cache in pairs), scheme)


@on_device
@pytest.mark.parametrize("scheme", SCHEMES)
def test_saved_on_one_device_and_loaded_on_another(model, scheme, tmp_path):
    for maker in both(model, scheme):
        run(model, maker, ids(2, 200, 7))
        maker.save(tmp_path / "prefix")
        loaded = [lowkv.Cache.load(tmp_path / "prefix", model, device=device) for device in (DEVICE, "cpu")]
        for layer in range(2):
            images = [cache.layers[layer].rows.save() for cache in (maker, *loaded)]
            assert all((image == images[0]).all() for image in images)
            rows = [cache.full(layer) for cache in loaded]
            assert all(torch.equal(a, b) for a, b in zip(*rows, strict=True))
        close(*(run(model, cache, ids(2, 9, 8)) for cache in loaded), scheme)


# ---- failures ----

TOO_LITTLE = """
import lowkv, torch
from families import build
model, _ = build("llama")
caches = [lowkv.Cache.from_model(model, "kivi2,window=16") for _ in range(2)]
tokens = torch.arange(3, 103)[None]
for cache in caches:
    with torch.no_grad():
        model(tokens, past_key_values=cache)
rows = torch.zeros(1, 2, 1, 16).expand(-1, -1, 1 << 23, -1)  # 2 GiB
try:
    with caches[0].step():
        caches[0].layers[0].append(rows, rows)
except lowkv.Error as error:
    print(error)
with torch.no_grad():
    logits = [model(tokens[:, :9], past_key_values=cache).logits for cache in caches]
print(caches[0].get_seq_length(), torch.equal(*logits))
"""


@on_device
def test_too_little_memory_leaves_the_cache_as_it_was():
    if "Portable Computing Language" not in Store(DEVICE).device:
        pytest.skip("only PoCL can be told to have 1 GiB")
    done = subprocess.run([sys.executable, "-c", TOO_LITTLE], capture_output=True, text=True, check=False,
                          cwd=os.path.dirname(__file__), env=os.environ | {"POCL_MEMORY_LIMIT": "1"})
    assert done.returncode == 0, done.stderr
    assert "has too little memory: of its 1073741824 bytes" in done.stdout and "109 True" in done.stdout, done.stdout
