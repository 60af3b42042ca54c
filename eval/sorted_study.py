#!/usr/bin/env python3
"""Sorted keys in float32 PyTorch: what do queries' statistics do for prose and for copying?

    eval/sorted_study.py "" alpha=1 alpha=1+scale=1               after `make package`; goes on where it was stopped
    eval/sorted_study.py -m gemma.gguf --texts prose alpha=.5+floor=1

One forward pass per text. A query reads a key, and its value, as packed if their block of 128 tokens had left the
window (so the newest 128 to 255 and the first block are exact), as lowkv does. Texts: `codes` is eval/retrieval.py's,
all of its questions at once, each seeing the lines and itself; `prose` 2,048 tokens of the handbook (every other
position from 256 on). No code is shared with src/families/sorted. A setting is what differs from `lowkv2` less its
trellis:

  alpha=0       channels are sorted by energy * w^alpha, w the mean square of the first 384 queries
  floor=.02     so much of its mean is added to w
  scale=0       1: channels are also multiplied by w^(alpha/2) before they are quantized, so that groups are even
  ranges=0      1: a token's levels reach as far as fits it best, .8 to 3.2 times its rms
  rows=2        keys repaired in each block
  repair=short  the shortest; error: those of the largest error by w
  bits=4211     of the channels' quarters
  values=2      bits of values, 0: exact
  keys=1        0: exact keys
  trellis=0     1: errors below four bits are shrunk to a trellis' mean square (an estimate)"""

import math
import sys
from itertools import chain
from pathlib import Path

import paths
from retrieval import Reader, haystacks
from sheet import Sheet, again_with_torch, measuring_parser

BLOCK, GROUP, FIRST = 128, 16, 384
DEFAULTS = {"alpha": 0.0, "floor": 0.02, "scale": 0, "ranges": 0, "rows": 2, "repair": "short", "bits": "4211",
            "values": 2, "keys": 1, "trellis": 0}
RANGES = 1, .8, 1.25, 1.6, 2, 2.5, 3.2
MSE = {1: (.3634, .298), 2: (.1175, .0842), 3: (.03454, .0225), 4: (.009497, .009497),  # Lloyd-Max's, a trellis'
       5: (.002505, .002505)}
KEY, COLUMNS = ["model", "text", "number", "setting"], ["right", "tokens", "kld", "error", "worst", "top1", "nll"]


def settings_of(text):
    chosen = dict(DEFAULTS)
    for word in filter(None, text.strip("-").split("+")):
        name, value = word.split("=")
        chosen[name] = type(DEFAULTS[name])(value)
    return chosen


