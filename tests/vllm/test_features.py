"""What of vLLM goes beyond single greedy requests in one process, against vLLM's own cache."""

import random

import pytest
from conftest import run
from test_engine import difference, ids, mixed, prompt, scored


def test_samples_share_their_prompt(llama, tmp_path):
    """Drawn with the engine's seed: vLLM on the CPU fails with a request's own. It draws once for all requests of a
    step, so that samples are others where requests meet in other steps, with vLLM's own cache too."""
    rng = random.Random(11)
    jobs = [{"generate": [{"ids": prompt(rng, length), "sampling": {"max_tokens": 24, "n": 4, "temperature": 1.0}}
                          for length in (5, 128, 300, 600)]}]
    stock = run(llama, jobs, tmp_path, mib=48, waits=True)
    exact = run(llama, jobs, tmp_path, "exact", mib=48, waits=True)
    answers = [answer["all"] for answer in exact.results[0]]
    assert all(len(samples) == 4 and len({tuple(tokens) for tokens in samples}) > 1 for samples in answers)
    assert answers == [answer["all"] for answer in stock.results[0]]


def test_beams_share_their_beginning(smollm2, tmp_path):
    """To vLLM beams are requests with one prefix that end and begin. It wants a tokenizer for them."""
    rng = random.Random(14)
    jobs = [{"beams": [prompt(rng, 130), prompt(rng, 380)], "width": 3, "tokens": 12}]
    options = {"mib": 128, "max_logprobs": 8, "skip_tokenizer_init": False}
    stock = run(smollm2, jobs, tmp_path, **options)
    exact = run(smollm2, jobs, tmp_path, "exact", **options)
    assert exact.results == stock.results and [len(beams) for beams in exact.results[0]] == [3, 3]


def repetitive(seed):
    """Requests of a few phrases again and again: there are guesses at each step, nearly all of which are wrong."""
    rng = random.Random(seed)
    phrases = [prompt(rng, 9) for _ in range(6)]
    return [{"ids": [token for _ in range(count) for token in rng.choice(phrases)], "sampling": {"max_tokens": 150}}
            for count in (2, 13, 14, 15, 28, 60)]


def test_guesses_are_taken_back(llama, tmp_path):
    """Speculative decoding: rejected guesses were written into pages, some of which they have filled."""
    requests = repetitive(12)
    jobs = [{"generate": requests}, {"generate": scored(requests)}]
    guessing = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3,
                                       "prompt_lookup_min": 1}, "disable_log_stats": False}
    stock = run(llama, jobs, tmp_path, mib=48)
    counters = {"metrics": ["spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"]}
    exact = run(llama, [*jobs, counters], tmp_path, "exact", mib=48, **guessing)
    drafted, accepted = exact.results[2]
    print(f"{drafted} guesses, {accepted} accepted")
    assert drafted > accepted > 0
    assert ids(exact.results[:2]) == ids(stock.results)
    packed = run(llama, [*jobs, {"statistics": True}], tmp_path, "int8", mib=48, **guessing)
    assert difference(packed.results[1], stock.results[1]) < 0.03
    statistics = packed.results[2]
    assert statistics["reopened"] == statistics["replaced"] == 0


def test_layers_with_schemes_of_their_own(llama, tmp_path):
    """Each has pages of its own size: what fits is what their sum says, and what is lost lies between its ends."""
    asked = [{"generate": mixed(15)}, {"generate": scored(mixed(15)[:6])}]
    exact, packed, apart = (run(llama, asked, tmp_path, scheme, mib=48)
                            for scheme in ("exact", "lowkv2", "lowkv2,layer.0=exact,layer.2=lowkv4"))
    assert "lowkv: scheme lowkv2,layer.0=exact,layer.2=lowkv4, " in apart.log
    bytes_of = {name: 2 * 2 * 64 * bits / 8 for name, bits in (("exact", 32), ("lowkv2", 2.3), ("lowkv4", 4.3))}
    fits = 48 * (1 << 20) / sum(bytes_of.values())
    print(f"{apart.tokens} tokens fit, {fits:.0f} by the bits")
    assert exact.tokens < .5 * fits < .95 * fits < apart.tokens < 1.05 * fits < packed.tokens
    assert difference(apart.results[1], exact.results[1]) < .8 * difference(packed.results[1], exact.results[1])


def test_sliding_windows_in_some_layers(gemma, tmp_path):
    """vLLM keeps their pages apart from the others', and takes one size for all."""
    asked = [{"generate": mixed(16)}, {"generate": scored(mixed(16)[:6])}]
    stock = run(gemma, asked, tmp_path)
    exact = run(gemma, asked, tmp_path, "exact")
    assert exact.tokens == stock.tokens
    assert ids(exact.results) == ids(stock.results)
    packed = run(gemma, asked, tmp_path, "lowkv4")
    assert packed.tokens > 6 * stock.tokens
    assert difference(packed.results[1], stock.results[1]) < 0.1
    refused = run(gemma, asked, tmp_path, "lowkv4,layer.1=lowkv2", starts=False)
    assert "layers of different sizes are served in models whose layers all have a sliding window" in refused.log


def test_hybrid_models_are_refused_before_they_are_read(granite, tmp_path):
    refused = run(granite, [], tmp_path, "lowkv2.8", starts=False)
    assert "lowkv in vLLM: GraniteMoeHybridForCausalLM has layers that keep states" in refused.log
    assert "Starting to load model" not in refused.log


@pytest.mark.parametrize("name", ["bloom", "gpt_oss"])
def test_alibi_and_sink_logits(name, tmp_path, request):
    """With every page packed but for its sinks, these are attended to apart and joined."""
    model = request.getfixturevalue(name)
    asked = [{"generate": mixed(8)}, {"generate": scored(mixed(8)[:6])}]
    stock = run(model, asked, tmp_path, mib=32)
    exact = run(model, asked, tmp_path, "exact", mib=32)
    assert ids(exact.results) == ids(stock.results)
    packed = run(model, asked, tmp_path, "lowkv4,window=0", mib=32)
    assert packed.tokens > 5 * stock.tokens
    assert difference(packed.results[1], stock.results[1]) < 0.1


def test_two_processes_are_as_one(llama, tmp_path):
    """Tensor parallel. (With --pipeline-parallel-size 2 vLLM 0.32.0 fails on the CPU whatever its cache is.)"""
    asked = [{"generate": mixed(13)}, {"generate": scored(mixed(13)[:6])}]
    for scheme in ("exact", "lowkv2.8"):
        alone = run(llama, asked, tmp_path, scheme, mib=48)
        together = run(llama, asked, tmp_path, scheme, mib=24, tensor_parallel_size=2, cores="0|1")
        assert difference(together.results[1], alone.results[1]) < 1e-3
        if scheme == "exact":
            assert ids(together.results) == ids(alone.results)


def test_a_compiled_model(llama, tmp_path, monkeypatch):
    """By torch.compile, as vLLM does where it isn't told --enforce-eager."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    asked = [{"generate": mixed(17)}]
    stock = run(llama, asked, tmp_path, enforce_eager=False)
    packed = run(llama, asked, tmp_path, "exact", enforce_eager=False)
    assert ids(packed.results) == ids(stock.results)
    for said in ("Warming up model for the compilation", "saved AOT compiled function", "lowkv: scheme exact"):
        assert said in packed.log
