"""The C interface from Python, without the package: ctypes_cache.py /path/to/liblowkv.so"""

import array
import ctypes
import random
import sys

LAYERS, KV_HEADS, HEADS, HEAD_DIM, PROMPT, F32 = 2, 2, 4, 64, 600, 1
lowkv = ctypes.CDLL(sys.argv[1])
lowkv.lowkv_error.restype = ctypes.c_char_p


class Config(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("scheme", ctypes.c_char_p), ("layers", ctypes.c_uint32),
                ("kv_heads", ctypes.c_uint32), ("head_dim", ctypes.c_uint32), ("dtype", ctypes.c_int),
                ("threads", ctypes.c_uint32), ("budget", ctypes.c_uint64))


class Rows(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("dtype", ctypes.c_int), ("token_stride", ctypes.c_size_t),
                ("head_stride", ctypes.c_size_t))


class Bytes(ctypes.Structure):
    _fields_ = (("unquantized", ctypes.c_uint64), ("packed", ctypes.c_uint64), ("peak", ctypes.c_uint64))


def must(status):
    if status != 0:
        sys.exit(f"lowkv: {lowkv.lowkv_error().decode()}")


def main():
    cache, sequence = ctypes.c_void_p(), ctypes.c_uint32()
    config = Config(ctypes.sizeof(Config), b"lowkv2.8,window=64", LAYERS, KV_HEADS, HEAD_DIM)
    must(lowkv.lowkv_cache_new(ctypes.byref(config), ctypes.byref(cache)))
    must(lowkv.lowkv_sequence_add(cache, ctypes.byref(sequence)))

    values = array.array("f", (random.gauss(0, 1) for _ in range(PROMPT * KV_HEADS * HEAD_DIM)))
    rows = Rows(values.buffer_info()[0], F32, KV_HEADS * HEAD_DIM, HEAD_DIM)
    for layer in range(LAYERS):
        must(lowkv.lowkv_append(cache, sequence, layer, rows, rows, PROMPT))
    must(lowkv.lowkv_pack(cache))

    held = Bytes()
    must(lowkv.lowkv_cache_bytes(cache, ctypes.byref(held)))
    f16 = LAYERS * PROMPT * KV_HEADS * HEAD_DIM * 2 * 2
    print(f"{PROMPT} tokens: {held.packed} bytes packed, {held.unquantized} unquantized; f16 takes {f16}")
    lowkv.lowkv_cache_free(cache)
    return 0 if 0 < held.packed + held.unquantized < f16 else 1


if __name__ == "__main__":
    sys.exit(main())
