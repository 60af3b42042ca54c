"""Left padding in a batch: it counts for nothing, in whichever form a mask says it."""

import lowkv
import pytest
import torch
from families import build

SCHEME = "lowkv2.8,window=16"
TOKENS, SHORT = 400, 20


def masks(keep, form, dtype=torch.float32):
    """The mask of the first `TOKENS` tokens: 2-D, or 4-D of bool, of -inf or of the least number."""
    if form == "2-D":
        return keep.long()
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None] & keep[:, None, None]
    if form == "bool":
        return seen
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, {"-inf": -float("inf"),
                                                                     "min": torch.finfo(dtype).min}[form])


@torch.no_grad()
@pytest.mark.parametrize("form", ["2-D", "bool", "-inf", "min"])
@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_short_row_takes_no_queries_from_a_long_one(form, order):
    """Layer 0 has the same keys and queries in a batch as alone: so what is packed is the same to the last bit."""
    model, _ = build("llama")
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, 128, (2, TOKENS), generator=generator)
    keep = torch.ones(2, TOKENS, dtype=torch.bool)
    keep[1, :-SHORT] = False
    tokens[1, :-SHORT] = 0
    places = (keep.long().cumsum(1) - 1).clamp_min(0)
    alone, batch = (lowkv.Cache.from_model(model, SCHEME) for _ in range(2))
    model(tokens[:1], past_key_values=alone)
    model(tokens[order], past_key_values=batch, attention_mask=masks(keep[order], form), position_ids=places[order])
    assert alone.layers[0].rows.packed == batch.layers[0].rows.packed and alone.packed_bytes > 0
    for want, got in zip(alone.layers[0].full(), batch.layers[0].full(), strict=True):
        assert torch.equal(got[order.index(0)], want[0])
    assert not alone.layers[0].rows.wants_queries and batch.layers[0].rows.wants_queries


