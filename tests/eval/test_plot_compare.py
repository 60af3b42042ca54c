"""eval/plot_compare.py: a picture of what `lowkv compare --json` has written."""

import json

import plot_compare


def row(scheme, kind, bytes_per_token, kld, reference=False):
    return {"scheme": scheme, "kind": kind, "reference": reference, "kv_bytes_per_token": bytes_per_token,
            "mean_kld": kld, "compression": 23040 / bytes_per_token}


def test_each_cache_is_in_the_picture(tmp_path):
    rows = [row("exact", "lowkv", 23040, 0, True), row("lowkv2.8", "lowkv", 6384, 0.0019),
            row("stock q4_0", "stock", 6492, 0.034)]
    data, picture = tmp_path / "compare.json", tmp_path / "compare.svg"
    data.write_text(json.dumps({"model": "SmolLM2", "positions": 1791, "rows": rows}))
    assert plot_compare.main([data, picture]) == 0
    drawn = picture.read_text()
    assert drawn.lstrip().startswith("<?xml")
    for label in ("lowkv2.8", "3.6x smaller", "q4_0", "What a smaller cache costs: SmolLM2", "1,791 positions"):
        assert label in drawn, label


def test_wrong_arguments_are_answered_with_the_usage(capsys):
    assert plot_compare.main([]) == 2
    assert "usage: eval/plot_compare.py compare.json picture.png|svg" in capsys.readouterr().err
