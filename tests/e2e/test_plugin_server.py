"""The plug-in in stock llama-server: slots, shared prefixes, cancelled requests, saved state."""

import concurrent.futures

import plugin_models as models
import pytest
from plugin_tools import server, text


@pytest.fixture(scope="module")
def sliding(tmp_path_factory):
    return models.gemma2(tmp_path_factory.mktemp("sliding") / "gemma2.gguf")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return models.llama(tmp_path_factory.mktemp("tiny") / "llama.gguf", layers=3)


@pytest.mark.long
@pytest.mark.parametrize("unified", ["--kv-unified", "--no-kv-unified"])
@pytest.mark.parametrize("model, scheme", [("tiny", "kivi2"), ("sliding", "lowkv2.8")])
def test_soak(tmp_path, model, scheme, unified, request):
    """100 requests and more, of mixed length, from 8 clients on 4 slots, every tenth cancelled."""
    args = ("-np", 4, "-c", 8192, unified, "-cram", 0)
    path = request.getfixturevalue(model)
    with server(tmp_path, *args, scheme=scheme, model=path, env={"LOWKV_VERBOSE": "1"}) as s:
        prefixes = [text(p, 600) for p in range(3)]

        def one(i):
            prompt = prefixes[i % 3] + text(1000 + i, 20 + 37 * i % 400)
            if i % 10 == 7:
                s.cancel_early(prompt, 200)
                return
            answer = s.complete(prompt, tokens=8 + i % 50)
            assert answer["tokens_predicted"] == 8 + i % 50

        def round_of(numbers):
            with concurrent.futures.ThreadPoolExecutor(8) as clients:
                list(clients.map(one, numbers))
            return s.memory_kib()

        # How many slots happen to be full at once sets a new peak now and then, and malloc's arenas keep it:
        # memory settles in one of these rounds, where a leak grows in all of them.
        memory = [round_of(range(40)), round_of(range(40, 70))]
        for first in range(70, 190, 30):
            memory.append(round_of(range(first, first + 30)))
            if memory[-1] < memory[-2] * 1.05 + 2048:
                break
        else:
            pytest.fail(f"memory grows in every round: {memory} KiB")
        s.request("GET", "/health")
    assert f"active: scheme {scheme}" in s.log_text()
    assert "NOT active" not in s.log_text()


@pytest.mark.parametrize("unified", ["--kv-unified", "--no-kv-unified"])
def test_saved_slot_continues_alike(tmp_path, tiny, unified):
    args = ("-np", 2, "-c", 4096, unified, "--slot-save-path", tmp_path, "-cram", 0)
    with server(tmp_path, *args, scheme="exact", model=tiny) as s:
        prompt = text(5, 700)
        first = s.complete(prompt, tokens=24, id_slot=0)
        again = s.complete(prompt, tokens=24, id_slot=0)
        assert again["timings"]["prompt_n"] == 1
        assert s.request("POST", "/slots/0?action=save", {"filename": "state.bin"})[0] == 200
        assert s.request("POST", "/slots/0?action=erase")[0] == 200
        s.complete(text(6, 300), tokens=4, id_slot=0)
        assert s.request("POST", "/slots/0?action=erase")[0] == 200
        assert s.request("POST", "/slots/1?action=restore", {"filename": "state.bin"})[0] == 200
        back = s.complete(prompt, tokens=24, id_slot=1)
        assert back["timings"]["prompt_n"] <= 2, "the restored state was not used"
        assert back["content"] == again["content"]
        assert len(first["content"]) > 0


@pytest.mark.parametrize("unified", ["--kv-unified", "--no-kv-unified"])
def test_saved_packed_slot_is_used(tmp_path, tiny, unified):
    args = ("-np", 2, "-c", 4096, unified, "--slot-save-path", tmp_path, "-cram", 0)
    with server(tmp_path, *args, scheme="int8", model=tiny) as s:
        prompt = text(5, 700)
        s.complete(prompt, tokens=1, id_slot=0)
        again = s.complete(prompt, tokens=1, id_slot=0, n_probs=5)
        assert s.request("POST", "/slots/0?action=save", {"filename": "state.bin"})[0] == 200
        assert s.request("POST", "/slots/1?action=restore", {"filename": "state.bin"})[0] == 200
        back = s.complete(prompt, tokens=1, id_slot=1, n_probs=5)
        assert back["timings"]["prompt_n"] <= 2, "the restored state was not used"

        def top(answer):
            return {c["id"]: c["logprob"]
                    for c in answer["completion_probabilities"][0]["top_logprobs"]}

        before, after = top(again), top(back)
        common = before.keys() & after.keys()
        assert len(common) >= 4
        assert max(abs(before[t] - after[t]) for t in common) < 0.3


def test_rolled_back_prompt_equals_a_fresh_one(tmp_path, tiny):
    """Prompt reuse: the tail of a cached prompt is dropped and written again."""
    args = ("-np", 1, "-c", 2048, "-cram", 0, "--slot-save-path", tmp_path)
    with server(tmp_path, *args, scheme="exact", model=tiny) as s:
        head, tail_a, tail_b = text(1, 400), text(2, 90), text(3, 90)
        s.complete(head + tail_a, tokens=40)
        reused = s.complete(head + tail_b, tokens=20, n_probs=3)
        assert reused["timings"]["prompt_n"] < 200
        s.request("POST", "/slots/0?action=erase")
        fresh = s.complete(head + tail_b, tokens=20, n_probs=3)

        def first(answer):
            return answer["completion_probabilities"][0]["top_logprobs"][0]

        assert first(reused)["id"] == first(fresh)["id"]
        assert first(reused)["logprob"] == pytest.approx(first(fresh)["logprob"], abs=0.02)


@pytest.mark.parametrize("unified", ["--kv-unified", "--no-kv-unified"])
def test_several_answers_to_one_prompt(tmp_path, tiny, unified):
    """One prompt is evaluated once and its cells are copied, also from stream to stream."""
    args = ("-np", 3, "-c", 6144, unified, "-cram", 0)
    with server(tmp_path, *args, scheme="kivi2", model=tiny) as s:
        alone = s.complete(text(9, 500), tokens=1)
        body = {"prompt": text(9, 500), "n_predict": 40, "n_cmpl": 3, "temperature": 0,
                "ignore_eos": True, "cache_prompt": False}
        status, answers = s.request("POST", "/completion", body)
        assert status == 200 and len(answers) == 3
        assert all(a["content"].startswith(alone["content"][:1]) for a in answers)
