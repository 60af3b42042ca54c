#!/usr/bin/env python3
"""Small tasks of reasoning-gym, many solved ones in the prompt: how many does a packed cache still solve?

    python3 deps/setup.py reasoning-gym               once
    eval/reasoning.py                                 after `make package`; goes on where it was stopped
    eval/reasoning.py --tasks leg_counting,gcd --schemes exact,lowkv2 --contexts 2
    eval/reasoning.py --tasks gcd,lcm,aiw --schemes exact --contexts 1 --out build/reasoning    can the model do these?
    eval/reasoning.py -m gemma.gguf                   another model
    eval/reasoning.py --redraw                        the table again, nothing measured

A context is solved examples of one task up to --lengths tokens, so that nearly all of them are packed; its 32 questions
are further examples without their answers. How they are read and scored: eval/retrieval.py. An answer counts where
greedy decoding would write it and end the line. That is reasoning-gym's own score of 1 for the tasks used unasked: they
have one right answer; of tasks with several, only the one that reasoning-gym made counts.

Writes OUT/reasoning.csv."""

import sys

import retrieval
from retrieval_tasks import Context

# What SmolLM2 solves of 32 after 600 tokens of examples with the exact cache: 13, 14 and 21 (of which half by chance).
# Of aiw, chain_sum, family_relationships, leg_counting, number_filtering, number_format, sentence_reordering,
# spell_backward and word_sequence_reversal it solves 0 to 3.
TASKS = ["gcd", "letter_counting", "syllogism"]
QUESTIONS = 32
SHORT = 60  # characters of an answer: longer ones are texts, which no small model gets right


def solved(item):
    return f"{asked(item)} {item['answer']}\n\n"


def asked(item):
    return f"Question: {' '.join(item['question'].split())}\nAnswer:"


def legal():
    import reasoning_gym.factory

    return sorted(reasoning_gym.factory.DATASETS)


def context(items, length, tokens):
    """Solved examples up to `length` tokens, counted by tokens(text), and what is asked after them. Items whose answers
    are long are left out."""
    items = [item for item in items if item["answer"] and len(item["answer"]) <= SHORT and "\n" not in item["answer"]]
    told, left = [], length
    for text in map(solved, items[QUESTIONS:]):
        left -= tokens(text)
        if left < 0:
            break
        told.append(text)
    return Context("".join(told), [(asked(item), f" {item['answer']}\n") for item in items[:QUESTIONS]])


def examples(reader):
    import reasoning_gym

    def context_of(task, length, number):
        items = reasoning_gym.create_dataset(task, seed=number, size=QUESTIONS + length // 10)
        return context(items, length, lambda text: len(reader.ids(text)))

    return context_of


if __name__ == "__main__":
    parser = retrieval.parser(__doc__, TASKS, "1536")
    sys.exit(retrieval.run(parser, "reasoning", TASKS, legal, examples, "LOWKV_REASONING_GYM"))
