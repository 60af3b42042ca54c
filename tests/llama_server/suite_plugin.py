"""A pytest plug-in for the copy of llama.cpp's server tests: no hub, and a record of each test.

Loaded with `-p suite_plugin`. LOWKV_SUITE_RECORD names the JSON file that it writes.
"""

import json
import os
import re
from pathlib import Path

import pytest
import suite

# Checks for words that the hub's model answers with, such as "(Whiskers|Flana)+": any text will do.
WORDS = re.compile(r"\((?:\w+\|)*\w+\)\+(?:\|.*)?")


class Recorder:
    def __init__(self, path):
        self.path, self.tests, self.log_files = path, {}, []

    def pytest_collection_modifyitems(self, config, items):
        left_out = []
        for item in list(items):
            why = suite.why_left_out(item.nodeid.removeprefix("unit/"), item.get_closest_marker("slow"))
            if why:
                self.tests[item.nodeid] = {"outcome": "left out", "why": why}
                items.remove(item)
                left_out.append(item)
        config.hook.pytest_deselected(items=left_out)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        test = self.tests.setdefault(item.nodeid, {"outcome": "passed", "why": ""})
        if report.skipped:
            test.update(outcome="skipped", why=str(report.longrepr[-1]))
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            test.update(outcome="failed", why=crash.message if crash else str(report.longrepr))
        if report.when == "teardown":
            logs = [text for name, text in report.sections if name.startswith("Captured std")]
            logs += [Path(name).read_text(errors="replace") for name in self.log_files if Path(name).exists()]
            test["log"] = "".join(logs)
            self.log_files.clear()

    def pytest_sessionfinish(self):
        Path(self.path).write_text(json.dumps(self.tests, indent=1))


def pytest_configure(config):
    import utils  # the suite's own

    recorder = Recorder(os.environ["LOWKV_SUITE_RECORD"])
    config.pluginmanager.register(recorder)
    # It would load each of the hub's models once, so that it is downloaded.
    utils.ServerPreset.load_all = staticmethod(lambda: None)

    match, start = utils.match_regex, utils.ServerProcess.start

    def match_regex(pattern, text):
        return bool(text) if WORDS.fullmatch(pattern) else match(pattern, text)

    def start_and_remember(server, *args, **kwargs):
        if server.log_path:
            recorder.log_files.append(server.log_path)
        return start(server, *args, **kwargs)

    utils.match_regex = match_regex
    utils.ServerProcess.start = start_and_remember
