"""Several conversations at once in one llama-server, and one that goes back: each answers as it does alone."""

import math
from concurrent.futures import ThreadPoolExecutor

import plugin_models as models
import pytest
from plugin_tools import MODEL, server, text

SCHEME = "lowkv4,window=32,sinks=4"
SLOTS = 3
# One of each kind of cache: see plugin_models.ALL.
KINDS = ("llama", "qwen2", "qwen3", "gemma2", "gemma3n", "gemma4", "phi3", "falcon", "cohere2", "stablelm", "gpt2",
         "bloom", "gpt-oss", "afmoe", "deepseek2", "jamba", "falcon-h1", "lfm2", "qwen35")


def ask(running, prompt, tokens=1, **more):
    """Distributions of the next tokens."""
    answer = running.complete(prompt, tokens=tokens, n_probs=300, logit_bias=[["a", 100]], **more)
    return [{t["id"]: math.exp(t["logprob"]) for t in p["top_logprobs"]} for p in answer["completion_probabilities"]]


def far(one, other):
    """The mean Kullback-Leibler divergence of the answers' distributions."""
    values = [sum(p * math.log(p / max(o.get(t, 0), 1e-9)) for t, p in d.items() if p > 0)
              for a, b in zip(one, other, strict=True) for d, o in zip(a, b, strict=True)]
    return sum(values) / len(values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("uses")


def three(folder, model, scheme, unified, at_once):
    args = ("-np", SLOTS, "-c", 4096 if unified else 1024 * SLOTS, "-cram", 0, *(["--kv-unified"] if unified else []))
    with server(folder, *args, scheme=scheme, model=model) as s:
        def turns(slot):
            return [d for n in (400, 450, 460) for d in ask(s, text(slot, n), tokens=3, id_slot=slot)]
        if at_once:
            with ThreadPoolExecutor(SLOTS) as pool:
                return [[d] for found in pool.map(turns, range(SLOTS)) for d in found]
        return [[d] for slot in range(SLOTS) for d in turns(slot)]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("unified", [True, False])
def test_three_at_once_answer_as_one_after_the_other(folder, name, unified):
    model = folder / f"{name}.gguf"
    if not model.exists():
        models.write_model(name, model)
    exact, exact_at_once = (three(folder, model, "exact", unified, at_once) for at_once in (False, True))
    alone, at_once = (three(folder, model, SCHEME, unified, at_once) for at_once in (False, True))
    each = len(exact) // SLOTS
    own, mixed = far(exact, alone), far(exact, exact[each:] + exact[:each])  # as if slots took each other's cells
    assert far(exact, exact_at_once) < mixed / 100
    # Blocks are packed at other tokens where prompts are cut up otherwise, so a packed cache's loss scatters.
    loss = far(exact, at_once)
    print(f"{name}: packed alone {own:.4f}, at once {loss:.4f}, mixed up {mixed:.4f}")
    assert loss < 3 * own + mixed / 100


def test_going_back_forty_times_in_a_sliding_window(folder):
    """A client that edits its last words: llama-server takes a checkpoint, or evaluates what has left the window."""
    model = models.gemma2(folder / "back.gguf")
    prompts = [text(5, 900)[:900 - 17 * n] + text(n, 11) for n in range(40)]
    found = {}
    for scheme in ("exact", SCHEME):
        with server(folder, "-np", 1, "-c", 2048, scheme=scheme, model=model) as s:
            found[scheme] = [ask(s, prompt) for prompt in prompts]
        with server(folder, "-np", 1, "-c", 2048, "-cram", 0, scheme=scheme, model=model) as s:
            found[scheme, "afresh"] = [ask(s, prompt, cache_prompt=False) for prompt in prompts]
    own = far(found["exact", "afresh"], found[SCHEME, "afresh"])
    loss, mixed = far(found["exact"], found[SCHEME]), far(found["exact"], found["exact"][20:] + found["exact"][:20])
    print(f"packed afresh {own:.5f}, going back {loss:.5f}, of other prompts {mixed:.5f}")
    assert loss < 3 * own + mixed / 100


def test_no_words_of_another_slot(folder):
    """A real model repeats the word of its own conversation, never that of another."""
    words = ("tulip", "hammer", "penguin")
    prompts = [f"The password is {word}. " + "The ship left the harbour and the sailors sang. " * 12 +
               "Remember the password from the first sentence. The password is" for word in words]
    with server(folder, "-np", SLOTS, "-c", 4096, "--kv-unified", scheme="lowkv4", model=MODEL) as s:
        for _ in range(3):
            with ThreadPoolExecutor(SLOTS) as pool:
                answers = list(pool.map(lambda p: s.complete(p, tokens=8)["content"], prompts))
            for word, answer in zip(words, answers, strict=True):
                assert not any(other in answer.lower() for other in words if other != word), answers
            # So small a model does not recall all of them.
            assert any(word in answer.lower() for word, answer in zip(words, answers, strict=True)), answers
