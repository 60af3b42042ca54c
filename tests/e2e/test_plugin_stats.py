"""LOWKV_STATS: what the caches of a running llama-server hold, in a file that Prometheus can read."""

import os
import re
import stat
import time
from pathlib import Path

import plugin_models as models
import pytest
from plugin_tools import server, text, tool
from prometheus_client.parser import text_string_to_metric_families

ELSEWHERE = "lowkv_elsewhere_layers"
SATURATED = "lowkv_saturated_numbers"
OF_THE_PROCESS = (ELSEWHERE, SATURATED)  # no cache's
DASHBOARD = Path(__file__).resolve().parents[2] / "deploy/grafana.json"
INTERVAL = 1.0  # seconds between two files: stats_file.cpp


def read(path):
    """{(name, cache, state): value}; every sample is of the scheme that its cache was made for."""
    families = list(text_string_to_metric_families(path.read_text()))
    assert families and all(f.documentation for f in families)
    for family in families:
        counts = family.name.endswith(("_blocks", "_repacked_cells", "_restarted_statistics", SATURATED))
        assert family.type == ("counter" if counts else "gauge")
    return {(s.name.removeprefix("lowkv_cache_"), s.labels["cache"], s.labels.get("state")): s.value
            for f in families if f.name not in OF_THE_PROCESS for s in f.samples}


def schemes(path):
    return {s.labels["scheme"] for f in text_string_to_metric_families(path.read_text()) if f.name not in OF_THE_PROCESS
            for s in f.samples}


def layers_elsewhere(path):
    (family,) = [f for f in text_string_to_metric_families(path.read_text()) if f.name == ELSEWHERE]
    return family.samples[0].value


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stats")


@pytest.fixture(scope="module")
def tiny(folder):
    return models.llama(folder / "llama.gguf", layers=3)


def test_the_dashboard_shows_every_figure_of_a_process(folder, tiny):
    with server(folder, "-c", 512, scheme="lowkv2.8", model=tiny, env={"LOWKV_STATS": str(folder / "%p.prom")}) as s:
        s.complete("Once", 2)
        time.sleep(INTERVAL + 0.5)
        path = folder / f"{s.process.pid}.prom"
        written = {s.name for f in text_string_to_metric_families(path.read_text()) for s in f.samples}
    assert set(re.findall(r"lowkv_\w+", DASHBOARD.read_text())) == written


@pytest.mark.parametrize("words, name", [((), "llama"), (("--alias", 'a/"b"\\c'), "a__b__c")])
def test_the_model_is_a_label_and_part_of_a_name(folder, tiny, words, name):
    with server(folder, "-c", 512, *words, scheme="lowkv2.8", model=tiny,
                env={"LOWKV_STATS": str(folder / "of-%m.prom")}) as s:
        s.complete("Once", 2)
        time.sleep(INTERVAL + 0.5)
        path = folder / f"of-{name}.prom"
        labels = {s.labels["model"] for f in text_string_to_metric_families(path.read_text())
                  if f.name not in OF_THE_PROCESS for s in f.samples}
        assert labels == {name}


def freed(log):
    """What each cache said when it was freed, in that order: the file's figures have to agree."""
    fields = r"cells packed (\d+), exact (\d+), bytes packed (\d+), exact (\d+), peak (\d+), reopened blocks (\d+)"
    return [tuple(map(int, m)) for m in re.findall(rf"cache freed: .*{fields}", log)]


def figures(stats, cache):
    names = (("cells", "packed"), ("cells", "exact"), ("bytes", "packed"), ("bytes", "exact"),
             ("peak_bytes", None), ("reopened_blocks_total", None))
    return tuple(int(stats[name, cache, state]) for name, state in names)


def test_two_caches_while_running_and_after(folder):
    """Gemma 2's sliding layers have a cache of their own."""
    model, path = models.gemma2(folder / "gemma2.gguf"), folder / "two.prom"
    env = {"LOWKV_STATS": str(path), "LOWKV_VERBOSE": "1"}
    with server(folder, "-np", 1, "-c", 2048, "-cram", 0, scheme="kivi2", model=model, env=env) as s:
        s.complete(text(1, 900), tokens=2)
        time.sleep(INTERVAL + 0.1)
        s.complete(text(1, 900) + text(2, 20), tokens=2)
        running = read(path)
        assert {cache for _, cache, _ in running} == {"0", "1"}
        assert schemes(path) == {"kivi2"}
        for cache in ("0", "1"):
            assert running["layers", cache, "packed"] == 2
            assert running["layers", cache, "plain"] == 0
            assert running["bytes", cache, "packed"] > 0
            assert cache == "0" or running["cells", cache, "packed"] % 32 == 0  # the sliding one's are written over
            assert running["encoded_blocks_total", cache, None] > 0
        s.complete(text(3, 1500), tokens=2)  # rewrites cells that are packed
        log = s.log
    ended = read(path)
    said = freed(log.read_text())
    assert len(said) == 2
    assert sorted(said) == sorted(figures(ended, cache) for cache in ("0", "1"))
    for cache in ("0", "1"):
        held = ended["bytes", cache, "packed"] + ended["bytes", cache, "exact"]
        assert held <= ended["told_bytes", cache, None]
    for name, cache, state in running:
        if name.endswith("_total") or name == "peak_bytes":
            assert ended[name, cache, state] >= running[name, cache, state]
    # A row that is written again leaves those that it was packed with as they are.
    assert all(ended["reopened_blocks_total", cache, None] == 0 for cache in ("0", "1"))
    assert [file.name for file in path.parent.glob(path.name + "*")] == [path.name]


