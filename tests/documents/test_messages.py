"""deps/messages.py: how messages are collected from the sources, and held against the pages of docs/troubleshooting."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "deps"))

import messages  # noqa: E402  (needs the path above)

CPP = r'''
// throw Error(code, "not in a comment");
void f(int n) {
    if (n < 0) throw Failure("there is no " + name(n) + ", but " "one in two pieces");
    std::fprintf(stderr, "lowkv: %d of %zu are busy\n", n, n);
    std::fprintf(stderr, "what others print is none of ours\n");
    report(GGML_LOG_LEVEL_WARN, n == 1 ? "one layer stays f16" : "all stay f16");
    const std::string why = "its keys have " + std::to_string(n) + " channels";
    log("nor is any other text");
}
'''
PYTHON = '''
"""A docstring is no message."""
def f(n):
    if n:
        raise Error(f"layer {n}: not " "served" + more)
    _LOGGER.warning("lowkv: something is odd")
    wrong = f"--block-size {n}; a multiple is needed" if n else None
    raise Error(wrong)
'''


def write(root, page):
    (root / "cli").mkdir()
    (root / "python").mkdir()
    (root / "cli/a.cpp").write_text(CPP)
    (root / "python/b.py").write_text(PYTHON)
    (root / messages.PAGES).mkdir(parents=True)
    (root / messages.PAGES / "page.md").write_text(page)


def block(*lines):
    return "# Page\n\n```text\n" + "\n".join(lines) + "\n```\n"


ALL = ("lowkv: <n> of <m> are busy", "there is no <thing>, but one in two pieces", "<one> layer stays f16",
       "its keys have <n> channels", "layer <n>: not served", "lowkv: something is odd",
       "--block-size <n>; a multiple is needed")


def test_messages_are_collected_without_their_variable_parts(tmp_path):
    write(tmp_path, block(*ALL))
    assert {message.text for message in messages.collected(tmp_path)} == {
        "lowkv: ... of ... are busy ", "there is no ..., but one in two pieces",
        "...one layer stays f16...all stay f16", "its keys have ... channels",
        "lowkv: something is odd", "--block-size ...; a multiple is needed", "layer ...: not served..."}
    assert messages.problems(tmp_path) == []


@pytest.mark.parametrize("left_out", ALL)
def test_each_message_needs_an_entry(left_out, tmp_path):
    write(tmp_path, block(*(line for line in ALL if line != left_out)))
    assert len(messages.problems(tmp_path)) == 1


def test_each_entry_needs_a_message(tmp_path):
    write(tmp_path, block(*ALL, "nobody says this any more"))
    assert messages.problems(tmp_path) == [f"{messages.PAGES}/page.md: no source says: nobody says this any more"]


@pytest.mark.parametrize("line", ["channels its keys have", "its keys channels"])
def test_an_entry_has_the_words_of_its_message_in_their_order(line, tmp_path):
    write(tmp_path, block(*ALL, line))
    assert messages.problems(tmp_path) == [f"{messages.PAGES}/page.md: no source says: {line}"]


def test_an_entry_that_stands_for_everything_is_refused(tmp_path):
    write(tmp_path, block(*ALL, "<name>: <why>"))
    with pytest.raises(SystemExit, match="too few words"):
        messages.problems(tmp_path)


def test_words_may_stand_for_several_messages(tmp_path):
    write(tmp_path, block(*(line for line in ALL if "f16" not in line), "<...> layer stays <...>"))
    assert messages.problems(tmp_path) == []


def test_the_pages_have_every_message():
    assert messages.problems() == []
