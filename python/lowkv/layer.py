"""One layer of a cache: exact rows in torch, packed blocks in C++, and the attention over both.

Cells are numbered from the first token. A layer holds

    [0, sinks)               exact, the first tokens
    [first, packed_end)      packed blocks; `first` moves on where a sliding window has passed
    [packed_end, length)     exact, the newest tokens

A step of few tokens attends to all of them in one call into C++. In a longer one torch attends to the
exact rows, and the two results are joined by their log sums. Rows are packed after the step's attention,
so that a step attends to its own tokens exactly, and never changed again.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import CacheLayerMixin

from lowkv import blocks, softmax
from lowkv._core import BlockMemory, Error, LayerBlocks, Plan, Scheme
from lowkv.exact import ExactRows
from lowkv.tripwire import Rows
from lowkv.visibility import Visibility

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PIECE = 1024  # tokens packed at a time: bounds the f16 copy that the encoder reads
_MASK = 1 << 22  # mask values for packed cells made at a time: 16 MiB of f32
_FEW = 16  # queries up to which one call in C++ attends to everything, instead of several in torch
# Tokens kept behind a sliding window, so that a rejected guess can be rolled back although the host did
# not announce it (transformers before activate_past_recording()).
_SLACK = 64
# Newest tokens that are neither packed nor dropped while guesses may still be rejected: crop() says which stay.
_GUESSES = 512


class Layer(CacheLayerMixin):
    """Keys and values of one layer. index: its number in the model; sliding_window: or None."""

    is_compileable = False
    is_croppable = True

    def __init__(self, index: int, scheme: Scheme, sliding_window: int | None, memory: BlockMemory):
        super().__init__()
        self.index, self.scheme, self.memory = index, scheme, memory
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.is_exact = scheme.is_exact(index)
        self._clear()

    def _clear(self) -> None:
        self.record_past = False
        # What has passed out of a sliding window can't be a sink.
        self.sinks = 0 if self.is_exact or self.is_sliding else self.scheme.sinks
        self.first = self.packed_end = self.sinks
        self.exact: ExactRows | None = None
        self.blocks: LayerBlocks | None = None
        self.pending = False  # rows were appended, and not yet attended to and packed without an error
        self.is_initialized = False

    # ---- what transformers asks ----

    @property
    def length(self) -> int:
        """Tokens seen."""
        rows = self.exact.length if self.exact is not None else 0
        return self.packed_end - self.sinks + rows

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.sliding_window if self.is_sliding else -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.6

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # Those of the stock layers: models build masks from them that must fit what attend() expects.
        length = self.length
        offset = max(length - self.sliding_window + 1, 0) if self.is_sliding else 0
        return length + query_length - offset, offset

    @property
    def batch_size(self) -> int:
        return self.exact.keys.shape[0] if self.exact is not None else -1

    max_batch_size = batch_size  # its name before transformers 5.6

    @property
    def nbytes(self) -> int:
        """Bytes held; blocks shared with forks included."""
        exact = self.exact.nbytes if self.exact is not None else 0
        return exact + (len(self.blocks) * self.blocks.batch * self.packed_bytes if self.blocks is not None else 0)

    @property
    def float32_bytes(self) -> int:
        """Bytes that the tokens seen would take in float32."""
        if self.exact is None:
            return 0
        batch, heads, _, head_dim = self.exact.keys.shape
        return 2 * 4 * batch * heads * head_dim * self.length

    def offload(self) -> None:
        """Nothing: packed blocks are in main memory already."""

    prefetch = offload

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        keys, values = key_states, value_states
        if keys.device.type != "cpu":
            raise Error(f"layer {self.index}: lowkv runs on the CPU, not on {keys.device}; move the model "
                        "with model.to('cpu')")
        if keys.dtype not in DTYPES:
            raise Error(f"layer {self.index}: keys of {keys.dtype}; lowkv takes float32, bfloat16, float16")
        if keys.shape[:2] != values.shape[:2] or keys.shape[3] != values.shape[3]:
            raise Error(f"layer {self.index}: keys {tuple(keys.shape)} and values {tuple(values.shape)} "
                        "have other heads or head_dims; lowkv needs the same")
        if not self.is_exact:
            plan = Plan(str(self.scheme), self.index, keys.shape[1], keys.shape[3])
            self.block_tokens, self.exact_halves = plan.block_tokens, plan.exact_bytes // 2
            self.packed_bytes = plan.packed_bytes
            self.blocks = LayerBlocks(plan, keys.shape[0], self.memory)
        self.exact = ExactRows(keys.shape[0], keys.shape[1], keys.shape[3], keys.dtype)
        self.is_initialized = True

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Adds rows `[batch, kv_heads, tokens, head_dim]`. Nothing is packed: attend() does that."""
        self.require_attended()
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise Error("a packed cache has no gradients: run the model under torch.no_grad()")
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        have, got = self.exact.keys.shape, keys.shape
        if (got[0], got[1], got[3]) != (have[0], have[1], have[3]):
            raise Error(f"layer {self.index}: keys {tuple(got)} do not fit a cache with batch {have[0]}, "
                        f"{have[1]} heads and head_dim {have[3]}; start with an empty cache")
        self.exact.append(keys, values)
        self.pending = True

    def require_attended(self) -> None:
        """Raises Error where the last rows were appended in a step that went no further."""
        if self.pending:
            raise Error(f"layer {self.index}: its last keys were stored but never attended to by lowkv. Either the "
                        "last step failed or was interrupted: call reset(), or go on with a fork from before it. Or "
                        "this model bypasses the attention that Cache.from_model() installed: use its own cache")

    def update(self, key_states, value_states, *args, **kwargs):
        self.append(key_states, value_states)
        return Rows.of(key_states, self), Rows.of(value_states, self)

    def take_over(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Appends the rows by which `keys` and `values`, which begin at the first token, are longer than this
        layer, and packs what has left the window."""
        if keys.shape[2] < self.length:
            raise Error(f"layer {self.index}: {keys.shape[2]} tokens given, but it has {self.length} already")
        self.append(keys[:, :, self.length :], values[:, :, self.length :])
        self.settle()
        self.pending = False

    # ---- attention ----

    def attend(self, query: torch.Tensor, visibility: Visibility, scale: float, softcap: float | None,
               sink_logits: torch.Tensor | None) -> torch.Tensor:
        """Attention of `query`, `[batch, heads, queries, head_dim]`, over all rows. Then packs what has left
        the window. Returns the output in the query's shape and dtype."""
        with torch.no_grad():
            first = visibility.first_cell
            skip = max(0, first - self.packed_end + self.sinks) if self._contiguous else 0
            if self.blocks is not None and len(self.blocks) and query.shape[2] <= _FEW:
                out = self._attend_few(query, visibility, scale, softcap, sink_logits, first, skip)
            else:
                out = self._attend_many(query, visibility, scale, softcap, sink_logits, first, skip)
            self.settle(_GUESSES if self.record_past else 0)
        self.pending = False
        return out

    @property
    def _contiguous(self) -> bool:
        """The exact rows are consecutive cells: no packed block lies between sinks and window."""
        return self.sinks == 0 or self.packed_end == self.sinks

    def _exact_mask(self, visibility, skip, start, stop):
        """The mask of the exact rows from `skip` on: sinks, then the window."""
        if self._contiguous:
            return visibility.mask(self.packed_end - self.sinks + skip, self.length, start, stop)
        parts = [visibility.mask(0, self.sinks, start, stop),
                 visibility.mask(self.packed_end, self.length, start, stop)]
        if parts[0] is None and parts[1] is None:
            return None
        counts = self.sinks, self.length - self.packed_end
        parts = [torch.zeros(1, 1, stop - start, n) if p is None else p
                 for p, n in zip(parts, counts, strict=True)]
        shape = torch.broadcast_shapes(*(p.shape[:3] for p in parts))
        return torch.cat([p.expand(*shape, -1) for p in parts], dim=3)

    def _attend_few(self, query, visibility, scale, softcap, sink_logits, first, skip):
        """All rows in one call."""
        batch, heads, queries, _ = query.shape
        block = min(max(0, first - self.first) // self.block_tokens, len(self.blocks))
        mask = row_mask = None
        if queries > 1 or not visibility.plain_causal:
            mask = visibility.mask(self.first + block * self.block_tokens, self.packed_end, 0, queries)
            row_mask = self._exact_mask(visibility, skip, 0, queries)
        exact, floats = self.exact, _floats(query)
        out, sums = torch.empty_like(floats), torch.empty(batch, queries, heads)
        self.blocks.attend_all(block, floats, out, sums, scale, softcap or 0.0, _whole(mask, queries),
                               exact.key_buffer, exact.value_buffer, skip, exact.length, _whole(row_mask, queries),
                               None if sink_logits is None else sink_logits.detach().float(), torch.get_num_threads())
        return out.to(query.dtype)

    def _attend_many(self, query, visibility, scale, softcap, sink_logits, first, skip):
        """The exact rows in torch, the packed blocks in C++, joined."""
        keys, values = self.exact.keys[:, :, skip:], self.exact.values[:, :, skip:]
        packed = self._packed_part(query, visibility, scale, softcap, first)
        if packed is None and self._contiguous and not softcap and sink_logits is None:
            return _exact_only(query, keys, values, visibility, scale)

        def mask(start, stop):
            return self._exact_mask(visibility, skip, start, stop)

        part = softmax.attend(query, keys, values, mask, scale, softcap)
        if packed is not None:
            part = softmax.join(part, packed)
        if sink_logits is not None:
            part = softmax.add_sink_logits(part, sink_logits)
        return part[0].to(query.dtype)

    def _packed_part(self, query, visibility, scale, softcap, first):
        """The part of the packed blocks as softmax.attend() returns it, or None where there are none."""
        if self.blocks is None:
            return None
        block = max(0, first - self.first) // self.block_tokens
        if block >= len(self.blocks):
            return None
        batch, heads, queries, _ = query.shape
        query = _floats(query)
        out = torch.empty_like(query)
        log_sum = torch.empty(batch, queries, heads)
        begin = self.first + block * self.block_tokens
        # Masks of one row per head and query are large: a part of the queries at a time.
        step = max(1, _MASK // (batch * heads * (self.packed_end - begin)))
        if visibility.full is None and visibility.bias is None and visibility.keep is None:
            step = queries if self.sliding_window is None else step
        for start in range(0, queries, step):
            stop = min(start + step, queries)
            mask = _whole(visibility.mask(begin, self.packed_end, start, stop), stop - start)
            sums = torch.empty(batch, stop - start, heads)
            self.blocks.attend(block, query[:, :, start:stop], out[:, :, start:stop], sums, scale,
                               softcap or 0.0, mask, torch.get_num_threads())
            log_sum[:, start:stop] = sums
        return out, log_sum.transpose(1, 2)

    # ---- packing ----

    def settle(self, spared: int = 0) -> None:
        """Packs what has left the window, and drops what has left a sliding window; not the last `spared` tokens
        beside."""
        if self.blocks is not None:
            count = max(0, self.length - self.scheme.window - spared - self.packed_end)
            if self.scheme.flush:
                count -= count % self.scheme.flush
            self._pack(count // self.block_tokens)
        if self.is_sliding:
            self._evict(spared)

    def _pack(self, count: int) -> None:
        if count == 0:
            return
        rows = count * self.block_tokens
        going = slice(self.sinks, self.sinks + rows)
        keys, values = self.exact.keys[:, :, going], self.exact.values[:, :, going]
        held = len(self.blocks)
        try:
            for halves in blocks.pieces(keys, values, self.block_tokens, _PIECE):
                self.blocks.append(halves, torch.get_num_threads())
        except BaseException:  # all of it or none: their rows are still there
            self.blocks.truncate(held, 0)
            raise
        room = self.sinks + self.scheme.window + (self.scheme.flush or self.block_tokens) + self.block_tokens
        self.exact.remove(self.sinks, self.sinks + rows, room)
        self.packed_end += rows

    def decoded(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `count` packed blocks from number `first` on, `[batch, heads, rows, head_dim]`."""
        batch, heads = self.exact.keys.shape[:2]
        halves = torch.empty(batch, count, self.exact_halves, dtype=torch.uint16)
        self.blocks.decode(first, halves, torch.get_num_threads())
        dtype = self.exact.keys.dtype
        return tuple(rows.to(dtype) for rows in blocks.to_rows(halves, heads, self.block_tokens))

    def full(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows that are held, in order, packed ones decoded: `[batch, heads, rows, head_dim]`."""
        if self.exact is None:
            raise Error(f"layer {self.index} is empty")
        keys, values = self.exact.keys, self.exact.values
        if self.blocks is None or len(self.blocks) == 0:
            return keys.clone(), values.clone()
        packed = self.decoded(0, len(self.blocks))
        return tuple(torch.cat([rows[:, :, : self.sinks], old, rows[:, :, self.sinks :]], dim=2)
                     for rows, old in zip((keys, values), packed, strict=True))

    def _evict(self, spared: int) -> None:
        needed = self.length - self.sliding_window + 1 - _SLACK - spared  # no later query sees a cell before it
        if self.blocks is not None:
            count = min(max(0, needed - self.first) // self.block_tokens, len(self.blocks))
            self.blocks.drop_front(count)
            self.first += count * self.block_tokens
        rows = needed - self.packed_end
        # With packed blocks the exact rows are the window, which is packed before it is dropped.
        if self.blocks is None and rows > _SLACK:
            self.exact.remove(0, rows, self.exact.length + _SLACK)
            self.first = self.packed_end = self.packed_end + rows

    # ---- what generate() does to it ----

    def activate_past_recording(self) -> None:
        self.record_past = True

    def crop(self, tokens: int) -> None:
        """Removes the last `-tokens` tokens; a positive number is the length to keep (transformers before
        activate_past_recording())."""
        if not self.is_initialized:
            return
        length = self.length
        target = length + tokens if tokens < 0 else tokens if tokens > 0 else length
        if target < length:
            self._crop_to(max(target, 0))
        self.settle()

    def _crop_to(self, target: int) -> None:
        oldest = self.packed_end if self.blocks is None else self.first
        if self.is_sliding and oldest > max(0, target - self.sliding_window + 1):
            raise Error(f"layer {self.index}: can't go back from {self.length} to {target} tokens: what a "
                        f"sliding window of {self.sliding_window} has passed is dropped. Call "
                        "cache.activate_past_recording() first")
        self.pending = False
        if target >= self.packed_end:
            self.exact.truncate(self.sinks + target - self.packed_end)
        elif target <= self.sinks:
            self.blocks.truncate(0, 0)
            self.packed_end = self.first
            self.exact.truncate(target)
        else:
            whole, cut = divmod(target - self.first, self.block_tokens)
            keys, values = self.decoded(whole, 1 if cut else 0)
            self.blocks.truncate(whole, 1 if cut else 0)
            self.packed_end = self.first + whole * self.block_tokens
            self.exact.truncate(self.sinks)
            self.exact.append(keys[:, :, :cut], values[:, :, :cut])

    def reset(self) -> None:
        self._clear()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if not self.is_initialized:
            return
        rows = torch.arange(self.batch_size)[indices.cpu()]
        self.exact.select(rows)
        if self.blocks is not None:
            self.blocks.select(rows.tolist())

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def __deepcopy__(self, memo) -> Layer:
        new = Layer(self.index, self.scheme, self.sliding_window, self.memory)
        new.__dict__.update(self.__dict__)
        new.exact = self.exact.copy() if self.exact is not None else None
        new.blocks = self.blocks.copy() if self.blocks is not None else None
        return new


def _exact_only(query, keys, values, visibility: Visibility, scale: float) -> torch.Tensor:
    """torch's own attention, a part of the queries at a time where a mask is needed."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    queries, cells = query.shape[2], keys.shape[2]
    grouped = query.shape[1] != keys.shape[1]
    if visibility.plain_causal and queries == cells and queries == visibility.total:
        return sdpa(query, keys, values, scale=scale, is_causal=queries > 1, enable_gqa=grouped)
    step = max(1, softmax.SCORES // (query.shape[0] * query.shape[1] * cells))
    outs = []
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        mask = visibility.mask(visibility.total - cells, visibility.total, start, stop)
        if mask is not None:
            mask = mask.to(query.dtype)
        outs.append(sdpa(query[:, :, start:stop], keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _floats(query: torch.Tensor) -> torch.Tensor:
    """A query as C++ takes it: float32, a head's channels side by side."""
    query = query.detach().float()
    return query if query.stride(3) == 1 else query.contiguous()


def _whole(mask: torch.Tensor | None, queries: int) -> torch.Tensor | None:
    """A mask as C++ takes it: a row for each query."""
    return None if mask is None else mask.expand(-1, -1, queries, -1).contiguous()
