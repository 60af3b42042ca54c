"""What llama-server does to its cache, one operation at a time: `exact` against stock, and lossy schemes.

Each operation is a function that asks a server and makes sure that the operation really happened. With
`exact` the answers must be stock's, token by token; with lossy schemes they must come.
"""

import functools

import plugin_models as models
import pytest
from plugin_tools import server, text

# Stock kernels sum up values in f16, ours in f32. Among the tiny models' logits (deviation 3) that moves
# a token's log probability by less than this, and two tokens as near as this may change places.
TOLERANCE = 0.1
CONTEXT = ("-c", 4096)
# Bytes are tokens: without half characters, every token is text and has its place in the answer. The
# probabilities don't know of the bias, so all are asked for.
ASCII_ONLY = [[byte, False] for byte in range(256) if not 32 <= byte < 127]
COMPARED = {"n_probs": 258, "logit_bias": ASCII_ONLY}


def ask(s, prompt, tokens, **more):
    answer = s.complete(prompt, tokens=tokens, **COMPARED, **more)
    assert answer["tokens_predicted"] == tokens, answer
    return answer


def ask_for(s, prompt, reply, **more):
    """The answer can only be `reply`, so that all of it can be compared, however near two tokens are."""
    return ask(s, prompt, tokens=len(reply), grammar=f'root ::= "{reply}"', **more)


def drafted(s):
    # Drafted tokens come without their probabilities, so that a tie would not be known: few of them.
    answers = [ask(s, text(1, 700), tokens=24), ask(s, text(1, 700) + text(2, 60), tokens=24)]
    assert all(a["timings"].get("draft_n", 0) > 0 for a in answers), answers[0]["timings"]
    return answers


def looked_up(s):
    """The prompt repeats itself and the answer begins alike: drafts come from the prompt, the last of them wrong."""
    line = text(3, 90)
    answer = ask_for(s, line * 6 + line[:40], line[40:] + text(34, 46))
    timings = answer["timings"]
    assert 0 < timings.get("draft_n_accepted", 0) < timings["draft_n"], timings
    return [answer]


def cache_reused(s):
    """The middle of a cached prompt goes away; what follows it is shifted, not evaluated again."""
    head, middle, tail = text(4, 300), text(5, 200), text(6, 300)
    first = ask_for(s, head + middle + tail, text(14, 24))
    again = ask_for(s, head + tail, text(15, 24))
    assert again["timings"]["cache_n"] > len(head) + 200, again["timings"]
    return [first, again]


def shifted(s):
    answer = ask_for(s, text(7, 450), text(17, 500))
    assert answer["truncated"]
    return [answer]


def erased(s):
    """A slot is erased and asked again, while the other one keeps what it has."""
    in_other, in_erased = (text(8, 500), text(18, 24)), (text(9, 600), text(19, 24))
    other = ask_for(s, *in_other, id_slot=1)
    first = ask_for(s, *in_erased, id_slot=0)
    assert s.request("POST", "/slots/0?action=erase")[0] == 200
    again = ask_for(s, *in_erased, id_slot=0)
    assert again["timings"]["cache_n"] == 0, "the slot was not erased"
    other_again = ask_for(s, *in_other, id_slot=1)
    assert other_again["timings"]["prompt_n"] == 1, "the other slot was erased as well"
    return [other, first, again, other_again]


def swapped_out(s):
    """More conversations than slots: each is saved to host memory and comes back for its next turn."""
    prompts = [text(10 + i, 400) for i in range(3)]
    answers = []
    for turn in range(3):
        for i, prompt in enumerate(prompts):
            answer = ask_for(s, prompt, text(20 + i, 40))
            if turn > 0:
                assert answer["timings"]["prompt_n"] < 80, f"turn {turn} of {i}: {answer['timings']}"
            prompts[i] = prompt + answer["content"] + text(30 + i, 50)
            answers.append(answer)
    return answers


def with_grammar(s):
    answer = s.complete(text(30, 500), tokens=48, **COMPARED, ignore_eos=False,
                        grammar='root ::= ("ab" | "cd" | "x")+')
    left = answer["content"]
    for word in ("ab", "cd", "x"):
        left = left.replace(word, "")
    # The last word may have been cut off.
    assert left in ("", "a", "c") and answer["content"], answer["content"]
    return [answer]


def several_answers(s):
    body = {"prompt": text(31, 500), "n_predict": 32, "n_cmpl": 3, "temperature": 0,
            "ignore_eos": True, **COMPARED}
    status, answers = s.request("POST", "/completion", body)
    assert status == 200 and len(answers) == 3, answers
    return sorted(answers, key=lambda a: a["index"])


def embedded(s):
    status, answers = s.request("POST", "/embedding", {"content": [text(32, 300), text(33, 500)]})
    assert status == 200 and len(answers) == 2, answers
    return [a["embedding"][0] for a in answers]


