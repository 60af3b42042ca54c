"""A tiny projector for pictures, LLaVA's two matrices behind a vision transformer, and a picture."""

import struct
import zlib

import gguf
import numpy as np


def projector(path, width=128, size=28, patch=14, inner=64, layers=2):
    """`width` is the language model's."""
    g = gguf.GGUFWriter(str(path), "clip")
    g.add_bool("clip.has_vision_encoder", True)
    g.add_string("clip.projector_type", "mlp")
    numbers = {"image_size": size, "patch_size": patch, "embedding_length": inner, "feed_forward_length": 2 * inner,
               "block_count": layers, "projection_dim": width, "attention.head_count": 2}
    for name, value in numbers.items():
        g.add_uint32(f"clip.vision.{name}", value)
    g.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    for name in ("image_mean", "image_std"):
        g.add_array(f"clip.vision.{name}", [0.5] * 3)

    tensors = {"v.patch_embd.weight": (inner, 3, patch, patch), "v.position_embd.weight": ((size // patch) ** 2, inner),
               "mm.0.weight": (width, inner), "mm.0.bias": (width,), "mm.2.weight": (width, width),
               "mm.2.bias": (width,)}
    block = {"ln1.weight": (inner,), "ln1.bias": (inner,), "ln2.weight": (inner,), "ln2.bias": (inner,),
             "ffn_up.weight": (2 * inner, inner), "ffn_down.weight": (inner, 2 * inner)}
    block |= {f"{name}.weight": (inner, inner) for name in ("attn_q", "attn_k", "attn_v", "attn_out")}
    tensors |= {f"v.blk.{i}.{name}": shape for i in range(layers) for name, shape in block.items()}
    random = np.random.default_rng(1)
    for name, shape in tensors.items():
        g.add_tensor(name, (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32))
    g.write_header_to_file()
    g.write_kv_data_to_file()
    g.write_tensors_to_file()
    g.close()
    return path


def picture(size=28):
    """A PNG."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes(value for x in range(size) for value in (9 * x % 256, 9 * y % 256, 77))
                    for y in range(size))
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
