"""Logits of stock llama.cpp's tools, and their distances."""

import random

import numpy as np
from plugin_tools import tool

CONTEXT = 512


def random_text(path, length=1100):
    source = random.Random(1)
    path.write_text("".join(source.choice("abcdefgh ijklmnop,.\n") for _ in range(length)))
    return path


def log_probabilities(folder, text, model, scheme, batch, *more, env=None):
    """[tokens, vocabulary] from llama-perplexity. It writes them to a file for its KL divergence;
    we don't let it compute that, because at exit it loses the end of its log now and then."""
    path = folder / f"{scheme}-{batch}.logits"
    run = tool("llama-perplexity", "-f", text, "-c", CONTEXT, "-b", CONTEXT, "-ub", batch,
               "--kl-divergence-base", path, *more, model=model, scheme=scheme, env=env)
    assert run.code == 0, run.both[-3000:]
    data = path.read_bytes()
    path.unlink()
    assert data[:8] == b"_logits_"
    context, vocabulary, chunks = np.frombuffer(data, np.int32, 3, 8)
    rows = np.frombuffer(data, np.uint16, offset=20 + 4 * context * chunks)
    rows = rows.reshape(-1, 2 * ((vocabulary + 1) // 2) + 4)
    scale_and_zero = rows[:, :4].copy().view(np.float32).astype(np.float64)
    codes = rows[:, 4 : 4 + vocabulary]
    found = scale_and_zero[:, :1] * codes + scale_and_zero[:, 1:2]
    assert len(found) >= CONTEXT // 2 - 1
    return found, run


def divergence(base, other):
    """KL divergence of each token's distribution."""
    assert base.shape == other.shape
    return (np.exp(base) * (base - other)).sum(axis=1)


def cosine(base, other):
    """Of each token's logits, which are known up to a constant: less their mean."""
    a, b = (x - x.mean(axis=1, keepdims=True) for x in (base, other))
    return (a * b).sum(axis=1) / np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