DRAFT = ("--spec-type", "draft-simple", "--spec-draft-n-max", 6)
OPERATIONS = {
    # Its own model as the draft: everything is accepted. Another one: nearly all is rolled back.
    "draft model, accepted": (drafted, (*DRAFT, "-np", 1, "-md", "{model}")),
    "draft model, rejected": (drafted, (*DRAFT, "-np", 1, "-md", "{draft}")),
    "prompt lookup": (looked_up, ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", 3,
                                  "--spec-ngram-simple-size-m", 8, "-np", 1)),
    "cache reuse": (cache_reused, ("--cache-reuse", 32, "-np", 1)),
    "context shift": (shifted, ("--context-shift", "-c", 512, "-np", 1)),
    "slot erase": (erased, ("-np", 2, "--slot-save-path", "{folder}")),
    "slot erase, unified": (erased, ("-np", 2, "--kv-unified", "--slot-save-path", "{folder}",
                                     "--no-cache-idle-slots")),
    "conversations in turn, one slot": (swapped_out, ("-np", 1)),
    "conversations in turn, unified": (swapped_out, ("-np", 2, "--kv-unified")),
    "grammar": (with_grammar, ("-np", 1)),
    "several answers": (several_answers, ("-np", 3)),
    "several answers, unified": (several_answers, ("-np", 3, "--kv-unified")),
    "embeddings": (embedded, ("--embeddings", "--pooling", "mean", "-np", 1, "-b", 1024, "-ub", 1024)),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("operations")
    return {"model": models.llama(folder / "llama.gguf", layers=3),
            "draft": models.llama(folder / "draft.gguf", layers=1)}


def answers_of(operation, scheme, files, folder):
    operate, args = OPERATIONS[operation]
    args = [str(a).format(**files, folder=folder) for a in args]
    with server(folder, *CONTEXT, *args, scheme=scheme, model=files["model"]) as s:
        answers = operate(s)
    if scheme is not None:
        assert f"active: scheme {scheme}" in s.log_text()
        assert "NOT active" not in s.log_text()
    return answers


@pytest.fixture(scope="module")
def stock(files, tmp_path_factory):
    return functools.cache(lambda operation: answers_of(operation, None, files, tmp_path_factory.mktemp("stock")))


def assert_same_answer(one, other, tolerance=TOLERANCE):
    """Token by token, up to the first two that were as good as equal."""
    steps = list(zip(one["completion_probabilities"], other["completion_probabilities"], strict=True))
    for i, (a, b) in enumerate(steps):
        if a["id"] != b["id"]:
            both = [{t["id"]: t["logprob"] for t in x["top_logprobs"]} for x in (a, b)]
            gap = max(abs(top[a["id"]] - top[b["id"]]) for top in both)
            assert gap < tolerance, f"token {i} of {len(steps)}: {a['token']!r} and {b['token']!r}, {gap}"
            assert i >= len(steps) // 4, f"a tie at token {i}: nothing was compared"
            return
        assert a["logprob"] == pytest.approx(b["logprob"], abs=tolerance), f"token {i} of {len(steps)}"


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5


@pytest.mark.parametrize("operation", OPERATIONS)
def test_exact_equals_stock(tmp_path, files, stock, operation):
    ours, theirs = answers_of(operation, "exact", files, tmp_path), stock(operation)
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one, list):
            assert cosine(one, other) > 0.9999
        else:
            assert_same_answer(one, other)


def assert_same_answers(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert_same_answer(one, other)


@pytest.mark.parametrize("operation", ["prompt lookup", "conversations in turn, one slot",
                                       "conversations in turn, unified", "several answers, unified"])
@pytest.mark.parametrize("name", ["qwen35", "nemotron_h"])
def test_recurrent_state_goes_with_packed_rows(tmp_path, name, operation):
    """llama.cpp rolls it back, saves, restores and copies it, together with the rows of attention's layers."""
    files = {"model": models.write_model(name, tmp_path / f"{name}.gguf")}
    assert_same_answers(answers_of(operation, "exact", files, tmp_path), answers_of(operation, None, files, tmp_path))
    assert_same_answers(answers_of(operation, "int8,window=32", files, tmp_path),
                        answers_of(operation, "exact", files, tmp_path))


@pytest.mark.parametrize("operation", ["cache reuse", "context shift", "slot erase", "conversations in turn, unified",
                                       "several answers, unified"])
def test_latent_rows(tmp_path, operation):
    """Keys alone are stored, and a shift turns their channels behind those that are the values."""
    files = {"model": models.write_model("deepseek2", tmp_path / "deepseek2.gguf")}
    exact = answers_of(operation, "exact", files, tmp_path)
    assert_same_answers(exact, answers_of(operation, None, files, tmp_path))
    for one, other in zip(answers_of(operation, "int8,window=32", files, tmp_path), exact, strict=True):
        assert_same_answer(one, other, tolerance=0.5)
    assert answers_of(operation, "lowkv3", files, tmp_path)


@pytest.mark.parametrize("operation", ["cache reuse", "context shift"])
def test_moved_blocks_are_seen_where_they_are(tmp_path, files, stock, operation):
    """8 bits lose little, so that the answers are near stock's, and keys that were not moved would be far off."""
    ours, theirs = answers_of(operation, "int8,window=32", files, tmp_path), stock(operation)
    for one, other in zip(ours, theirs, strict=True):
        assert_same_answer(one, other, tolerance=0.5)


@pytest.mark.parametrize("scheme", ["lowkv2.8", "kivi2",
                                    "k=sorted-4211-head-2rows,v=token-3-head-normal-hadamard"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_lossy_scheme_answers(tmp_path, files, operation, scheme):
    assert answers_of(operation, scheme, files, tmp_path)
