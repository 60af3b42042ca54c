"""A layer's attention over exact rows and packed blocks, against attention in double precision over the decoded
rows that full() gives."""

import copy
import os

import lowkv.layer
import lowkv.rows_attention
import pytest
import torch
from families import CPU_MULTIPLIES_MATRICES, MATRIX_BUDGET
from lowkv._core import Store, parse_scheme
from lowkv.layer import Layer
from lowkv.visibility import Visibility

DEVICE = os.environ.get("LOWKV_DEVICE", "cpu")
BATCH, KV_HEADS, HEADS, HEAD_DIM = 2, 2, 4, 64
# Of the kernels: codes multiplied as integers have 2e-3 of the largest output (tests/attention_check.h).
BUDGET = 2e-3
BY_MATRICES = CPU_MULTIPLIES_MATRICES and DEVICE == "cpu"


def rows(count):
    # No outlier channels: full() rounds to f16, and with large scores that rounding would be what is measured.
    return torch.randn(BATCH, KV_HEADS, count, HEAD_DIM)


def filled(scheme, tokens, window=None, dtype=torch.float32):
    """A layer with `tokens` tokens of which all that may be packed is."""
    layer = Layer(0, parse_scheme(scheme), window, Store(DEVICE))
    for count in (tokens // 2, tokens - tokens // 2):
        layer.append(rows(count).to(dtype), rows(count).to(dtype))
        layer.pack()
    return layer


def oracle(query, layer, visibility, scale, softcap, sinks):
    keys, values = (x.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for x in layer.full())
    scores = query.double() @ keys.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    first = visibility.total - keys.shape[2]
    mask = visibility.mask(first, visibility.total, 0, visibility.queries)
    scores = scores if mask is None else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, -1, 1, 1).expand(BATCH, -1, query.shape[2], 1)], dim=3)
    weights = scores.softmax(dim=3).nan_to_num(0.0)
    return weights[..., : keys.shape[2]] @ values


def additive(total, queries):
    full = torch.randn(BATCH, HEADS, queries, total)
    return full.masked_fill(torch.rand(full.shape) < 0.3, float("-inf"))


VIEWS = {
    "causal": lambda total, queries: {},
    "padding": lambda total, queries: {"keep": torch.arange(total) >= torch.tensor([[0], [77]])},
    "bool": lambda total, queries: {"full": torch.rand(BATCH, 1, queries, total) < 0.7},
    "additive by head": lambda total, queries: {"full": additive(total, queries)},
    "bias": lambda total, queries: {"bias": torch.randn(1, HEADS, 1, total)},
    "bias and padding": lambda total, queries: {"bias": torch.randn(1, HEADS, 1, total),
                                                "keep": torch.arange(total) >= torch.tensor([[9], [0]])},
    "short mask": lambda total, queries: {"keep": torch.ones(BATCH, 100, dtype=torch.bool)},
}


@pytest.mark.parametrize("queries", [1, 5, 40])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scheme", ["kivi2,window=16,sinks=0", "lowkv2.8,window=16", "kivi4,window=32,flush=64,sinks=5",
                                    "k=exact,v=token-4-g32,window=0",
                                    "k=sorted-4211-head-2rows,v=token-2-head-normal-hadamard-unbiased,window=16"])
def test_attention(scheme, view, queries):
    torch.manual_seed(len(view) + queries)
    layer = filled(scheme, 300)
    first, end = layer.rows.packed
    assert first < end
    # What the oracle reads of decoded sorted keys carries their block's metadata: 2^-9 of a number.
    carries = scheme.startswith(("lowkv", "k=sorted"))
    check(layer, queries, view, softcap=None, sinks=None, budget=BUDGET + 2**-9 if carries else BUDGET)


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("view", ["causal", "padding"])
def test_soft_cap_and_sink_logits(view, queries):
    torch.manual_seed(3)
    check(filled("kivi2,window=16", 300), queries, view, softcap=5.0, sinks=torch.randn(HEADS))


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("window", [20, 130])
@pytest.mark.parametrize("scheme", ["exact", "kivi2,window=16"])
def test_sliding_window(scheme, window, queries):
    torch.manual_seed(4)
    layer = filled(scheme, 600, window)
    assert layer.full()[0].shape[2] < window + 64 + 64 + 64  # what the window has passed is gone
    check(layer, queries, "causal", softcap=None, sinks=None)


