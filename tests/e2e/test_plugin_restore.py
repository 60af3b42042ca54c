"""States that llama-server saves and restores: a conversation goes on as if it had never been moved.

The model has f32 weights, so that with an exact cache nothing is lost at all, and what is lost with a packed
one is the scheme's own loss, or was lost by the restore.
"""

import math
import random
import re
import zlib

import plugin_models as models
import pytest
from plugin_tools import LOG_CELLS, server, text

SCHEME = "lowkv2"
# Of the scheme's own loss: what a restore may add.
TOLERANCE = 0.1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("restore")


@pytest.fixture(scope="module")
def tiny(folder):
    return models.llama(folder / "llama.gguf", layers=3)


@pytest.fixture(scope="module")
def sliding(folder):
    return models.gemma2(folder / "gemma2.gguf")


def ask(running, prompt, **more):
    """(distribution of the next token, tokens of the prompt that had to be run)"""
    # Sampled is an "a", for half a UTF-8 character would come without its probabilities. They are those before.
    answer = running.complete(prompt, tokens=1, n_probs=300, logit_bias=[["a", 100]], **more)
    top = answer["completion_probabilities"][0]["top_logprobs"]
    return {t["id"]: math.exp(t["logprob"]) for t in top}, answer["timings"]["prompt_n"]


def mean_kl(references, others):
    values = [sum(p * math.log(p / other[t]) for t, p in reference.items() if p > 0)
              for reference, other in zip(references, others, strict=True)]
    return sum(values) / len(values)


def slot(running, number, action):
    body = {"filename": "state.bin"} if action != "erase" else None
    status, answer = running.request("POST", f"/slots/{number}?action={action}", body)
    assert status == 200, answer


START, PIECE, TURNS = 1500, 60, 8


def converse(folder, model, scheme, conversations):
    """The distributions after each turn but the first, by conversation, in a server at its defaults."""
    found = {c: [] for c in conversations}
    with server(folder, "-c", 4096, "-lv", 4, scheme=scheme, model=model) as s:
        for turn in range(TURNS):
            for c in conversations:
                for more in range(4):
                    prompt = text(c, START + TURNS * PIECE)[:START + turn * PIECE + 5 * more]
                    distribution, ran = ask(s, prompt)
                    if turn > 0:
                        assert ran <= PIECE, "the conversation was not restored"
                        found[c].append(distribution)
        log = s.log_text()
    restores = len(re.findall("found better prompt", log))
    assert restores == (2 * (TURNS - 1) if len(conversations) > 1 else 0)
    return found


ROTATED = "k=token-2-head-normal-hadamard-mean,v=token-2-head-normal-hadamard-unbiased"


@pytest.mark.parametrize("model,scheme", [("tiny", SCHEME), ("sliding", SCHEME), ("tiny", ROTATED),
                                          ("sliding", ROTATED)])
def test_conversations_that_take_turns(folder, model, scheme, request):
    """llama-server saves the one that waits to the host's memory and restores it elsewhere. Sliding layers'
    caches are rings, whose newest tokens are anywhere; their rows come from a checkpoint."""
    path = request.getfixturevalue(model)
    exact, exact_turns = (converse(folder, path, "exact", c)[1] for c in ([1], [1, 2]))
    alone, turns = (converse(folder, path, scheme, c)[1] for c in ([1], [1, 2]))
    own = mean_kl(exact, alone)
    assert own > 100 * mean_kl(exact, exact_turns), "rounding hides what this test looks at"
    assert mean_kl(exact_turns, turns) < (1 + TOLERANCE) * own
    if scheme.startswith(ROTATED):  # sorted keys after a restore make statistics of their own: as good, but others
        assert mean_kl(alone, turns) < TOLERANCE * own


