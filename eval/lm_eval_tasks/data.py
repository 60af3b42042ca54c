"""The data of lowkv's own lm-eval tasks, made from the handbook and a seed: nothing is downloaded."""

import random
import re
from pathlib import Path

import datasets
import paths
import retrieval_tasks

COUNT = 100  # documents of a task
PASSAGE = 6500  # characters, some 1,500 tokens
LINES = 80


def _handbook():
    return Path(paths.set_up_paths()["LOWKV_HANDBOOK_TEXT"]).read_text(encoding="utf-8")


def last_words(**_):
    text, rng, found = _handbook(), random.Random(1), []
    ends = [match for match in re.finditer(r" ([a-z]{6,})\.\s", text) if match.start() > PASSAGE]
    for match in rng.sample(ends, len(ends)):
        passage = text[match.start() - PASSAGE : match.start()]
        if match[1] in passage.split()[:-200]:  # long enough ago that it is packed
            found.append({"passage": passage, "word": match[1]})
    return {"test": datasets.Dataset.from_list(found[:COUNT])}


class _Words:
    """Retrieval tasks draw words that are two tokens each; without a tokenizer any will do."""

    def __init__(self, text):
        self.all = sorted(set(re.findall(r"\b[a-z]{5,9}\b", text)))

    def draw(self, rng, count):
        return rng.sample(self.all, count)


def codes(**_):
    words, found = _Words(_handbook()), []
    for number in range(COUNT):
        context = retrieval_tasks.codes(random.Random(number), words, "", lambda build: LINES)
        question, answer = context.asked[0]
        found.append({"text": context.text, "question": question, "answer": answer.strip()})
    return {"test": datasets.Dataset.from_list(found)}