@pytest.fixture
def decoding(monkeypatch):
    """Steps of 40 queries as on a GPU: torch attends to decoded rows, and the device to none."""
    monkeypatch.setattr(lowkv.rows_attention, "on_gpu", lambda rows: True)
    monkeypatch.setattr(lowkv.rows_attention, "_MANY", 40)
    monkeypatch.setattr(Layer, "_attend", None)
    return monkeypatch


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scheme", ["exact", "kivi2,window=16,sinks=0", "lowkv2.8,window=16"])
def test_many_queries_meet_decoded_rows(decoding, scheme, view):
    torch.manual_seed(len(view))
    check(filled(scheme, 300), 40, view, softcap=None, sinks=None, budget=1e-5)


@pytest.mark.parametrize("window", [20, 130])
def test_many_queries_meet_a_windows_decoded_rows(decoding, window):
    torch.manual_seed(6)
    check(filled("kivi2,window=16", 600, window), 40, "causal", softcap=None, sinks=None, budget=1e-5)


def test_the_mask_that_flash_attention_needs_none_of(decoding):
    decoding.setattr(lowkv.rows_attention, "_has_flash", lambda *rows: True)
    check(filled("kivi2,window=16", 300), 40, "causal", softcap=None, sinks=None, budget=1e-5)


@pytest.mark.parametrize("view", ["causal", "padding", "additive by head", "bias and padding"])
def test_decoded_rows_stay_small(decoding, view):
    """Sequences of a batch are decoded one after the other where both are too large."""
    one = 2 * KV_HEADS * 340 * HEAD_DIM * 4
    decoding.setattr(lowkv.rows_attention, "_SCRATCH", 2 * one - 1)
    decoded, read = [], Layer._decoded

    def counted(layer, first, start, stop):
        decoded.append((start, stop))
        return read(layer, first, start, stop)

    layer = filled("kivi2,window=16", 300)
    decoding.setattr(layer, "full", lambda: read(layer, 0, 0, BATCH))  # the oracle's
    decoding.setattr(Layer, "_decoded", counted)
    check(layer, 40, view, softcap=None, sinks=None, budget=1e-5)
    assert decoded == [(0, 1), (1, 2)]


@pytest.mark.parametrize("softcap, sinks", [(5.0, None), (None, torch.ones(HEADS))])
def test_soft_caps_and_sink_logits_are_the_devices(decoding, softcap, sinks):
    with pytest.raises(TypeError):  # _attend() is None here
        check(filled("kivi2,window=16", 300), 40, "causal", softcap, sinks)


@pytest.mark.parametrize("first, count", [(0, 3), (1, 2), (2, 1)])
def test_sequences_that_a_batch_has_not_are_refused(first, count):
    layer = filled("kivi2,window=16", 300)
    out = torch.empty(count, KV_HEADS, 300, HEAD_DIM)
    with pytest.raises(lowkv.Error, match=rf"read\(\) of {count} sequences from {first} on, of 2"):
        layer.rows.read(0, out, out.clone(), 1, first)


def check(layer, queries, view, softcap, sinks, budget=BUDGET):
    query = torch.randn(BATCH, HEADS, queries, HEAD_DIM)
    layer.append(rows(queries), rows(queries))
    visibility = Visibility(layer.length, queries, window=layer.sliding_window, **VIEWS[view](layer.length, queries))
    want = oracle(query, layer, visibility, 0.125, softcap, sinks)
    got = layer.attend(query, visibility, 0.125, softcap, sinks)
    error = (got - want).abs().amax(dim=3) / want.abs().amax(dim=3).clamp_min(1e-3)
    if BY_MATRICES and queries > 5 and budget >= BUDGET:
        budget = MATRIX_BUDGET
    assert error.max() < budget


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, queries):
    torch.manual_seed(5)
    layer = filled("kivi4,window=32", 300, dtype=dtype)
    query = torch.randn(BATCH, HEADS, queries, HEAD_DIM).to(dtype)
    layer.append(rows(queries).to(dtype), rows(queries).to(dtype))
    visibility = Visibility(layer.length, queries)
    want = oracle(query, layer, visibility, 0.125, None, None)
    got = layer.attend(query, visibility, 0.125, None, None)
    assert got.dtype is dtype and got.shape == query.shape
    assert (got - want).abs().max() < BUDGET * want.abs().max() + torch.finfo(dtype).eps


