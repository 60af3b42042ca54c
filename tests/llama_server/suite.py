"""What of llama.cpp's server tests depends on the hub: which are left out, and which numbers differ."""

# Start of a test's name ($: the whole of it), and why it can't run here.
LEFT_OUT = (
    ("test_vision_api.py::", "its pictures and its projector come from the hub"),
    ("test_compat_anthropic.py::test_anthropic_vision_base64_with_multimodal_model", "its picture comes from the hub"),
    ("test_slot_save.py::test_slot_save_restore_with_", "its pictures come from the hub"),
    ("test_slot_save.py::test_slot_save_restore_image_payload", "its picture comes from the hub"),
    ("test_slot_save.py::test_slot_restore_media_file_without_mmproj", "its picture comes from the hub"),
    ("test_security.py::test_local_media_file", "needs a model with a projector from the hub"),
    ("test_systemone.py::", "its models, which have heads of their own for such answers, come from the hub"),
    ("test_router.py::test_router_remote_preset", "downloads from the hub"),
    ("test_router.py::test_router_download_model", "downloads from the hub"),
    ("test_router.py::test_router_delete_model", "downloads from the hub"),
    ("test_proxy.py::test_mcp_proxy$", "fetches a page from the internet"),
    ("test_basic.py::test_no_ui", "the web interface is not built"),
    ("test_security.py::test_access_static_assets_without_api_key", "the web interface is not built"),
)
SLOW = "marked slow: downloads models of 1 to 8 billion parameters"

# Numbers and words of the hub's models in a file of the suite, and those of the models that stand in for
# them (models.py). Each has to be found, so that another version of the suite can't pass unnoticed.
EXPECTED = {
    "test_completion.py": (('18, 8, False', '17, 8, False'), ('(40 + r)*5 + 2', '(40 + r)*7 + 2')),
    "test_chat_completion.py": (('"But she couldn\'t", 69', '"(any)+", 69'), ('Sarax.", 77', 'Sarax.", 78'),
                                ('"^ blue",                    23', '"(any)+", 20'), ('104, 128', '99, 128'),
                                ('"(Suddenly)+", 77', '"(any)+", 78'), ('"Whillicter", 79', '"(any)+", 80'),
                                ('77, 0)', '76, 0)'), ('77, 76)', '76, 75)'),
                                ('77, 51)', '76, 51)'), ('77, 47)', '76, 47)'), ('(64, 4, False)', '(64, 3, False)'),
                                ('"[ -3000 ]"', '"\\\\["')),
    "test_rerank.py": (('most_relevant["index"] == 2', 'most_relevant["index"] == 3'),
                       ('least_relevant["index"] == 3', 'least_relevant["index"] == 2'),
                       ('"Learning is", 19', '"Learning is", 14'), ('la", 26', 'la", 19')),
    "test_ctx_shift.py": (('== 226', '== 214'), ('(-1, 248, True)', '(-1, 244, True)')),
    "test_slot_save.py": (('== 21 ', '== 19 '), ('== 84', '== 82')),
    "test_speculative.py": (('"Hello " * 248', '"the " * 248'),),
}


def why_left_out(name, slow):
    """The reason for leaving out the test `name` ("test_x.py::test_y[...]"), or None."""
    for start, reason in LEFT_OUT:
        if (name + "$").startswith(start):
            return reason
    return SLOW if slow else None


def adapt(folder):
    """Puts our models' numbers into the copy of the suite that lies in `folder`."""
    for name, changes in EXPECTED.items():
        path = folder / "unit" / name
        text = path.read_text()
        for old, new in changes:
            if old not in text:
                raise SystemExit(f"{name} of llama.cpp's server tests has no {old!r} any more: adapt "
                                 "tests/llama_server/suite.py to this version of llama.cpp")
            text = text.replace(old, new)
        path.write_text(text)
