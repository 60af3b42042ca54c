"""Plain prose out of Debian's bible-kjv-text: its own container of `compress` streams."""

import re
import struct
import subprocess

from tools import SetupError

WINDOWS = 92  # where the table of the streams' places starts, big-endian
MAGIC = b"\x1f\x9d"


def from_data(path, characters):
    """The first `characters`, verse after verse without their numbers. (The streams are 64 KiB of text
    each; the file holds the three bytes of their header once, before the first one.)"""
    data = path.read_bytes()
    first = struct.unpack_from(">I", data, WINDOWS)[0]
    if data[:4] != b"EC02" or data[first - 3:first - 1] != MAGIC:
        raise SetupError(f"{path}: not the container that bible-kjv-text 4.38 has")
    header, text, place = data[first - 3:first], "", WINDOWS
    while len(text) < characters:
        begin, end = struct.unpack_from(">II", data, place)
        stream = subprocess.run(["gzip", "-dc"], input=header + data[begin:end], capture_output=True, check=True)
        text += stream.stdout.decode("latin-1")
        place += 4
    verses = re.findall(r"^\w+:\d+ (.*)$", text[:text.rindex("\n")], re.M)
    return "\n".join(verses) + "\n"