def test_layers_that_stay_f16(folder, tiny):
    path = folder / "plain.prom"
    with server(folder, "-np", 1, "-c", 512, "-fa", "off", scheme="kivi2", model=tiny,
                env={"LOWKV_STATS": str(path)}) as s:
        s.complete(text(1, 50), tokens=2)
        stats = read(path)
    assert stats["layers", "0", "plain"] == 3 and stats["layers", "0", "packed"] == 0
    assert stats["bytes", "0", "packed"] == 0
    assert stats["bytes", "0", "exact"] == 3 * 512 * 2 * 128 * 2  # layers, cells, keys and values, f16


def test_caches_that_were_freed_make_room(folder, tiny):
    """llama-bench makes one per test: the file keeps the last, and its number."""
    path = folder / "bench.prom"
    run = tool("llama-bench", "-p", "16,32,48", "-n", "0", "-r", "1", "-fa", "1", scheme="kivi2", model=tiny,
               device=False, env={"LOWKV_STATS": str(path)})
    assert run.code == 0, run.both[-2000:]
    stats = read(path)
    assert {cache for _, cache, _ in stats} == {"2"}
    assert stats["cells", "2", "exact"] == 48


def test_a_path_that_cannot_be_written(folder, tiny):
    path = folder / "missing" / "stats.prom"
    with server(folder, "-np", 1, "-c", 512, scheme="kivi2", model=tiny, env={"LOWKV_STATS": str(path)}) as s:
        for i in range(2):
            s.complete(text(i, 50), tokens=2)
            time.sleep(INTERVAL + 0.1)
        log = s.log
    assert len(re.findall(r"lowkv: LOWKV_STATS=.*can't be written \(No such file or directory\)", log.read_text())) == 1
    assert not path.parent.exists()


def test_the_draft_of_another_process_is_left_alone(folder, tiny):
    path, draft = folder / "shared.prom", folder / "shared.prom.new"
    draft.write_text("half of another's")
    run = tool("llama-completion", "-p", text(1, 50), "-n", 2, "-no-cnv", model=tiny, scheme="kivi2",
               env={"LOWKV_STATS": str(path)})
    assert run.code == 0 and read(path) and draft.read_text() == "half of another's", run.both


def test_layers_in_other_memory_are_counted(folder, tiny):
    for options, layers in (((), 0), (("-ngl", 2), 2)):  # the output counts as a layer: -ngl 2 leaves two of three
        path = folder / f"elsewhere-{layers}.prom"
        run = tool("llama-completion", "-p", text(1, 200), "-n", 2, "-no-cnv", *options, model=tiny, scheme="kivi2",
                   env={"LOWKV_STATS": str(path)})
        assert run.code == 0 and layers_elsewhere(path) == layers, run.both


def test_a_burst_is_in_the_file_while_the_server_rests(folder, tiny):
    path = folder / "burst.prom"
    with server(folder, "-np", 1, "-c", 2048, scheme="kivi2", model=tiny, env={"LOWKV_STATS": str(path)}) as s:
        for n in (300, 420):
            s.complete(text(1, n), tokens=2)
        time.sleep(INTERVAL + 0.5)
        stats, at_rest = read(path), path.stat().st_mtime
        time.sleep(INTERVAL + 0.5)
        assert path.stat().st_mtime == at_rest, "nothing changed, and it was written"
    ended = read(path)
    for state in ("packed", "exact"):
        assert stats["cells", "0", state] == ended["cells", "0", state]
    assert stats["cells", "0", "packed"] + stats["cells", "0", "exact"] >= 420


def test_a_link_stays_and_what_is_no_file_is_refused(folder, tiny):
    link, pipe, device = (folder / name for name in ("link", "pipe", "device"))
    link.symlink_to("linked.prom")
    os.mkfifo(pipe)
    paths = [link, link, pipe, folder]
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))  # another null; never the machine's own
        paths.append(device)
    except PermissionError:
        pass
    for path in paths:
        mode = path.lstat().st_mode
        run = tool("llama-completion", "-p", text(1, 50), "-n", 2, "-no-cnv", model=tiny, scheme="kivi2",
                   env={"LOWKV_STATS": str(path)})
        assert run.code == 0, run.both
        assert stat.S_IFMT(path.lstat().st_mode) == stat.S_IFMT(mode)
        if path == link:
            assert read(folder / "linked.prom")["cells", "0", "exact"] >= 50
        else:
            run.said(r"LOWKV_STATS=.* can't be written \(it is a (folder|device or a pipe)")
    assert not [file for file in folder.iterdir() if ".new" in file.name and file.name != "shared.prom.new"]
