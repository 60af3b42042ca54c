"""eval/mla.py: SmolLM2's rows in MLA's form are the same rows."""

import mla
import numpy as np
import pytest

SHAPE = mla.Shape(heads=6, kv_heads=3, channels=32, theta=10_000.0)
TOKENS = 40


@pytest.fixture(params=mla.BASES)
def layer(request):
    """(queries, keys, values, basis)."""
    random = np.random.default_rng(3)
    queries, keys, values = (random.normal(size=(heads, TOKENS, SHAPE.channels)).astype(np.float32) * size
                             for heads, size in ((6, 2), (3, 5), (3, 0.3)))
    rows = (2 + random.normal(size=(200, SHAPE.latent))) * np.linspace(0.1, 3, SHAPE.latent)
    return queries, keys, values, mla.Basis(request.param, rows, SHAPE.slow_keys, layer=1)


@pytest.mark.parametrize("form", ["heads", *mla.COPIES])
def test_unquantized_rows_come_back(layer, form):
    queries, keys, values, basis = layer
    found = mla.stored(keys, values, queries, f"{form}:f16", SHAPE, basis, 0)
    np.testing.assert_allclose(found[0], keys, atol=2e-4)
    np.testing.assert_allclose(found[1], values, atol=2e-5)


def test_scores_of_latents_are_those_of_keys(layer):
    """At a key's own position, where RoPE turns query and key alike."""
    queries, keys, values, basis = layer
    rows = np.concatenate((mla.side_by_side(keys[..., SHAPE.slow]), mla.side_by_side(values)), 1)
    of_latents = basis.queries(SHAPE.whole_queries(queries, SHAPE.slow)) * basis.latents(rows)
    apart = mla.side_by_side(SHAPE.turned(keys)[..., SHAPE.fast])
    of_apart = SHAPE.whole_queries(SHAPE.turned(queries), SHAPE.fast) * apart
    expected = (queries * keys.repeat(2, 0)).sum(-1) - SHAPE.whole_queries(
        queries, SHAPE.slow) @ basis.mean[: SHAPE.slow_keys]
    np.testing.assert_allclose(of_latents.sum(-1) + of_apart.sum(-1), expected, atol=2e-3)


def test_latents_have_one_scale_for_keys_and_values(layer):
    *_, basis = layer
    rows = np.random.default_rng(4).normal(size=(300, SHAPE.latent)) * basis.scales
    assert .8 < basis.latents(rows).std(0).min() < basis.latents(rows).std(0).max() < 1.2


def test_rope_turns_pairs_by_their_position():
    row = np.zeros((1, 3, 32), np.float32)
    row[..., 0] = 1
    turned = SHAPE.turned(row)
    np.testing.assert_allclose(turned[0, 2, [0, 16]], [np.cos(2), np.sin(2)], atol=1e-6)


def test_ways_and_their_bits():
    assert mla.split_way("lowkv3") == ("heads", "lowkv3", "lowkv3")
    assert mla.split_way("two:lowkv2") == ("two", "lowkv2", "lowkv2")
    assert mla.split_way("one-v:q8_0:f16") == ("one-v", "q8_0", "f16")
    apart = SHAPE.apart / (SHAPE.apart + SHAPE.latent)
    assert mla.bits_of("one-v:q8_0:f16", SHAPE) == pytest.approx(8.5 * (1 - apart) + 16 * apart)
    assert mla.bits_of("two:q4_0", SHAPE) == pytest.approx(9 * (1 - apart) + 4.5 * apart)


def test_table_has_means_over_windows_and_the_columns_that_were_measured():
    figures = [{"newest": newest, "window": window, "basis": basis, "way": way, "bits": 3.0, "kld": kld, "same": .9}
               for newest, window, basis, way, kld in (
                   (128, 0, "principal", "one-v:lowkv3", .5), (0, 0, "random", "one-v:lowkv3", .7),
                   (128, 0, "", "lowkv3", .1), (128, 1, "", "lowkv3", .3))]
    assert mla.table(figures).splitlines() == [
        "| way | bits | random, 0 newest | principal, 128 newest |", "|---|--:|--:|--:|",
        "| `lowkv3` | 3.00 | - | 0.2000, 90 % |",
        "| `one-v:lowkv3` | 3.00 | 0.7000, 90 % | 0.5000, 90 % |"]
