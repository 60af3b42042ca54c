"""Keys and values that are NaN, infinite or beyond f16 are stored as 0 and +-65504, counted, and said once; they change
no other sequence."""

import lowkv
import pytest
import torch
from families import build
from lowkv import saturation

BAD = [float("nan"), float("inf"), -float("inf"), 7e4, -1e30]
SCHEMES = ["exact", "kivi2,window=0,sinks=0", "lowkv2.8,window=0,sinks=0", "kivi4,window=8"]


def filled(scheme, rows):
    layer = lowkv.Cache(scheme, [None]).layers[0]
    layer.take_over(rows, rows)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_that_no_f16_holds_change_no_other_sequence(scheme, dtype):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(3, 2, 300, 16, generator=generator)
    want = filled(scheme, rows.to(dtype)).full()
    for _ in range(30):
        place = [1, *(int(torch.randint(n, (1,), generator=generator)) for n in rows.shape[1:])]
        rows[tuple(place)] = BAD[int(torch.randint(len(BAD), (1,), generator=generator))]
    layer = filled(scheme, rows.to(dtype))
    assert layer.length == 300 and (scheme == "exact" or layer.rows.packed[1] > 0)
    for got, its in zip(layer.full(), want, strict=True):
        assert torch.isfinite(got).all()
        assert torch.equal(got[::2], its[::2])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bad", BAD)
def test_it_is_counted_and_said_once(scheme, bad, caplog):
    saturation._say.cache_clear()
    rows = torch.randn(1, 2, 300, 16)
    rows[0, 1, 40, 3] = bad
    layer = lowkv.Cache(scheme, [None]).layers[0]
    before = layer.store.saturated
    layer.take_over(rows, torch.zeros_like(rows))
    assert layer.store.saturated == before + 1
    filled(scheme, rows)
    said = [record for record in caplog.records if "infinite or above 65504 (stored as 65504)" in record.message]
    assert len(said) == 1


@torch.no_grad()
def test_a_model_that_overflows_goes_on():
    """The other row of the batch is answered as if it were alone in being so large."""
    model, _ = build("llama")
    model.model.embed_tokens.weight[7] = float("nan")
    tokens = torch.arange(10, 110)[None].repeat(2, 1)
    wanted = model(tokens, past_key_values=lowkv.Cache.from_model(model, "kivi4,window=0,sinks=0")).logits[1]
    cache = lowkv.Cache.from_model(model, "kivi4,window=0,sinks=0")
    mixed = tokens.clone()
    mixed[0, 50] = 7
    assert torch.equal(model(mixed, past_key_values=cache).logits[1], wanted)
    assert torch.isfinite(model(tokens[:, :9], past_key_values=cache).logits).all()
