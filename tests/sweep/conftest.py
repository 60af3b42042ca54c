"""Says at the end which types of transformers were not tested, and why."""

import torch

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--part", default="1/1", metavar="I/N", help="of N parts of the types the I-th alone")


def pytest_collection_modifyitems(config, items):
    part, parts = map(int, config.getoption("--part").split("/"))
    items[:] = items[part - 1 :: parts]


def pytest_terminal_summary(terminalreporter):
    for word in ("NOT BUILT", "REFUSED"):
        lines = sorted({value for reports in terminalreporter.stats.values() for report in reports
                        for key, value in getattr(report, "user_properties", ()) if key == word})
        if lines:
            terminalreporter.write_sep("=", f"{word}: {len(lines)} types")
            terminalreporter.write_line("\n".join(lines))
