"""What the scripts of eval/ remember between runs, and how they read schemes."""

import measuring
import sheet

FIGURES = {name: 1.0 for name in measuring.FIGURES}
SETTING = {"windows": 1, "tokens": 2048, "chunk": 32, "skip": 256, "weights": "f16", "calibration": "handbook 4096",
           "model": "m", "text": "t"}


def test_a_sheet_is_read_again_as_it_was_written(tmp_path):
    one = sheet.Sheet(tmp_path / "a" / "x.csv", ["scheme", "length"], ["right"])
    one.add(scheme="k=exact,v=exact", length=2048, right="101")
    one.add(scheme="lowkv2", length=2048, right="1\n,\"")
    again = sheet.Sheet(tmp_path / "a" / "x.csv", ["scheme", "length"], ["right"])
    assert again.rows == one.rows
    assert again.get("lowkv2", 2048)["right"] == "1\n,\"" and again.get("lowkv2", 1) == {}
    assert [row["scheme"] for row in again.select(length=2048)] == ["k=exact,v=exact", "lowkv2"]
    assert not list(tmp_path.rglob("*.part"))


def test_a_row_of_the_same_key_is_replaced(tmp_path):
    one = sheet.Sheet(tmp_path / "x.csv", ["scheme"], ["right"])
    one.add(scheme="a", right=1)
    one.add(scheme="a", right=2)
    assert [row["right"] for row in one.rows.values()] == ["2"]


def test_schemes_have_commas_of_their_own():
    assert sheet.schemes_of("exact,k=channel-2-g32+v=token-2-g32") == ["exact", "k=channel-2-g32,v=token-2-g32"]


def test_figures_of_another_build_are_shown_and_measured_again(tmp_path):
    measuring.Results(tmp_path / "q.csv", "old").put("lowkv2", SETTING, FIGURES)
    new = measuring.Results(tmp_path / "q.csv", "new")
    assert not new.has("lowkv2", SETTING)
    assert new.find("lowkv2", SETTING) == {"scheme": "lowkv2", "plugin": "old", **FIGURES}
    assert new.find("lowkv2", SETTING | {"tokens": 8192}) is None
    new.put("lowkv2", SETTING, FIGURES)
    assert new.has("lowkv2", SETTING) and len(new.rows) == 1


def test_a_calibration_is_a_part_of_the_key_only_where_one_is_needed(tmp_path):
    results = measuring.Results(tmp_path / "q.csv", "p")
    for scheme in ("lowkv2", "skvq-k2v2"):
        results.put(scheme, SETTING, FIGURES)
    other = SETTING | {"calibration": "bible 4096"}
    assert results.has("lowkv2", other) and not results.has("skvq-k2v2", other)
