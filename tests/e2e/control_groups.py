"""Control groups for a test, where they may be made."""

import contextlib
import os
import time
from pathlib import Path

import pytest

GROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def group(controller, files_1, files_2):
    """A group with what version 1 or 2 wants written into its files, and how to start a command in it."""
    first = GROUPS / controller
    folder = (first if first.is_dir() else GROUPS) / f"lowkv-test-{os.getpid()}"
    try:
        folder.mkdir()
        for name, text in (files_1 if first.is_dir() else files_2).items():
            (folder / name).write_text(text)
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no control groups can be made here: {error}")
    try:
        yield ["sh", "-c", f'echo $$ > {folder}/cgroup.procs; exec "$0" "$@"']
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)  # its last process has yet to go


def quota(processors):
    return group("cpu", {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": str(int(processors * 100000))},
                 {"cpu.max": f"{int(processors * 100000)} 100000"})


def limit(mebibytes):
    return group("memory", {"memory.limit_in_bytes": f"{mebibytes}M"}, {"memory.max": f"{mebibytes}M"})
