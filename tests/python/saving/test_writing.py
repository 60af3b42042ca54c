"""A path has one whole file or another, whoever writes, and whatever stops it."""

import threading

import lowkv
import pytest
from families import build
from saved import TOKENS, filled


def test_writers_of_one_path_do_not_meet(tmp_path):
    """Threads, as other processes do; whoever reads meanwhile has a whole file, and no draft stays."""
    model, _ = build("llama")
    caches, path, found = [filled(model, TOKENS[:1, :n], "exact") for n in (40, 300)], tmp_path / "prefix", []
    caches[0].save(path)

    def repeated(call):
        try:
            for _ in range(60):
                call()
        except Exception as error:
            found.append(error)

    def load():
        assert lowkv.Cache.load(path, model).get_seq_length() in (40, 300)

    threads = [threading.Thread(target=repeated, args=(call,))
               for call in (lambda: caches[0].save(path), lambda: caches[1].save(path), load)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [] and list(tmp_path.iterdir()) == [path]


def test_a_save_that_fails_leaves_the_old_file(model, saved, monkeypatch):
    cache, path = saved
    before = path.read_bytes()

    def broken(images, draft, metadata):
        draft.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(lowkv.saving, "save_file", broken)
    with pytest.raises(KeyboardInterrupt):
        cache.save(path)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_a_saved_file_is_on_the_disk_before_it_has_its_name(saved, monkeypatch):
    cache, path = saved
    calls, sync, replace = [], lowkv.saving.os.fsync, lowkv.saving.os.replace
    monkeypatch.setattr(lowkv.saving.os, "fsync", lambda file: (calls.append("fsync"), sync(file)))
    monkeypatch.setattr(lowkv.saving.os, "replace", lambda *its: (calls.append("replace"), replace(*its)))
    cache.save(path)
    assert calls == ["fsync", "replace", "fsync"]


def test_a_link_is_followed(saved, tmp_path):
    cache, path = saved
    (tmp_path / "links").mkdir()
    link, loose, elsewhere = (tmp_path / "links" / name for name in ("a", "b", "c"))
    link.symlink_to(path)
    loose.symlink_to(tmp_path / "new")
    path.write_bytes(b"")
    for its in (link, loose):
        cache.save(its)
        assert its.is_symlink()
        assert lowkv.Cache.load(its, cache.model()).get_seq_length() == cache.get_seq_length()
    assert path.stat().st_size == (tmp_path / "new").stat().st_size > 0 and not path.is_symlink()
    assert len(list((tmp_path / "links").iterdir())) == 2
    elsewhere.symlink_to(tmp_path)
    for its in (elsewhere, tmp_path, "/dev/null"):
        with pytest.raises(lowkv.Error, match="is there, and is no regular file"):
            cache.save(its)


def test_a_file_may_be_read_by_whom_the_user_says(saved, tmp_path):
    cache, path = saved
    long = tmp_path / ("x" * 255)  # as long as a name can be
    plain = tmp_path / "plain"
    plain.touch()
    cache.save(long)
    assert long.stat().st_mode == plain.stat().st_mode
    path.chmod(0o640)
    cache.save(path)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_split_model_is_refused(model, saved, monkeypatch):
    """Each process has some heads, and one path has room for one's."""
    cache, path = saved
    monkeypatch.setattr(type(model), "tp_size", property(lambda self: 2), raising=False)
    for call in (lambda: cache.save(path), lambda: lowkv.Cache.load(path, model)):
        with pytest.raises(lowkv.Error, match=r"split over 2 processes \(tensor parallelism\)"):
            call()
