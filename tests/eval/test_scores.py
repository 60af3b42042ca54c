"""How the scripts of eval/ count answers and word what is lost."""

import random

import dialogue
import drift
import lm_eval_lowkv
import numpy as np
import passkey
import predictions
import reasoning
import retrieval
import retrieval_tasks
import what_you_lose


def row(scheme, length, trial, depth, right):
    return {"model": "m", "scheme": scheme, "length": str(length), "trial": str(trial), "depth": str(depth),
            "right": str(right)}


ROWS = [row("exact", 2048, 0, 10, 1), row("exact", 2048, 0, 20, 1), row("exact", 2048, 0, 30, 0),
        row("lowkv2", 2048, 0, 10, 1), row("lowkv2", 2048, 0, 20, 0), row("lowkv2", 2048, 0, 30, 1),
        row("lowkv2", 8192, 0, 10, 1)]


def test_kept_pass_keys_are_those_that_exact_finds():
    found = passkey.shares(ROWS)
    assert found["m", 2048, "exact"] == (2 / 3, 3, 1.0)
    assert found["m", 2048, "lowkv2"] == (2 / 3, 3, 0.5)
    assert found["m", 8192, "lowkv2"] == (1.0, 1, None)  # exact was not asked
    line = passkey.table(found).splitlines()[-1]
    assert line == "| m, lowkv2 | 67 % ± 54 of 3; kept 50 % | 100 % ± 0 of 1 |"
    assert what_you_lose.keys_lost(ROWS, "m", "lowkv2") is None  # too few were asked


def test_lost_pass_keys_are_counted_over_all_lengths():
    asked = [(length, trial) for length in (2048, 8192) for trial in range(20)]
    rows = [row("exact", length, trial, 10, int(trial < 10)) for length, trial in asked]
    rows += [row("lowkv2", length, trial, 10, int(length == 8192 or trial >= 5)) for length, trial in asked]
    assert what_you_lose.keys_lost(rows, "m", "lowkv2") == .25  # 5 of the 20 that exact finds
    assert what_you_lose.keys_lost(rows, "n", "lowkv2") is None


def fits_characters(budget):
    return lambda build: next(n for n in range(budget, 0, -1) if len(build(n)) <= budget)


PROSE = "".join(f"This is line {i} of the filler text.\n" for i in range(1000))


def test_numbers_stand_in_the_text_in_the_order_of_their_depths():
    text, asked = passkey.context(PROSE, fits_characters(6000), random.Random(1))
    facts = {question: fact for fact, question in passkey.FACTS}
    assert len(asked) == len(passkey.DEPTHS) == len(facts)
    for depth, (question, key) in zip(passkey.DEPTHS, asked, strict=True):
        sentence = facts[question].format(key, key)
        assert text.count(sentence) == 1
        assert abs(100 * text.index(sentence) / len(text) - depth) < 5
    again, _ = passkey.context(PROSE, fits_characters(6000), random.Random(1))
    assert text == again


ITEMS = [{"question": f"What is {i}\nplus 0?", "answer": str(i)} for i in range(200)]


def test_solved_examples_fill_the_length_and_none_of_them_is_asked():
    made = reasoning.context([{"question": "Long?", "answer": "x" * 100}, *ITEMS], 400, lambda text: len(text.split()))
    assert 400 - 10 < len(made.text.split()) <= 400
    assert made.text.startswith("Question: What is 32 plus 0?\nAnswer: 32\n\n")
    assert len(made.asked) == reasoning.QUESTIONS
    assert made.asked[0] == ("Question: What is 0 plus 0?\nAnswer:", " 0\n")
    assert not any(question in made.text for question, _ in made.asked)


def test_the_share_kept_is_counted_question_by_question():
    common = {"model": "m", "length": "2048", "task": "codes", "context": "0", "tokens": "8", "library": "l"}
    rows = [common | {"scheme": "exact", "token_hits": "8", "right": "1110"},
            common | {"scheme": "lowkv2", "token_hits": "6", "right": "1001"}]
    assert "| lowkv2 | 50 ± 50 (33; 75.0) |" in retrieval.table(rows)
    assert what_you_lose.codes_lost(rows, "lowkv2") == 2 / 3
    assert what_you_lose.codes_lost(rows, "kivi2") is None


