"""The pages of a host's own table, as vLLM uses them: what Python adds to tests/blocks_pages.cpp."""

import os

import pytest
import torch
from lowkv._core import (
    Error,
    PagedLayer,
    PagedStep,
    Plan,
    Retention,
    RowType,
    Store,
    page_bytes,
    parse_scheme,
    whole_page_bytes,
)

PAGE, HEADS, KV_HEADS, HEAD_DIM = 128, 4, 2, 32


def layer_of(scheme, pages=8, sliding=0, rows=RowType.float32, own=False):
    """own: pages in memory of the device under test, which the layer takes."""
    plan = Plan(parse_scheme(scheme), 0, KV_HEADS, HEAD_DIM, rows)
    retention = parse_scheme(scheme).retention(0, sliding > 0)
    if own:
        return PagedLayer(Store(os.environ.get("LOWKV_DEVICE", "cpu")), plan, retention, sliding, PAGE, pages, 4)
    cell = -(-page_bytes(plan, PAGE) // (KV_HEADS * PAGE))
    memory = torch.zeros(pages, KV_HEADS, PAGE, cell + 64, dtype=torch.uint8)  # 64: each begins at a multiple of it
    return PagedLayer(Store(), plan, retention, sliding, PAGE, memory, 4)


def numbers(*values):
    return torch.tensor(values, dtype=torch.int32)


def reference(q, keys, values, sliding):
    """Of the newest tokens' queries."""
    cells, first = len(keys), len(keys) - len(q)
    seen = torch.arange(cells) <= torch.arange(first, cells)[:, None]
    if sliding:
        seen &= torch.arange(cells) > torch.arange(first, cells)[:, None] - sliding
    q, keys, values = (x.float().transpose(0, 1)[None] for x in (q, keys, values))
    out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dtype,rows", [(torch.float32, RowType.float32), (torch.bfloat16, RowType.bfloat16)])
@pytest.mark.parametrize("scheme,sliding,budget", [("exact", 0, 2e-3), ("exact", 150, 2e-3), ("int8", 0, 2e-2),
                                                   ("lowkv4,window=0", 0, 0.3)])
def test_two_requests(scheme, sliding, budget, dtype, rows, own):
    """A prompt in chunks and a shorter one, then single tokens; the engine pads, and its rows have strides."""
    torch.manual_seed(0)
    layer = layer_of(scheme, sliding=sliding, rows=rows, own=own)
    table = numbers(5, 2, 7, 0, 3, 1, 6, 4).view(2, 4)
    keys, values = (torch.randn(2, 400, KV_HEADS, HEAD_DIM).to(dtype) for _ in range(2))
    lengths = [0, 0]
    for chunks in ((300, 3), (0, 130), (1, 1), (60, 1), (1, 1)):
        part = [(r, n) for r, n in enumerate(chunks) if n]
        starts, slots, new = [0], [], []
        for r, n in part:
            cells = torch.arange(lengths[r], lengths[r] + n)
            slots.append(table[r].long()[cells // PAGE] * PAGE + cells % PAGE)
            new.append((keys[r, lengths[r] : lengths[r] + n], values[r, lengths[r] : lengths[r] + n]))
            lengths[r] += n
            starts.append(starts[-1] + n)
        padding = torch.full((2,), -1)
        k, v = (torch.cat([*(rows[i] for rows in new), torch.zeros(2, KV_HEADS, HEAD_DIM, dtype=dtype)])
                for i in range(2))
        both = torch.stack([k, v], 1)  # not contiguous, as halves of a projection are
        layer.write(both[:, 0], both[:, 1], torch.cat([*slots, padding]))
        step = PagedStep(numbers(*starts), numbers(*(lengths[r] for r, _ in part)),
                         table[[r for r, _ in part]].contiguous(), PAGE)
        q = torch.randn(starts[-1] + 2, HEADS, HEAD_DIM)
        out = torch.full_like(q, 7.0)
        layer.attend(step, q, out, HEAD_DIM**-0.5, 0.0, 2)
        for (r, n), start in zip(part, starts, strict=False):
            expected = reference(q[start : start + n], keys[r, : lengths[r]], values[r, : lengths[r]], sliding)
            torch.testing.assert_close(out[start : start + n], expected, atol=budget, rtol=0)
        assert (out[-2:] == 7.0).all()
    if not scheme.startswith("exact"):
        assert layer.stats.packed == 3 and layer.stats.sink_bytes == 2 * 2 * 5 * KV_HEADS * HEAD_DIM * dtype.itemsize


def test_whole_pages_go_from_one_layer_to_another():
    """As bytes, with the sinks, which are large."""
    torch.manual_seed(1)
    plan = Plan(parse_scheme("lowkv2.8,window=0"), 0, KV_HEADS, HEAD_DIM, RowType.float32)
    cell = -(-whole_page_bytes(plan, PAGE, 5) // (KV_HEADS * PAGE)) + 64
    memories, outs = [torch.zeros(3, KV_HEADS, PAGE, cell // 64 * 64, dtype=torch.uint8) for _ in range(2)], []
    keys, values = torch.randn(2, 200, KV_HEADS, HEAD_DIM)
    keys[:5] *= 20
    q = torch.randn(200, HEADS, HEAD_DIM)
    for number, memory in enumerate(memories):
        retention = parse_scheme("lowkv2.8,window=0").retention(0, False)
        layer = PagedLayer(Store(), plan, retention, 0, PAGE, memory, 0, True)
        first = 0
        if number:
            memory[1] = memories[0][2]
            first = PAGE
        table = torch.tensor([1, 2] if number else [2, 0])
        cells = torch.arange(first, 200)
        layer.write(keys[first:], values[first:], table[cells // PAGE] * PAGE + cells % PAGE)
        for queries in (200 - first, 1):  # the first page is exact in the step that fills it
            out = torch.empty(queries, HEADS, HEAD_DIM)
            layer.attend(PagedStep(numbers(0, queries), numbers(200), table.int().view(1, 2), PAGE), q[-queries:], out,
                         0.1, 0.0, 1)
        outs.append(out)
        assert layer.stats.sink_bytes == 0
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)
    memories[1][1].fill_(7)
    with pytest.raises(Error, match="page 1 has not been packed with"):
        layer.attend(PagedStep(numbers(0, 1), numbers(200), table.int().view(1, 2), PAGE), q[-1:], out, 0.1, 0.0, 1)


def test_what_does_not_fit_is_refused():
    layer = layer_of("lowkv2.8")
    rows = torch.zeros(3, KV_HEADS, HEAD_DIM)
    slots = torch.arange(3)
    with pytest.raises(Error, match="keys must have 2 heads"):
        layer.write(rows[:, :1], rows, slots)
    with pytest.raises(Error, match=r"keys must be \[3 or more, heads, 32\]"):
        layer.write(rows[:2], rows, slots)
    with pytest.raises(Error, match="values must have the type"):
        layer.write(rows, rows.half(), slots)
    with pytest.raises(Error, match="slot 1024 of 1024"):
        layer.write(rows[:1], rows[:1], torch.tensor([8 * PAGE]))
    with pytest.raises(Error, match="query_start does not fit"):
        PagedStep(numbers(0, 5), numbers(3), numbers(0).view(1, 1), PAGE)
    with pytest.raises(Error, match="more pages than the table"):
        PagedStep(numbers(0, 1), numbers(129), numbers(0).view(1, 1), PAGE)
    layer.write(rows, rows, slots)
    step = PagedStep(numbers(0, 1), numbers(5), numbers(0).view(1, 1), PAGE)
    q = torch.zeros(1, HEADS, HEAD_DIM)
    with pytest.raises(Error, match="of which 3 have been written"):
        layer.attend(step, q, torch.empty_like(q), 1.0, 0.0, 1)
    with pytest.raises(Error, match="a multiple of 128"):
        page_bytes(Plan(parse_scheme("lowkv2.8"), 0, 1, 32, RowType.float16), 64)
    with pytest.raises(Error, match="flush"):
        PagedLayer(Store(), Plan(parse_scheme("kivi2"), 0, 1, 32, RowType.float16), Retention(0, 0, 128), 0, PAGE,
                   torch.zeros(1, 1, PAGE, 64, dtype=torch.uint8), 0)
