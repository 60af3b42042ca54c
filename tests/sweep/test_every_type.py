"""`exact` against stock for every type of model that transformers can generate text with: a prompt, a chunk of text
behind a filled cache, steps, left padding, token types, generate(); with lowkv's cache, and, after from_model(), with
the model's own and with none."""

import copy
import inspect

import lowkv
import pytest
import torch
import transformers
from known import NOT_BUILT, REFUSED, STOCK_IS_WRONG
from lowkv.names import cache_argument
from tiny import TYPES, WORDS, build
from transformers import DynamicCache

transformers.logging.set_verbosity_error()
PROMPT, CHUNK, STEPS, NEW = 40, 9, 2, 8
PADDING = 7
CASES = [(kind, name) for kind, names in sorted(TYPES.items()) for name in sorted(names)]


def ids(batch, tokens):
    return torch.randint(WORDS.start, WORDS.stop, (batch, tokens), generator=torch.Generator().manual_seed(1))


def logits(output):
    return output.logits if getattr(output, "logits", None) is not None else output.last_hidden_state


def turns(model, cache, padded, types):
    """Logits of a prompt, a chunk and steps; without a cache, of the prompt."""
    batch = 2 if padded else 1
    tokens, mask = ids(batch, PROMPT + CHUNK + STEPS), torch.ones(batch, PROMPT + CHUNK + STEPS, dtype=torch.long)
    if padded:
        mask[1, :PADDING], tokens[1, :PADDING] = 0, 0
    out, seen = [], 0
    for size in (PROMPT, CHUNK, *[1] * STEPS) if cache is not None else (PROMPT,):
        more = {"attention_mask": mask[:, : seen + size]} if padded else {}
        if types and seen == 0:  # one block of them in the middle of the prompt
            more[types] = torch.zeros(batch, size, dtype=torch.long)
            more[types][:, 8:20] = 1
        if cache is not None:
            more[cache_argument(model)] = cache
        part = logits(model(input_ids=tokens[:, seen : seen + size], use_cache=cache is not None, **more))
        out.append(part[mask[:, seen : seen + size].bool()])
        seen += size
    return torch.cat(out)


def generated(model, cache, use_cache=True):
    arguments = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0, use_cache=use_cache)
    return model.generate(ids(1, PROMPT), **arguments, **({cache_argument(model): cache} if cache is not None else {}))


def attempt(function, *arguments):
    """What stock gives, or None where this model can't do that."""
    try:
        found = function(*arguments)
    except Exception:
        return None
    return found if torch.is_tensor(found) and found.float().isfinite().all() else None


def own_cache(model):
    return DynamicCache(config=model.config.get_text_config(decoder=True))


@pytest.mark.parametrize("kind,name", CASES, ids=[f"{kind}-{name}" for kind, name in CASES])
@torch.no_grad()
def test_exact_is_stock(kind, name, record_property):
    case = f"{kind}: {name}"
    try:
        model = build(kind, name)
        accepted = inspect.signature(model.forward).parameters
        types = [None, *(word for word in ("token_type_ids", "mm_token_type_ids") if word in accepted)]
        stock, want = copy.deepcopy(model), {}
        for padded in (False, True):
            for word in types:
                want["cache", padded, word] = attempt(lambda *rest: turns(stock, own_cache(stock), *rest), padded, word)
                want["none", padded, word] = attempt(turns, stock, None, padded, word)
        want["generate"] = attempt(generated, stock, None, kind not in STOCK_IS_WRONG)
        if want["cache", False, None] is None:
            turns(stock, own_cache(stock), False, None)
            raise ValueError("its logits are not finite")
    except Exception as error:
        record_property("NOT BUILT", f"{case}: {type(error).__name__}: {str(error).strip().splitlines()[-1:]}"[:160])
        assert case in NOT_BUILT, f"{case} can't be built small: help tests/sweep/tiny.py, or add it to known.py"
        return
    assert case not in NOT_BUILT, f"{case} is built now: take it off NOT_BUILT of known.py"

    def compare(how, got):
        assert (got - want[how]).abs().max() <= 1e-4 * want[how].abs().max(), (case, how)

    def with_lowkv(padded, word):
        return turns(model, lowkv.Cache.from_model(model, "exact"), padded, word)

    try:
        got = with_lowkv(False, None)
    except lowkv.Error as error:
        record_property("REFUSED", f"{case}: {str(error)[:120]}")
        assert case in REFUSED, f"{case} is refused: {error}"
        compare(("none", False, None), turns(model, None, False, None))  # and is left as it was
        return
    assert case not in REFUSED, f"{case} is served now: take it off REFUSED of known.py"
    compare(("cache", False, None), got)
    for (how, *rest), expected in [item for item in want.items() if isinstance(item[0], tuple)]:
        if expected is None:
            continue
        if how == "cache":
            compare((how, *rest), with_lowkv(*rest))
            compare((how, *rest), turns(model, own_cache(model), *rest))
        else:
            compare((how, *rest), turns(model, None, *rest))
    if want["generate"] is not None:
        cache = lowkv.Cache.from_model(model, "exact")
        assert torch.equal(generated(model, cache), want["generate"]), case
        assert cache.get_seq_length() == PROMPT + NEW - 1, case