def through_a_file(folder, model, scheme, restarts):
    """The same conversation, its process ended and another one started before some of its turns."""
    prompt = text(9, START + TURNS * PIECE)
    args = ("-np", 1, "-c", 4096, "-cram", 0, "--slot-save-path", folder)
    found = []
    for run in range(restarts + 1):
        with server(folder, *args, scheme=scheme, model=model) as s:
            if run > 0:
                slot(s, 0, "restore")
            for end in range(START + PIECE * run, START + PIECE * (TURNS if run == restarts else run + 1), 10):
                distribution, ran = ask(s, prompt[:end])
                assert ran <= 10 or (run == 0 and not found), "the conversation was not restored"
                found.append(distribution)
            slot(s, 0, "save")
    return found[PIECE // 10:]


def test_slot_files_of_other_processes(folder, tiny):
    exact = through_a_file(folder, tiny, "exact", 0)
    assert mean_kl(exact, through_a_file(folder, tiny, "exact", 2)) < 1e-4
    never, restarted = (through_a_file(folder, tiny, SCHEME, n) for n in (0, 4))
    own = mean_kl(exact, never)
    assert own > 0.05
    assert mean_kl(exact, restarted) < (1 + TOLERANCE) * own


def test_slot_files_of_latent_rows(folder):
    """There are no values, so that all but the first layer's states are codes of keys."""
    model = models.write_model("deepseek2", folder / "deepseek2.gguf")
    never, restarted = (through_a_file(folder, model, "lowkv3", n) for n in (0, 4))
    exact = through_a_file(folder, model, "exact", 0)
    own = mean_kl(exact, never)
    assert own > 1e-4 and mean_kl(exact, restarted) < (1 + TOLERANCE) * own


def newer_below(folder, model, scheme):
    """A conversation's distributions with and without a restore, its newest tokens in the lowest cells."""
    prompt = text(3, 1300)
    args = ("-np", 2, "-c", 4096, "--kv-unified", "-cram", 0, "--slot-save-path", folder, *LOG_CELLS["args"])
    with server(folder, *args, scheme=scheme, model=model, env=LOG_CELLS["env"]) as s:

        def rolled_back():
            found = []
            for n in range(1290, 1190, -10):  # nothing is computed but the last token
                distribution, ran = ask(s, prompt[:n], id_slot=0)
                assert ran <= 1
                found.append(distribution)
            return found

        ask(s, text(4, 600), id_slot=1)
        ask(s, prompt[:1000], id_slot=0)
        slot(s, 1, "erase")
        for n in range(1200, 1300, 10):
            ask(s, prompt[:n], id_slot=0)
        positions = s.positions_by_cell()
        assert positions.index(1000) < positions.index(0), "the newest tokens are not in lower cells"
        slot(s, 0, "save")
        without = rolled_back()
        slot(s, 0, "erase")
        slot(s, 0, "restore")
        return without, rolled_back()


def test_newer_tokens_in_lower_cells(folder, tiny):
    exact, exact_after = newer_below(folder, tiny, "exact")
    assert mean_kl(exact, exact_after) < 1e-4
    before, after = newer_below(folder, tiny, SCHEME)
    own = mean_kl(exact, before)
    assert own > 0.05
    assert mean_kl(before, after) < TOLERANCE * own


def exact_cells_at_the_end(folder, model, restores):
    args = ("-np", 2, "-c", 8192, "--kv-unified", "-cram", 0, "--slot-save-path", folder)
    with server(folder, *args, scheme=SCHEME, model=model, env={"LOWKV_VERBOSE": "1"}) as s:
        ask(s, text(6, 800), id_slot=0)
        slot(s, 0, "save")
        ask(s, text(7, 800), id_slot=1)
        for _ in range(restores):
            slot(s, 0, "restore")
        # As many tokens as make every block idle that nobody writes: its turn has come long since.
        ask(s, text(6, 800) + text(8, 3000), id_slot=0)
        ask(s, text(6, 800) + text(8, 3010), id_slot=0)
        log = s.log
    return int(re.search(r"cache freed: .*cells packed \d+, exact (\d+)", log.read_text()).group(1))


def test_restored_rows_leave_nothing_exact_for_ever(folder, tiny):
    """They make the window of a conversation that waits idle, and somebody has to pack it."""
    assert exact_cells_at_the_end(folder, tiny, 5) <= exact_cells_at_the_end(folder, tiny, 0) + 32


def test_another_schemes_state_is_refused_and_the_others_go_on(folder, tiny):
    args = ("-np", 2, "-c", 4096, "-cram", 0, "--slot-save-path", folder)
    prompt = text(5, 900)
    with server(folder, *args, scheme=SCHEME, model=tiny) as s:
        ask(s, prompt, id_slot=0)
        slot(s, 0, "save")
    with server(folder, *args, scheme="kivi2", model=tiny) as s:
        ask(s, text(4, 600), id_slot=1)
        before, _ = ask(s, text(4, 600), id_slot=1)  # the last token alone: all others are packed by now
        slot(s, 0, "restore")
        body = {"prompt": prompt + "more", "n_predict": 1, "id_slot": 0, "cache_prompt": True}
        status, answer = s.request("POST", "/completion", body)
        assert status == 500, answer
        assert "a state was restored that another scheme than kivi2 had saved" in s.log_text()
        after, ran = ask(s, text(4, 600), id_slot=1)
        assert ran == 1 and before == pytest.approx(after, abs=1e-6)
        slot(s, 0, "erase")
        ask(s, prompt, id_slot=0)


def test_states_of_stock_and_for_stock(folder, tiny):
    """Ours takes stock's; stock takes those that ours saves with LOWKV_STATES=f16."""
    args = ("-np", 1, "-c", 4096, "-cram", 0, "--slot-save-path", folder)
    prompt = text(6, 900)
    found = {}
    for scheme, action in ((None, "save"), ("lowkv4", "restore"), ("lowkv4", "save"), (None, "restore")):
        with server(folder, *args, scheme=scheme, model=tiny, env={"LOWKV_STATES": "f16"}) as s:
            if action == "restore":
                slot(s, 0, "restore")
            found[scheme, action], ran = ask(s, prompt, id_slot=0)
            assert ran <= 1 or action == "save"
            if action == "save":
                slot(s, 0, "save")
    stock = found[None, "save"]
    for other in found.values():
        assert mean_kl([stock], [other]) < 0.05


def test_stock_does_not_take_codes_for_numbers(folder, tiny):
    args = ("-np", 1, "-c", 4096, "-cram", 0, "--slot-save-path", folder)
    prompt = text(6, 900)
    with server(folder, *args, scheme="lowkv4", model=tiny) as s:
        ask(s, prompt, id_slot=0)
        slot(s, 0, "save")
    with server(folder, *args, scheme=None, model=tiny) as s:
        slot(s, 0, "restore")
        answer = s.complete(prompt, tokens=1, n_probs=3, id_slot=0)
    # Not a number has no logarithm, and comes as null.
    assert all(t["logprob"] is None for t in answer["completion_probabilities"][0]["top_logprobs"])


@pytest.mark.parametrize("scheme", ["lowkv2.8", SCHEME, "kivi2", "turboquant3"])
def test_a_state_is_small_and_loses_nothing(folder, tiny, scheme):
    """Whatever is saved and restored, the next answer is the one without, and the file compresses to the codes."""
    args = ("-np", 1, "-c", 4096, "-cram", 0, "--slot-save-path", folder)
    prompt = text(6, 2500)
    with server(folder, *args, scheme=scheme, model=tiny) as s:
        ask(s, prompt, id_slot=0)
        straight, _ = ask(s, prompt[:-40], id_slot=0)
        slot(s, 0, "save")
        first = (folder / "state.bin").read_bytes()
    with server(folder, *args, scheme=scheme, model=tiny, env={"LOWKV_VERBOSE": "1"}) as s:
        slot(s, 0, "restore")
        slot(s, 0, "save")
        again = (folder / "state.bin").read_bytes()
        restored, ran = ask(s, prompt[:-40], id_slot=0)
        assert ran <= 1
        log = s.log
    assert "restored cells packed again 0" in log.read_text()
    assert len(again) == len(first) and sum(a != b for a, b in zip(first, again, strict=True)) < len(first) / 500
    assert mean_kl([straight], [restored]) < 1e-4
    assert len(zlib.compress(first, 1)) < 0.45 * len(first)


@pytest.mark.parametrize("states", ["packed", "f16"])
def test_a_damaged_slot_file_gives_no_other_answer(folder, tiny, states):
    """One bit of its keys and values, where it is not zero: zeros are behind codes."""
    args = ("-np", 1, "-c", 4096, "-cram", 0, "--slot-save-path", folder)
    file, tokens, source = folder / "state.bin", 700, random.Random(3)
    with server(folder, *args, scheme="lowkv2.8", model=tiny, env={"LOWKV_STATES": states}) as s:
        ask(s, text(6, tokens))
        slot(s, 0, "save")
        good = file.read_bytes()
        head = 256 + 32 * tokens  # llama.cpp's own, which nobody checks
        refused = 0
        for flip in range(25):
            at = source.randrange(head, len(good))
            while good[at] == 0:
                at = source.randrange(head, len(good))
            damaged = bytearray(good)
            damaged[at] ^= 1 << source.randrange(8) if flip > 0 else 0
            file.write_bytes(damaged)
            s.request("POST", "/slots/0?action=erase")
            s.request("POST", "/slots/0?action=restore", {"filename": file.name})
            body = {"prompt": text(6, tokens) + "m", "n_predict": 1, "n_probs": 300, "logit_bias": [["a", 100]],
                    "temperature": 0, "cache_prompt": True}
            status, answer = s.request("POST", "/completion", body)
            if status != 200:
                refused += 1
                continue
            top = answer["completion_probabilities"][0]["top_logprobs"]
            found = {t["id"]: math.exp(t["logprob"]) for t in top}
            if flip == 0:
                assert answer["timings"]["prompt_n"] <= 2, "the conversation was not restored"
                right = found
            if answer["timings"]["prompt_n"] <= 2:  # else llama.cpp itself has refused the file
                assert found == pytest.approx(right, abs=1e-4), (at, good[at], damaged[at])
        assert refused > 15