class Codec:
    """Keys [heads, tokens, channels] and values as they are read back, from the second block on."""

    def __init__(self, torch, setting):
        from float32_codecs import hadamard, lloyd_max

        self.torch, self.s, self.turn = torch, setting, hadamard
        self.levels = {bits: lloyd_max(bits) for bits in MSE}

    def nearest(self, x, bits):
        """Levels of N(0, 1), and their mean square error."""
        levels, (normal, trellis) = self.levels[bits], MSE[bits]
        found = levels[self.torch.bucketize(x.contiguous(), (levels[1:] + levels[:-1]) / 2)]
        if not self.s["trellis"] or trellis == normal:
            return found, normal
        # Both are x (1 - mse) and noise of mse (1 - mse).
        shrunk = math.sqrt(trellis * (1 - trellis) / (normal * (1 - normal)))
        return x * (1 - trellis) + (found - x * (1 - normal)) * shrunk, trellis

    def groups(self, x):
        """N(0, 1) by group of channels, [..., groups, 16], to drawn-out levels."""
        parts = []
        for g in range(x.shape[-2]):
            bits, part = int(self.s["bits"][4 * g // x.shape[-2]]), x[..., g, :]
            level, mse = self.nearest(part, bits)
            parts.append(level / math.sqrt(1 - mse))
        return self.torch.stack(parts, -2)

    def keys(self, key, query):
        if not self.s["keys"]:
            return key
        blocks = key.unflatten(1, (-1, BLOCK))[:, 1:]
        w = query[:, :, :FIRST].square().mean((1, 2))
        w = w + self.s["floor"] * w.mean(-1, keepdim=True)
        merit = -blocks.square().sum(-1)
        if self.s["repair"] == "error":
            lacks = self.rounded(blocks, self.torch.ones(blocks.shape[:-1]), w) - blocks
            merit = (lacks.square() * w[:, None, None]).sum(-1)
        kept = self.torch.ones(merit.shape)
        if self.s["rows"]:
            kept.scatter_(-1, merit.topk(self.s["rows"], -1).indices, 0.)
        read = self.torch.where(kept[..., None] > 0, self.rounded(blocks, kept, w), blocks)
        return self.torch.cat([key[:, :BLOCK], read.flatten(1, 2)], 1)

    def rounded(self, blocks, kept, w):
        turn, kept = self.turn(GROUP), kept[..., None]
        mean = (blocks * kept).sum(2, keepdim=True) / kept.sum(2, keepdim=True)
        centred = blocks - mean
        first = slice(1)  # block: its statistics are all the others'
        tempered = w[:, None, None] ** self.s["alpha"]
        order = ((centred * kept)[:, first].square().mean(2, keepdim=True) * tempered).argsort(-1, descending=True)
        at = order.expand_as(blocks)
        factor = tempered.sqrt().expand_as(blocks).gather(-1, at) if self.s["scale"] else 1.
        y = (centred.gather(-1, at) * factor).unflatten(-1, (-1, GROUP)) @ turn
        unit = (y * kept[..., None])[:, first].square().mean((2, 4), keepdim=True).sqrt()
        unit = (unit / unit.amax(3, keepdim=True)).clamp(min=2**-8)
        rms = (y / unit).square().mean((-1, -2), keepdim=True)
        size, level = self.fitted(y, unit, rms.sqrt())
        most = (size * kept[..., 0]).amax(-1, keepdim=True)
        size = (size / most * 255).round().clamp(1, 255) * most / 255
        read = (level * size[..., None, None] @ turn.mT).flatten(-2) / factor
        read = self.torch.empty_like(read).scatter_(-1, at, read)
        return read - (read * kept).sum(2, keepdim=True) / kept.sum(2, keepdim=True) + mean

    def fitted(self, y, unit, rms):
        """Each token's scale and levels: in the range whose levels have the largest cosine with it."""
        best = None
        for reach in RANGES if self.s["ranges"] else RANGES[:1]:
            level = self.groups(y / unit / (rms * reach)) * unit
            squares = level.square().sum((-1, -2))
            fit = (y * level).sum((-1, -2)) / squares.sqrt()
            size = (y.square().sum((-1, -2)) / squares).sqrt()
            found = fit, size, level
            if best is None:
                best = found
                continue
            better = fit > best[0]
            best = tuple(self.torch.where(better.view(better.shape + (1,) * (new.dim() - fit.dim())), new, old)
                         for new, old in zip(found, best, strict=True))
        return best[1:]

    def values(self, value):
        if not self.s["values"]:
            return value
        turn = self.turn(value.shape[-1])
        y = value[:, BLOCK:] @ turn
        level, _ = self.nearest(y / y.square().mean(-1, keepdim=True).sqrt(), self.s["values"])
        unbiased = y.square().sum(-1, keepdim=True) / (y * level).sum(-1, keepdim=True)
        return self.torch.cat([value[:, :BLOCK], level * unbiased @ turn.mT], 1)


class Attention:
    """transformers' attention over a text of `shared` tokens, then branches of `length` that see it and themselves."""

    codec, shared, length = None, 0, 0

    def __init__(self, torch):
        self.torch = torch

    def __call__(self, module, query, key, value, _mask, scaling=None, **_):
        q, k, v = query[0].unflatten(0, (key.shape[1], -1)), key[0], value[0]
        n, window = self.shared, getattr(module, "sliding_window", None) or 1 << 30
        packed_k, packed_v = k[:, :n], v[:, :n]
        if self.codec:
            end = BLOCK * (n // BLOCK - 1)
            packed_k = self.codec.keys(k[:, :end], q)
            packed_v = self.codec.values(v[:, :end])
        out = [self.part(q, (packed_k, packed_v), (k, v), first, min(first + BLOCK, n), scaling, window)
               for first in range(0, n, BLOCK)]
        if self.length:
            out.append(self.branches(q[:, :, n:], (packed_k, packed_v), (k, v), scaling, window))
        return self.torch.cat(out, 2).flatten(0, 1)[None].transpose(1, 2), None

    def past(self, packed, exact, to, end, window, oldest):
        """What there is at `to` of [0, end): packed up to the newest 128 to 255 before `to`. And its first token."""
        cut, begin = max(BLOCK * (to // BLOCK - 1), 0), max(0, oldest - window + 1)
        return *(self.torch.cat([p[:, min(begin, cut) : cut], e[:, max(cut, begin) : end]], 1)
                 for p, e in zip(packed, exact, strict=True)), begin

    def part(self, q, packed, exact, first, last, scaling, window):
        torch = self.torch
        k, v, begin = self.past(packed, exact, first, last, window, first)
        scores = q[:, :, first:last] @ k.mT[:, None] * scaling
        distance = torch.arange(first, last)[:, None] - torch.arange(begin, last)
        scores.masked_fill_((distance < 0) | (distance >= window), -math.inf)
        return scores.softmax(-1) @ v[:, None]

    def branches(self, q, packed, exact, scaling, window):
        torch, n, length = self.torch, self.shared, self.length
        k, v, begin = self.past(packed, exact, n, n, window, n)
        own_k, own_v = (x[:, None, n:].unflatten(2, (-1, length)) for x in exact)
        place = torch.arange(length)[:, None]
        before = q @ k.mT[:, None] * scaling
        far = n + place - torch.arange(begin, n) >= window
        before = before.unflatten(2, (-1, length)).masked_fill(far, -math.inf)
        own = q.unflatten(2, (-1, length)) @ own_k.mT * scaling
        own = own.masked_fill(place < place.T, -math.inf)
        share = torch.cat([before, own], -1).softmax(-1)
        out = share[..., : n - begin].flatten(2, 3) @ v[:, None]
        return out + (share[..., n - begin :] @ own_v).flatten(2, 3)


class Study:
    def __init__(self, path):
        import torch
        from transformers import AttentionInterface, AttentionMaskInterface

        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        self.torch, self.reader, self.attention = torch, Reader(path), Attention(torch)
        AttentionInterface.register("sorted_study", self.attention)
        AttentionMaskInterface.register("sorted_study", lambda *_, **__: None)
        self.reader.model.set_attn_implementation("sorted_study")

    def predictions(self, tokens, positions, at, setting):
        torch, model = self.torch, self.reader.model
        self.attention.codec = setting and Codec(torch, setting)
        hidden = model.model(torch.tensor([tokens]), position_ids=torch.tensor([positions]), use_cache=False)
        return model.lm_head(hidden.last_hidden_state[0, at]).log_softmax(-1)

    def text(self, kind, number):
        if kind == "codes":
            context = haystacks(self.reader)("codes", 2048, number)
            shared = self.reader.ids(context.text, special=True)
            asked = [(self.reader.ids(question), self.reader.ids(answer)) for question, answer in context.asked]
            length, answer = sum(map(len, asked[0])), len(asked[0][1])
            asked = [[*chain(*pair)] for pair in asked if sum(map(len, pair)) == length]
            n = len(shared)
            tokens, places = [*shared, *chain(*asked)], [*range(n)] + [*range(n, n + length)] * len(asked)
            at = [n + i * length + j for i in range(len(asked)) for j in range(length - answer - 1, length - 1)]
        else:
            source = Path(paths.set_up_paths()["LOWKV_HANDBOOK_TEXT"]).read_text()
            tokens = self.reader.ids(source[20000 * number : 20000 * (number + 1)], special=True)[:2048]
            n = len(tokens)
            length, places, at = 0, [*range(n)], [*range(256, n - 1, 2)]
        self.attention.shared, self.attention.length = n, length
        return tokens, places, at

    def measure(self, kind, number, settings, add):
        torch = self.torch
        tokens, places, at = self.text(kind, number)
        truth = torch.tensor(tokens)[[i + 1 for i in at]]
        exact = self.predictions(tokens, places, at, None)
        for name in ["exact", *settings]:
            mine = exact if name == "exact" else self.predictions(tokens, places, at, settings_of(name))
            kld = torch.cat([(e.exp() * (e - m)).sum(-1) for e, m in zip(exact.split(64), mine.split(64), strict=True)])
            right = (mine.argmax(-1) == truth).float()
            add(setting=name, right=round(right.mean().item(), 5), tokens=len(at), kld=round(kld.mean().item(), 6),
                error=round(kld.std().item() / math.sqrt(len(at)), 6), worst=round(kld.quantile(.999).item(), 4),
                top1=round((mine.argmax(-1) == exact.argmax(-1)).float().mean().item(), 5),
                nll=round(-mine.gather(-1, truth[:, None]).mean().item(), 5))


def main():
    made = measuring_parser(__doc__)
    made.add_argument("settings", nargs="*", default=[""])
    made.add_argument("-m", "--model", help="a GGUF file; default: the set-up's SmolLM2")
    made.add_argument("--texts", default="codes,prose")
    made.add_argument("--numbers", default="0", help="which of the contexts, the windows (default: %(default)s)")
    args = made.parse_args()
    if not args.measuring:
        return again_with_torch(args.package)
    args.model = args.model or paths.set_up_paths()["LOWKV_MODEL"]
    model, sheet = Path(args.model).stem, Sheet(args.out / "sorted_study.csv", KEY, COLUMNS)
    study = None  # its model is loaded where something is to be measured
    for number in args.numbers.split(","):
        for kind in args.texts.split(","):
            todo = [s or "-" for s in args.settings if not sheet.get(model, kind, number, s or "-")]
            study = study or (Study(args.model) if todo else None)

            def add(kind=kind, number=number, **row):
                sheet.add(model=model, text=kind, number=number, **row)
                print(kind, number, row, file=sys.stderr, flush=True)

            if todo:
                study.measure(kind, int(number), todo, add)
    return 0


if __name__ == "__main__":
    sys.exit(main())
