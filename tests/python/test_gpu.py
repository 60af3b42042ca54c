"""A model on a GPU, and its cache there: what needs a GPU that torch uses, and lowkv-cuda (make package-cuda)."""

import contextlib

import lowkv
import pytest
import torch
from families import build
from lowkv.visibility import Visibility

if not torch.cuda.is_available():
    pytest.skip("torch has no GPU here", allow_module_level=True)

SCHEMES = ["exact", "lowkv2.8,window=16,sinks=3", "kivi2,window=16"]


def ids(batch, tokens, seed=0):
    return torch.randint(3, 128, (batch, tokens), generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3", "gpt_oss"])
def model(request):
    return build(request.param)[0].cuda()


def test_its_cache_is_on_its_gpu(model):
    cache = lowkv.Cache.from_model(model)
    assert cache.device == str(model.device)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("index", [0, 1])  # of gemma3 and gpt_oss the first one slides
def test_layers_attend_as_on_the_cpu(model, index, padded, scheme, dtype):
    """The same rows, queries and padding on both."""
    torch.manual_seed(1)
    on_gpu, on_cpu = (lowkv.Cache.from_model(model, scheme, device).layers[index] for device in (None, "cpu"))
    for queries in (90, 1, 1, 40, 300):  # torch attends to the first and the last
        rows = [torch.randn(2, heads, queries, 32).to(dtype) for heads in (2, 2, 4)]
        outs = []
        for layer, device in ((on_gpu, "cuda"), (on_cpu, "cpu")):
            key, value, query = (x.to(device) for x in rows)
            layer.append(key, value)
            keep = torch.ones(2, layer.length, dtype=torch.bool, device=device) if padded else None
            if padded:
                keep[0, :5] = False
            window = layer.sliding_window
            visibility = Visibility(layer.length, queries, window=window, keep=keep, device=device)
            out = layer.attend(query, visibility, 0.125, None, None).cpu().float()
            outs.append(out[:, :, 5:] if padded and queries == 90 else out)  # padding sees nothing
        assert (outs[0] - outs[1]).abs().max() < (2e-2 if dtype is torch.bfloat16 else 2e-3)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(on_gpu.full(), on_cpu.full(), strict=True))


@pytest.mark.parametrize("own_stream", [False, True])
def test_exact_tokens_are_those_of_the_stock_cache(model, own_stream):
    arguments = dict(do_sample=False, max_new_tokens=40, min_new_tokens=40)
    want = model.generate(ids(2, 150), **arguments)
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
        got = model.generate(ids(2, 150), past_key_values=lowkv.Cache.from_model(model, "exact"), **arguments)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(got, want)


@pytest.mark.parametrize("scheme", SCHEMES[1:])
def test_a_forked_cropped_saved_cache_goes_on(model, scheme, tmp_path):
    cache = lowkv.Cache.from_model(model, scheme)
    with torch.no_grad():
        model(ids(2, 400), past_key_values=cache)
        assert cache.packed_bytes > 0
        fork = cache.fork()
        cache.save(tmp_path / "prefix")
        loaded = lowkv.Cache.load(tmp_path / "prefix", model)
        assert loaded.device == cache.device
        for each in (fork, loaded):
            each.crop(-60)
        got, want = (model(ids(2, 3, 2), past_key_values=each).logits for each in (loaded, fork))
    torch.testing.assert_close(got, want)


def hoard():
    """All of the GPU's memory, in torch's hands."""
    free = torch.cuda.mem_get_info()[0]
    all_of_it = [torch.empty(free - (64 << 20), dtype=torch.uint8, device="cuda")]
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        while True:
            all_of_it.append(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
    return all_of_it


def test_memory_that_torch_has_no_use_for_is_had(model):
    cache = lowkv.Cache.from_model(model, "kivi2")
    with torch.no_grad():
        model(ids(1, 9), past_key_values=cache)
    layer = cache.layers[-1]
    _, heads, head_dim = layer.rows.shape
    tokens = (256 << 20) // (heads * head_dim)  # a GiB of keys
    rows = torch.zeros(1, heads, 1, head_dim, device="cuda").expand(-1, -1, tokens, -1)
    hoard()
    assert torch.cuda.mem_get_info()[0] < 4 << 20
    layer.append(rows, rows)
    assert layer.length == 9 + tokens


def test_a_cache_elsewhere_is_refused(model):
    with pytest.raises(lowkv.Error, match="the model is on cuda:0, and this cache on 'cpu'"):
        model.generate(ids(1, 9), past_key_values=lowkv.Cache.from_model(model, device="cpu"), max_new_tokens=2)