def test_every_retrieval_task_asks_for_what_its_text_says():
    class Words:
        all = tuple(f"word{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(600))

        def draw(self, rng, count):
            return rng.sample(self.all, count)

    for name, task in retrieval_tasks.TASKS.items():
        made = task(random.Random(name), Words(), PROSE, fits_characters(8000))
        assert made.asked, name
        for _, answer in made.asked:
            assert all(part in made.text for part in answer.replace(",", "").replace(" and ", " ").split()), name


def test_a_fitter_finds_the_largest_size():
    class Reader:
        def ids(self, text):
            return text.split()

    assert retrieval.fitter(Reader(), 37)(lambda n: "a " * n) == 37


def test_repeats_and_first_differences():
    assert drift.differs([1, 2, 3], [1, 2, 4]) == 2 and drift.differs([1, 2], [1, 2]) == 2
    assert drift.repeated(list(range(20))) == 0 and drift.repeated([1] * 20) == 1 - 1 / 13


def test_lm_evals_figures():
    found = {"alias": "gsm8k", "exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": 0.1,
             "perplexity,none": 12.5, "perplexity_stderr,none": "N/A"}
    assert lm_eval_lowkv.figures(found) == {"exact_match (strict-match)": (0.25, 0.1), "perplexity": (12.5, "")}
    rows = [{"model": "m", "task": "t", "fewshot": "5", "limit": "", "chunk": "128", "scheme": scheme, "metric": "acc",
             "value": value, "error": "0.01", "questions": "100"}
            for scheme, value in (("exact", "0.5"), ("lowkv2", "0.4"))]
    assert lm_eval_lowkv.table(rows).splitlines()[-1] == "| m, t, 5 shots, acc | 100 | 0.500 ± 0.010 | 0.400 ± 0.010 |"


def test_words_follow_from_figures():
    assert what_you_lose.divergence(0.0009) == "nothing (0.0009)"
    assert what_you_lose.divergence(0.0082) == "a little (0.0082)"
    assert what_you_lose.divergence(3) == "much (3.0000)"
    assert what_you_lose.lost(0.0) == "nothing (0 %)" and what_you_lose.lost(1.0) == "much (100 %)"
    assert what_you_lose.lost(None) == what_you_lose.divergence(None) == "not measured"
    assert "| something / a part | 0.06 | 40 % |" in what_you_lose.legend()


def test_long_answers_are_judged_by_the_last_quarter_of_the_longest():
    rows = [{"scheme": "lowkv2", "mode": "forced", "answer": n,
             "figures": f'{{"kld": [[0, 0, 0, {kld}], [0, 0, 0, 3]]}}'}
            for n, kld in (("500", 9), ("2000", 1))]
    assert what_you_lose.last_quarter(rows, "lowkv2") == 2
    assert what_you_lose.last_quarter(rows, "kivi2") is None


def test_dialogue_is_read_exchange_by_exchange():
    page = "categories:\n- x\nconversations:\n- - Hello\n  - 'Hi: there'\n  - Bye\n- - Who?\n  - |\n    me\n"
    assert dialogue.exchanges(page)[0] == ["Hello", "Hi: there", "Bye"]


def test_predictions_are_set_against_those_of_the_same_positions(tmp_path):
    shares = np.array([[.5, .25, .25], [.5, .25, .25], [1 / 3, 1 / 3, 1 / 3]], np.float32)
    reference = predictions.Predictions(tmp_path / "f32", True)
    for part in np.split(np.log(shares), [0, 1]):
        reference.take(part)
    others = predictions.Predictions(tmp_path / "f32", False)
    others.take(np.log(np.array([[.25, .5, .25], [.5, .25, .25]], np.float32)))
    others.take(np.log(np.array([[.5, .25, .25]], np.float32)))
    told = others.told()
    assert told["same"] == 2
    assert np.allclose(told["kld"], [.25 * np.log(2), 0, (np.log(2 / 3) + 2 * np.log(4 / 3)) / 3], atol=1e-6)
    assert reference.told() == {"kld": [], "same": 0}


def test_windows_follow_each_other():
    def tokenizer(text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": list(text)}

    assert predictions.windows(tokenizer, "abcdefgh" * 100, 2, 3) == [list("abc"), list("def")]
