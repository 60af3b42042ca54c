"""What eval/retrieval.py asks: long contexts, each with many questions and their answers.

After RULER (Hsieh et al., 2024: needles with several keys, values and queries, variable tracking, key-value retrieval)
and the shuffled codes of lowkv's own study. All text is made here, from the texts of the set-up and a seed. RULER's
common words are missing: their answer is a set, and what is scored here is one text."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Context:
    text: str
    asked: list[tuple[str, str]]  # a question, which follows the text, and its answer


class Words:
    """Lower-case words of a text, each of them two tokens of a model, so that questions have equal lengths."""

    def __init__(self, text: str, tokenizer):
        found = sorted(set(re.findall(r"\b[a-z]{5,9}\b", text)))
        tokens = tokenizer([" " + word for word in found], add_special_tokens=False)["input_ids"]
        self.all = [word for word, ids in zip(found, tokens, strict=True) if len(ids) == 2]

    def draw(self, rng: random.Random, count: int) -> list[str]:
        return rng.sample(self.all, count)


def number(rng: random.Random, digits: int = 7) -> str:
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def codes(rng, words, prose, fits) -> Context:
    """Lines "The code of the X is NNNNN.", then asked for in another order."""
    count = fits(lambda n: "".join(f"The code of the {word} is 12345.\n" for word in words.all[:n]))
    table = {word: number(rng, 5) for word in words.draw(rng, count)}
    text = "".join(f"The code of the {word} is {code}.\n" for word, code in table.items())
    return Context(text, [(f"The code of the {word} is", f" {table[word]}") for word in rng.sample(list(table), count)])


def spread(rng, prose, fits, needles: list[str]) -> str:
    """Prose with these sentences between its lines, spread evenly."""
    start, sentences = rng.randrange(len(prose)), "\n".join(needles)
    prose = prose[start:] + prose[:start]  # how many tokens its letters are differs from place to place
    lines = prose[: fits(lambda n: sentences + prose[:n])].split("\n")
    for i, needle in enumerate(needles):
        lines.insert((i + 1) * len(lines) // (len(needles) + 1), needle)
    return "\n".join(lines) + "\n\n"


def _magic(key: str, value: str) -> str:
    return f"One of the special magic numbers for {key} is: {value}."


def multi_key(rng, words, prose, fits) -> Context:
    """Sixteen keys with a number each between prose; each is asked for."""
    table = {key: number(rng) for key in words.draw(rng, 16)}
    text = spread(rng, prose, fits, [_magic(*item) for item in table.items()])
    return Context(text, [(f"The special magic number for {key} mentioned in the text is:", f" {value}")
                          for key, value in table.items()])


def multi_value(rng, words, prose, fits) -> Context:
    """Eight keys with two numbers each, in the order in which they stand."""
    table = [(key, number(rng)) for key in words.draw(rng, 8) * 2]
    text = spread(rng, prose, fits, [_magic(*item) for item in table])
    values = {key: [v for k, v in table if k == key] for key, _ in table}
    return Context(text, [(f"The special magic numbers for {key} mentioned in the text are:", f" {a}, {b}")
                          for key, (a, b) in values.items()])


def multi_query(rng, words, prose, fits) -> Context:
    """Sixteen keys with a number each; two are asked for at once."""
    table = {key: number(rng) for key in words.draw(rng, 16)}
    text = spread(rng, prose, fits, [_magic(*item) for item in table.items()])
    pairs = [rng.sample(list(table), 2) for _ in range(16)]
    return Context(text, [(f"The special magic numbers for {a} and {b} mentioned in the text are:",
                           f" {table[a]} and {table[b]}") for a, b in pairs])


def variables(rng, words, prose, fits) -> Context:
    """Twelve chains of three variables: what is the last one's value?"""
    names = iter(rng.sample([a + b + c for a in "ABCDEFGH" for b in "KLMNPQRS" for c in "TUVWXYZ"], 36))
    chains = [([next(names) for _ in range(3)], number(rng, 5)) for _ in range(12)]
    needles = [f"VAR {chain[0]} = {value}" for chain, value in chains]
    for step in (1, 2):
        needles += [f"VAR {chain[step]} = VAR {chain[step - 1]}" for chain, _ in chains]
    text = spread(rng, prose, fits, needles)
    return Context(text, [(f"The value of VAR {chain[0]} is 12345.\nThe value of VAR {chain[2]} is", f" {value}")
                          for chain, value in chains])


def key_value(rng, words, prose, fits) -> Context:
    """A JSON object of hexadecimal keys and values; sixteen of them are asked for."""
    def draw():
        return f"{rng.getrandbits(32):08x}"

    count = fits(lambda n: ", ".join('"0a1b2c3d": "4e5f6071"' for _ in range(n)))
    table = {draw(): draw() for _ in range(count)}
    text = "{" + ",\n".join(f'"{key}": "{value}"' for key, value in table.items()) + "}\n\n"
    return Context(text, [(f'The value of the key "{key}" is "', table[key])
                          for key in rng.sample(list(table), min(16, count))])


TASKS: dict[str, Callable] = {
    "codes": codes,
    "multi-key": multi_key,
    "multi-value": multi_value,
    "multi-query": multi_query,
    "variables": variables,
    "key-value": key_value,
}
