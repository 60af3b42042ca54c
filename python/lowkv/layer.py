"""One layer of a cache, as transformers sees it: the rows themselves, packed and exact, and attention to them are
the core's (lowkv._core.Batch)."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterator

import torch
from transformers.cache_utils import CacheLayerMixin

from lowkv import heap, rows_attention, saturation
from lowkv._core import Batch, Error, Plan, Retention, Scheme, Store, read_image
from lowkv.budget import Budget
from lowkv.rows_attention import MASK, attend_to_rows, sequences_at_a_time, wants_decoded
from lowkv.tripwire import Rows
from lowkv.visibility import Visibility

_LOGGER = logging.getLogger("lowkv")
_LONG = 1024  # queries of a step that leaves temporaries worth giving back at once, before the next layer's
# Tokens kept behind a sliding window, so that a rejected guess can be rolled back although the host did
# not announce it (transformers before activate_past_recording()).
_SLACK = 64
# Newest tokens that are neither packed nor dropped while guesses may still be rejected: crop() says which stay.
_GUESSES = 512


class Layer(CacheLayerMixin):
    """Keys and values of one layer. index: its number in the model; sliding_window, budget: or None."""

    is_compileable = False
    is_croppable = True

    def __init__(self, index: int, scheme: Scheme, sliding_window: int | None, store: Store,
                 budget: Budget | None = None):
        super().__init__()
        self.index, self.scheme, self.store, self.budget = index, scheme, store, budget
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.retention = scheme.retention(index, self.is_sliding)
        self.device = torch.device("cpu")  # the model's, once it has given rows
        self._clear()

    def _clear(self) -> None:
        self.record_past = False
        self._hold(None)

    def _hold(self, rows: Batch | None) -> None:
        self.rows = rows
        self.pending = False  # rows were appended, and not yet attended to and packed without an error
        # The keys and values of a first step, until it attends to them.
        self._prompt: tuple[torch.Tensor, torch.Tensor] | None = None
        self.is_initialized = rows is not None

    # ---- what transformers asks ----

    @property
    def length(self) -> int:
        """Tokens seen."""
        return self.rows.tokens if self.rows is not None else 0

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
        return self.rows.shape[0] if self.rows is not None else -1

    max_batch_size = batch_size  # its name before transformers 5.6

    @property
    def exact_tokens(self) -> int:
        """Tokens that are held exact."""
        return self.rows.exact_tokens if self.rows is not None else 0

    @property
    def nbytes(self) -> int:
        """Bytes held, blocks shared with forks included."""
        return sum(self.rows.bytes) if self.rows is not None else 0

    @property
    def float32_bytes(self) -> int:
        """Bytes that the tokens seen would take in float32."""
        return 2 * 4 * math.prod(self.rows.shape) * self.length if self.rows is not None else 0

    def offload(self) -> None:
        """Nothing: blocks are where the cache was asked to have them."""

    prefetch = offload

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        keys, values = key_states, value_states
        self._require_place(keys.device)
        if keys.shape[:2] != values.shape[:2] or keys.shape[3] != values.shape[3]:
            raise Error(f"layer {self.index}: keys {tuple(keys.shape)} and values {tuple(values.shape)} "
                        "have other heads or head_dims; lowkv needs the same")
        shape, rows = (keys.shape[1], keys.shape[3]), keys.dtype
        rungs = []
        if self.budget is not None:
            self.budget.require_alike(self.index, shape)
            rungs = [Plan(scheme, self.index, *shape, rows) for scheme in self.budget.rungs]
        self._plan = Plan(self.scheme, self.index, *shape, rows)
        self._hold(Batch(self.store, self._plan, self.retention, keys.shape[0], rungs))

    def _require_place(self, device: torch.device) -> None:
        """Raises Error for rows that the cache can't take where they are."""
        if device.type == "cpu" or str(device) == self.store.device:
            return
        if device.type == "cuda":
            raise Error(f"layer {self.index}: the model is on {device}, and this cache on {self.store.device!r}: leave "
                        f"`device` out, or give {str(device)!r} (it takes the package lowkv-cuda), or move the model "
                        "with model.to('cpu')")
        raise Error(f"layer {self.index}: the model is on {device}, and lowkv takes rows from the CPU, wherever the "
                    "cache is, and from a CUDA device that it is on; move the model with model.to('cpu')")

    def _beside(self, rows: torch.Tensor):
        """A context in which the device works in torch's order, where the rows are on a GPU."""
        if not rows.is_cuda:
            return contextlib.nullcontext()
        self.store.use_stream(torch.cuda.current_stream(rows.device).cuda_stream)
        return torch.cuda.device(rows.device)

    def load(self, image: torch.Tensor) -> None:
        """Takes over what was saved of a layer like this one. Raises Error for anything else."""
        header = read_image(image)
        if header.bytes != len(image):
            raise Error(f"an image of {header.bytes} bytes in {len(image)}")
        plan = Plan(self.scheme, self.index, header.kv_heads, header.head_dim, header.rows)
        rows = Batch.load(image, self.store, plan, self.retention)
        needed = max(0, rows.tokens - self.sliding_window + 1) if self.is_sliding else 0
        if rows.first > needed:
            raise Error(f"it has its tokens from {rows.first} on, and {needed} is needed")
        self._hold(rows)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Adds rows `[batch, kv_heads, tokens, head_dim]`. Nothing is packed: attend() does that."""
        self.require_attended()
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise Error("a packed cache has no gradients: run the model under torch.no_grad()")
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        got, (batch, heads, head_dim) = keys.shape, self.rows.shape
        if (got[0], got[1], got[3]) != (batch, heads, head_dim):
            raise Error(f"layer {self.index}: keys {tuple(got)} do not fit a cache with batch {batch}, {heads} heads "
                        f"and head_dim {head_dim}; start with an empty cache")
        held = getattr(torch, self.rows.dtype.name)
        for given in (keys.dtype, values.dtype):
            if torch.promote_types(given, held) != held:
                raise Error(f"layer {self.index}: rows of {given} for a cache whose first keys were {held}, to which "
                            "they would be rounded; run all steps in one dtype (torch.autocast included)")
        keys, values = (_side_by_side(rows.detach().to(held)) for rows in (keys, values))
        self._prompt = (keys, values) if self.length == 0 else None
        self.device = keys.device
        with self._beside(keys):
            heap.with_room(self.device, self.rows.append, keys, values)
        self.pending = True

    def require_attended(self, kind: type[Error] = Error) -> None:
        """Raises `kind` where the last rows were appended in a step that went no further."""
        if self.pending:
            raise kind(f"layer {self.index}: its last keys were stored but never attended to by lowkv. Either the "
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
        self.pack()

    # ---- attention ----

    def attend(self, query: torch.Tensor, visibility: Visibility, scale: float, softcap: float | None,
               sink_logits: torch.Tensor | None) -> torch.Tensor:
        """Attention of `query`, `[batch, heads, queries, head_dim]`, over all rows. Then packs what has left
        the window. Returns the output in the query's shape and dtype."""
        if torch.is_grad_enabled() and query.requires_grad:
            raise Error("a packed cache has no gradients, those of queries included: run the model under "
                        "torch.no_grad()")
        with self._beside(query), torch.no_grad():
            by_torch = not softcap and sink_logits is None
            if by_torch and self._prompt is not None:
                out = attend_to_rows(query, *self._prompt, visibility, scale)
            elif by_torch and wants_decoded(query):
                out = self._attend_decoded(query, visibility, scale)
            else:
                out = self._attend(query, visibility, scale, softcap or 0.0, sink_logits)
            real = visibility.real()
            padded = real is not None and not real.all()
            if padded:  # padding is in nobody's window, and no sink
                self.rows.mark_padding(real.expand(query.shape[0], -1).contiguous().cpu())
            if self.rows.wants_queries:
                self._observe(query, real if padded else None)
            self.pack(_GUESSES if self.record_past else 0)
        if query.shape[2] >= _LONG:
            heap.trim()
        return out

    def _attend(self, query, visibility, scale, softcap, sink_logits):
        floats = _side_by_side(query.detach().float())
        out = torch.empty_like(floats)
        first = max(visibility.first_cell, self.rows.first)
        logits = None if sink_logits is None else sink_logits.detach().float()
        rest = scale, softcap, logits, torch.get_num_threads()
        attend = functools.partial(heap.with_room, self.device, self.rows.attend)
        if visibility.masks == 0:
            attend(floats, out, first, None, visibility.causal, visibility.window or 0, *rest)
            return out.to(query.dtype)
        for part, mask in _masked_parts(visibility, first, visibility.masks):
            mask = None if mask is None else _side_by_side(mask)
            attend(floats[:, :, part], out[:, :, part], first, mask, False, 0, *rest)
        return out.to(query.dtype)

    def _attend_decoded(self, query, visibility, scale):
        begin = max(visibility.first_cell, self.rows.first)
        batch, heads, head_dim = self.rows.shape
        bytes_of_one = 2 * heads * (self.length - begin) * head_dim * query.element_size()
        outs = []
        for part in torch.arange(batch).split(sequences_at_a_time(bytes_of_one)):
            start, stop = int(part[0]), int(part[-1]) + 1
            rows = (x.to(query.dtype) for x in self._decoded(begin, start, stop))
            outs.append(attend_to_rows(query[start:stop], *rows, visibility.of(start, stop), scale, begin))
        return torch.cat(outs)

    def _observe(self, query: torch.Tensor, real: torch.Tensor | None) -> None:
        """Padding is nobody's query: it must not weigh channels, nor end the collection."""
        if real is None:
            rows, tokens = _newest(query)
            self.rows.update_query_stats(rows, None, tokens)
            return
        for number, tokens_seen in enumerate(real.expand(query.shape[0], -1)):
            if tokens_seen.any():
                rows, tokens = _newest(query[number : number + 1, :, tokens_seen])
                self.rows.update_query_stats(rows, number, tokens)

    def pack(self, spared: int = 0) -> None:
        """Packs what has left the window, and drops what has left a sliding window; not the last `spared` tokens
        beside. The step is over with it."""
        self._prompt = None
        if self.budget is not None:
            self._drop_passed()
            limit = self.budget.share(self.sliding_window, self._unquantized_bytes)
            heap.with_room(self.device, self.rows.pack, spared, torch.get_num_threads(), limit)
            if self.nbytes > limit:
                self.budget.refuse(self.length * self.batch_size, self.nbytes, self._unquantized_bytes)
        else:
            heap.with_room(self.device, self.rows.pack, spared, torch.get_num_threads())
        saturation.report(self.store, _LOGGER)
        self._drop_passed()
        self.pending = False

    def _drop_passed(self) -> None:
        """Drops what a sliding window has passed: no later query sees a cell before it."""
        if self.is_sliding:
            self.rows.drop_before(max(0, self.length - self.sliding_window + 1 - self._slack))

    @property
    def _slack(self) -> int:
        return _SLACK + (_GUESSES if self.record_past else 0)

    def _unquantized_bytes(self, window: int) -> int:
        """What a layer like this one holds of a sliding window at most, if none of it is packed."""
        blocks = Retention(window + self._slack, 0, 0).most_unquantized_blocks(self._plan.block_tokens)
        return blocks * self._plan.exact_bytes * self.batch_size

    def full(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows that are held, in order, packed ones decoded, where the last rows came from (else on the
        CPU): `[batch, heads, rows, head_dim]`."""
        if self.rows is None:
            raise Error(f"layer {self.index} is empty")
        return self._decoded(self.rows.first, 0, self.batch_size)

    def _decoded(self, first: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows from token `first` on of sequences [start, stop)."""
        shape = stop - start, self.rows.shape[1], self.length - first, self.rows.shape[2]
        held = getattr(torch, self.rows.dtype.name)
        keys, values = (torch.empty(shape, dtype=held, device=self.device) for _ in range(2))
        with self._beside(keys):
            heap.with_room(self.device, self.rows.read, first, keys, values, torch.get_num_threads(), start)
        return keys, values

    # ---- what generate() does to it ----

    def activate_past_recording(self) -> None:
        self.record_past = True

    def crop(self, tokens: int) -> None:
        """Removes the last `-tokens` tokens; a positive number is the length to keep (transformers before
        activate_past_recording())."""
        if self.rows is None:
            return
        length = self.length
        target = max(length + tokens, 0) if tokens < 0 else tokens or length
        if target < length:
            if self.is_sliding and self.rows.first > max(0, target - self.sliding_window + 1):
                raise Error(f"layer {self.index}: can't go back from {length} to {target} tokens: what a sliding "
                            f"window of {self.sliding_window} has passed is dropped. Call "
                            "cache.activate_past_recording() first")
            self.rows.truncate(target)
        self.pack()

    def reset(self) -> None:
        self._clear()

    def selected(self, indices: torch.Tensor) -> Batch | None:
        """Rows of these sequences of the batch, in this order; the layer keeps its own."""
        if self.rows is None:
            return None
        rows = self.rows.fork()
        rows.select(torch.arange(self.batch_size)[indices.cpu()].tolist())
        return rows

    def take(self, rows: Batch | None) -> None:
        """Has from now on what selected() gave."""
        self.rows = rows

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.take(self.selected(indices))

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def __deepcopy__(self, memo) -> Layer:
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.rows = self.rows.fork() if self.rows is not None else None
        return new

    # ---- steps ----

    def begin(self) -> Batch | None:
        """Begins a step; what it gives is for rollback()."""
        if self.rows is not None:
            self.rows.begin()
        return self.rows

    def commit(self) -> None:
        if self.rows is not None:
            self.rows.commit()

    def rollback(self, begun: Batch | None) -> None:
        """Makes the layer what it was when begin() gave `begun`."""
        if begun is not None:
            begun.rollback()
        self._hold(begun)


def _masked_parts(visibility: Visibility, first: int, masks: int) -> Iterator[tuple[slice, torch.Tensor | None]]:
    """The queries, so many at a time that `masks` masks for cells from `first` on stay small, and each part's mask."""
    queries, total = visibility.queries, visibility.total
    step = max(1, MASK // (masks * (total - first)))
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        mask = visibility.mask(first, total, start, stop)
        yield slice(start, stop), None if mask is None else mask.expand(-1, -1, stop - start, -1)


def _newest(query: torch.Tensor) -> tuple[torch.Tensor, int]:
    """As many of the newest queries as count, for Batch.update_query_stats(), and the tokens of each. A GPU sums them
    up: 512 tokens of 16 sequences with 32 heads of 128 channels would be 134 MB to bring to the host. Tokens that
    repeat the one before them count there, too."""
    newest = query[:, :, -Batch.queries_enough :].detach()
    if not rows_attention.on_gpu(query):
        return _side_by_side(newest.float().cpu()), 1
    tokens = newest.shape[2]
    norms = torch.linalg.vector_norm(newest, dim=2, keepdim=True, dtype=torch.float32)
    return _side_by_side((norms / tokens**0.5).cpu()), tokens


def _side_by_side(rows: torch.Tensor) -> torch.Tensor:
    """As C++ takes it: a head's channels, or a query's mask, side by side."""
    return rows if rows.stride(3) == 1 else rows.contiguous()