def test_what_lies_where():
    """The sinks' blocks and the window are exact, whole blocks between are packed; sawtooth schemes pack `flush` at a
    time."""
    layer = filled("kivi4,window=32,sinks=5", 300)
    assert (layer.rows.packed, layer.length, layer.exact_tokens) == ((32, 32 + 224), 300, 76)
    layer = filled("kivi4,window=32,sinks=0,flush=128", 300)
    assert layer.rows.packed == (0, 256)
    layer = filled("exact", 300)
    assert layer.exact_tokens == layer.full()[0].shape[2] == 300
    assert layer.full()[0].dtype is torch.float32


@pytest.mark.parametrize("tokens", [2, 130, 255, 256, 383, 384, 385, 1000])
@pytest.mark.parametrize("scheme,block,first", [
    ("lowkv2.8", 128, 128), ("lowkv2.8,sinks=1", 128, 128), ("lowkv2.8,sinks=128", 128, 128),
    ("lowkv2.8,sinks=200", 128, 256), ("lowkv2.8,sinks=0", 128, 0),
    ("kivi2", 32, 32), ("kivi2,sinks=33", 32, 64), ("kivi2,sinks=0", 32, 0)])
def test_sinks_are_whole_blocks(scheme, block, first, tokens):
    """As in the llama.cpp plug-in: a block with a sink stays exact, each other one until all of it has left the window
    (of 128)."""
    layer = filled(scheme, tokens)
    packed = max(0, tokens - first - 128) // block * block
    assert layer.rows.packed == (first, first + packed) and layer.exact_tokens == tokens - packed


def test_sinks_are_of_a_layers_own_blocks():
    scheme = parse_scheme("lowkv2.8,layer.1=kivi2,layer.2=exact,layer.3=exact/token-4-g32")
    def first_packed(index, window=None):
        layer = Layer(index, scheme, window, Store(DEVICE))
        layer.append(rows(300), rows(300))
        return layer.rows.packed[0]

    assert [first_packed(index) for index in range(4)] == [128, 32, 0, 32]
    assert first_packed(0, window=20) == 0  # it slides past them
    assert scheme.retention(0, False).sinks == 5  # vLLM's pages have them in a block of their own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["exact", "kivi4,window=100,sinks=5"])
def test_exact_rows_are_kept_as_they_are(scheme, dtype):
    """In the model's own dtype, bit for bit, through appends, crops, forks and selections."""
    torch.manual_seed(6)
    layer = Layer(0, parse_scheme(scheme), None, Store(DEVICE))
    given = [rows(140).to(dtype) for _ in range(2)]
    for part in (slice(0, 1), slice(1, 90), slice(90, 140)):
        layer.append(*(x[:, :, part] for x in given))
        layer.pack()
    chosen = copy.deepcopy(layer)
    chosen.batch_select_indices(torch.tensor([1, 0, 1]))
    layer.crop(-7)
    for held, rows_of, tokens in ((layer, [0, 1], 133), (chosen, [1, 0, 1], 140)):
        assert held.length == tokens
        first, end = held.rows.packed
        for got, want in zip(held.full(), given, strict=True):
            exact = [token for token in range(tokens) if not first <= token < end]
            assert torch.equal(got[:, :, exact], want[rows_of][:, :, exact])


def test_long_masks_are_made_in_pieces(monkeypatch):
    torch.manual_seed(7)
    monkeypatch.setattr(lowkv.layer, "MASK", 3000)
    for view in ("padding", "additive by head", "bias and padding"):
        check(filled("kivi2,window=16", 300), 40, view, softcap=None, sinks=None)


@pytest.mark.parametrize("view", ["causal", "padding", "additive by head"])
def test_a_first_prompt(view, monkeypatch):
    """torch attends to it, or, with a soft-cap, the core."""
    torch.manual_seed(8)
    for mask in (1 << 22, 1000):
        monkeypatch.setattr(lowkv.rows_attention, "MASK", mask)
        for softcap, window in ((None, None), (None, 20), (5.0, None)):
            layer = Layer(0, parse_scheme("kivi4"), window, Store(DEVICE))
            check(layer, 90, "causal" if window else view, softcap=softcap, sinks=None)
