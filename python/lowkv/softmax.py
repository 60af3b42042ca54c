"""Attention over rows in torch, and the joining of partial results by their log sums."""

from __future__ import annotations

import torch

SCORES = 1 << 22  # scores computed at a time: 16 MiB of f32


def attend(query, keys, values, mask, scale: float, softcap: float | None):
    """Attention of `query` over exact rows, in f32.

    query: `[batch, heads, queries, head_dim]`; keys, values: `[batch, kv_heads, cells, head_dim]`; mask: a
    function of two query numbers, giving what is added to the scores of those between (or None).
    Returns the output, `[batch, heads, queries, head_dim]`, and the logarithm of each softmax's denominator,
    `[batch, heads, queries]`: -inf, and an output of zeros, for a query that sees nothing.
    """
    batch, heads, queries, head_dim = query.shape
    kv_heads, cells = keys.shape[1], keys.shape[2]
    query, keys, values = query.float(), keys.float(), values.float()
    step = max(1, SCORES // max(1, batch * heads * cells))
    outs, sums = [], []
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        # The query heads that share a kv head are rows of one product.
        grouped = query[:, :, start:stop].reshape(batch, kv_heads, -1, head_dim)
        scores = torch.matmul(grouped, keys.transpose(2, 3)).mul_(scale).view(batch, heads, stop - start, cells)
        if softcap:
            scores = torch.tanh(scores.div_(softcap)).mul_(softcap)
        added = mask(start, stop)
        if added is not None:
            scores = scores.add_(added)
        log_sum = torch.logsumexp(scores, dim=3, keepdim=True)
        weights = scores.sub_(log_sum.clamp_min(torch.finfo(torch.float32).min)).exp_()
        out = torch.matmul(weights.view(batch, kv_heads, -1, cells), values)
        outs.append(out.view(batch, heads, stop - start, head_dim))
        sums.append(log_sum.squeeze(3))
    if len(outs) == 1:
        return outs[0], sums[0]
    return torch.cat(outs, dim=2), torch.cat(sums, dim=2)


def join(first, second):
    """The attention over two sets of rows from that over each, as attend() returns them."""
    (out_a, sum_a), (out_b, sum_b) = first, second
    total = torch.logaddexp(sum_a, sum_b)
    finite = total.clamp_min(torch.finfo(torch.float32).min)  # -inf - -inf would be NaN
    out = out_a.mul_((sum_a - finite).exp_().unsqueeze(3))
    return out.add_(out_b.mul_((sum_b - finite).exp_().unsqueeze(3))), total


def add_sink_logits(part, logits):
    """Lets one logit per query head take part in the softmax without a value."""
    out, log_sum = part
    total = torch.logaddexp(log_sum, logits.float().view(1, -1, 1))
    return out * (log_sum - total).exp().unsqueeze(3), total