def batch_of(lengths, side, generator):
    """Tokens, what is seen of them, and their positions: sequences of these lengths, padded on one side, in turns of
    different lengths if that is "turns"."""
    if side == "turns":
        halves = [batch_of([n * part // 3 for n in lengths], "right", generator) for part in (1, 2)]
        tokens, keep, _ = (torch.cat(both, dim=1) for both in zip(*halves, strict=True))
    else:
        longest = max(lengths)
        tokens, keep = torch.zeros(len(lengths), longest, dtype=torch.long), torch.zeros(len(lengths), longest).bool()
        for row, length in enumerate(lengths):
            seen = slice(longest - length, longest) if side == "left" else slice(0, length)
            tokens[row, seen] = torch.randint(3, 128, (length,), generator=generator)
            keep[row, seen] = True
    return tokens, keep, (keep.long().cumsum(1) - 1).clamp_min(0)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right", "turns"])
@pytest.mark.parametrize("scheme", ["lowkv2.8,window=16", "kivi2,window=40,sinks=5", "lowkv2.8,window=0,sinks=0",
                                    "a budget"])
def test_each_sequence_has_the_sinks_and_the_window_that_it_has_alone(scheme, side):
    """Of layer 0, whose keys depend on nothing but the tokens and their positions."""
    model, _ = build("llama")
    generator = torch.Generator().manual_seed(sum(map(ord, scheme + side)))
    for _ in range(5):
        tokens, keep, places = batch_of(torch.randint(1, 700, (3,), generator=generator).tolist(), side, generator)

        def filled(*arguments, tokens=tokens, keep=keep, places=places):
            cache = lowkv.Cache.from_model(model, *arguments)
            for start in range(0, tokens.shape[1], 300):
                part = slice(start, start + 300)
                model(tokens[:, part], attention_mask=keep[:, : part.stop].long(), position_ids=places[:, part],
                      past_key_values=cache)
            return cache

        if scheme == "a budget":
            needed = filled("lowkv2.8")
            held = filled("lowkv2.8", None, needed.exact_bytes + needed.packed_bytes + 1000)
        else:
            held = filled(scheme)
        got, exact = (cache.layers[0].full()[0] for cache in (held, filled("exact")))
        layer, block = held.layers[0], 32 if scheme.startswith("kivi") else 128
        sinks, window = -(-layer.retention.sinks // block) * block, layer.retention.window
        for row in range(3):
            seen = keep[row].nonzero().flatten()
            same = (got[row] == exact[row]).all(dim=2).all(dim=0)
            assert same[seen[:sinks]].all() and same[seen[max(0, len(seen) - window) :]].all()
            assert not same[seen[sinks + block : max(0, len(seen) - window - 2 * block)]].any()
        assert layer.exact_tokens <= tokens.shape[1]


@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 1, 100, 230])
def test_a_cropped_or_selected_batch_keeps_its_sinks(padding):
    model, _ = build("llama")
    tokens, keep, places = batch_of([500 - padding, 500], "left", torch.Generator().manual_seed(7))
    cache, exact = (lowkv.Cache.from_model(model, scheme) for scheme in ("lowkv2.8,window=16", "exact"))
    for its in (cache, exact):
        model(tokens, attention_mask=keep.long(), position_ids=places, past_key_values=its)
        its.crop(-40)
        its.batch_select_indices(torch.tensor([1, 0, 0]))
        fork = its.fork()
        fork.crop(-300)
    sinks = slice(padding, padding + 128)
    for got, want in zip(cache.layers[0].full(), exact.layers[0].full(), strict=True):
        assert torch.equal(got[1:, :, sinks], want[1:, :, sinks]) and torch.equal(got[0, :, :128], want[0, :, :128])
        assert not torch.equal(got, want)


@torch.no_grad()
def test_a_padded_batch_is_not_saved(tmp_path):
    model, _ = build("llama")
    tokens, keep, places = batch_of([300, 30], "left", torch.Generator().manual_seed(7))
    cache = lowkv.Cache.from_model(model)
    model(tokens, attention_mask=keep.long(), position_ids=places, past_key_values=cache)
    with pytest.raises(lowkv.Error, match="its padding can't be saved; compute the prompts without padding"):
        cache.save(tmp_path / "prefix")


@torch.no_grad()
def test_sequences_are_observed_one_by_one():
    layer = lowkv.Cache(SCHEME, [None]).layers[0]
    rows = torch.randn(2, 2, 4, 16)
    layer.append(rows, rows)
    with pytest.raises(lowkv.Error, match="sequence 2 of 2"):
        layer.rows.update_query_stats(torch.randn(1, 4, 4, 16), 2)
    with pytest.raises(lowkv.Error, match=r"q of one sequence must be \[1, heads, queries, 16\]"):
        layer.rows.update_query_stats(torch.randn(2, 4, 4, 16), 1)
    for number in (1, 0):
        assert layer.rows.wants_queries
        layer.rows.update_query_stats(torch.randn(1, 4, 512, 16), number)
    assert not layer.rows.wants_queries


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_queries_that_a_gpu_sums_up_weigh_channels_as_each_of_them_does(padded, monkeypatch):
    def layer(on_gpu):
        monkeypatch.setattr(lowkv.rows_attention, "on_gpu", lambda rows: on_gpu)
        generator = torch.Generator().manual_seed(5)
        spread = torch.logspace(-1, 1, 16)
        keys, values = (torch.randn(2, 2, TOKENS, 16, generator=generator) for _ in range(2))
        real = torch.arange(TOKENS).expand(2, -1) >= torch.tensor([[0], [250]]) if padded else None
        its = lowkv.Cache(SCHEME, [None]).layers[0]
        its.append(keys / spread, values)
        its._observe(torch.randn(2, 4, TOKENS, 16, generator=generator) * spread, real)
        its.pack()
        return its

    summed, each = layer(True), layer(False)
    assert summed.rows.packed == each.rows.packed and each.rows.packed[1] > 0
    assert summed.rows.wants_queries == each.rows.wants_queries
    for got, want in zip(summed.full(), each.full(), strict=True):
        torch.testing.assert_close(got, want)
    with pytest.raises(lowkv.Error, match="weight 0"):
        each.rows.update_query_stats(torch.randn(2, 4, 1, 16), None, 0)
