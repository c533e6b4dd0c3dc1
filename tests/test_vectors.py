"""Published bytes of every encoding, out of generated ``append`` and out of the reference.

Each goes into pages that hold all codes first, and into rows of an odd number of bytes; where a byte must be is counted
here by hand.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import pytest
import torch

from kvgen import reference
from kvgen.resolve import load_text
from tests.generated import module_of, shipped
from tests.quantised import hexes, numbers

BLOCK_SIZE = 5
SLOTS = (7, 0, 14)
"""In which the row is written; between them stands nothing."""


@dataclass(frozen=True)
class Vector:
    """``values`` in one group; the bytes of their codes and, where it is computed, of the scale and of the zero."""

    quant: str
    values: str
    codes: str
    scale: str = ""
    zero: str = ""


def static(mode: str, values: str, codes: str) -> Vector:
    return Vector(f"mode: {mode}, scale: {{per: [], source: static}}", values, codes)


def floats(*values: float) -> str:
    return hexes(torch.tensor(values, dtype=torch.float32).view(torch.uint8))


ROW = "per: token head"
E4M3 = "mode: fp8_e4m3, scale: {per: token head, "

VECTORS = [
    static("fp8_e4m3", "0 -0.0 1 -1 448 464 1e6 -1e6", "00 80 38 B8 7E 7E 7E FE"),
    static("fp8_e4m3", "2^-9 2^-10 0.75*2^-9 7.5*2^-9 2^-6", "01 00 01 08 08"),
    static("fp8_e4m3", "1.0625 1.1875 126.24 470 nan -nan inf -inf", "38 3A 70 7E 7F 7F 7E FE"),
    static("fp8_e5m2", "1 -0.0 1.125 57344 61440 2^-16 nan -inf", "3C 80 3C 7B 7B 01 7F FB"),
    static("fp8_e4m3fnuz", "1 -0.0 240 248 2^-10 -240 nan", "40 00 7F 7F 01 FF 80"),
    static("fp8_e5m2fnuz", "1 -0.0 57344 61440 2^-17 nan", "40 00 7F 7F 01 80"),
    static("int8", "130 -130 0.5 1.5 -2.5 nan", "7F 81 00 02 FE 00"),
    Vector(
        "mode: int8, scale: {per: token head}", "-2 -1 -.5 0 .25 .5 1 2", "81 C0 E0 00 10 20 40 7F", floats(2 / 127)
    ),
    Vector("mode: int8, round: away, scale: {per: token head}", "127 0.5 -1.5 2.5", "7F 01 FE 03", floats(1)),
    Vector(E4M3 + "floor: {amax: 1.0e-4}}", "0 0 -0.0 0", "00 00 80 00", floats((torch.tensor(1e-4) / 448).item())),
    Vector(E4M3 + "floor: {scale: 1.0e-6}, arithmetic: multiply}", "448 -1 0 2", "7E B8 00 40", floats(1)),
    Vector(E4M3 + "floor: {scale: 1.0e-6}, arithmetic: multiply}", "1e-9 0 0 0", "01 00 00 00", floats(1e-6)),
    Vector(E4M3 + "grid: pow2, floor: {scale: 1.0e-4}}", "1 1 1 1", "78 78 78 78", "00 00 80 3B"),
    Vector("mode: int4, scale: {per: token head}", "-7 7 1 2 .5 1.5 -.5 nan", "79 21 20 00", "00 3C"),
    Vector("mode: int4_asymmetric, scale: {per: token head}", "0 15 7 7.5", "F0 87", "00 3C", "00 00"),
    Vector(
        "mode: int4_asymmetric, zero: {kind: point}, scale: {per: token head}", "-5 10 0 nan", "F0 05", "00 3C", "05"
    ),
    Vector("mode: nvfp4", "0 .5 1 1.5 2 3 4 6 -0.0 -.5 -1 -1.5 -2 -3 -4 -6", "10 32 54 76 98 BA DC FE", "38"),
    Vector(
        "mode: nvfp4",
        "6 .25 .75 1.25 1.75 2.5 3.5 5 5.01 -.25 -.75 -1.25 -1.75 -2.5 -3.5 -5",
        "07 22 44 66 87 AA CC EE",
        "38",
    ),
    Vector("mode: nvfp4", "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15", "10 22 43 54 65 66 76 77", "42"),
    Vector("mode: nvfp4", "1 " * 16, "77 " * 8, "23"),
    *[
        Vector("mode: mxfp8", f"{amax} " + "0 " * 31, f"{code} " + "00 " * 31, byte)
        for amax, code, byte in (
            ("448", "7E", "7F"),
            ("449", "76", "80"),
            ("1", "78", "77"),
            ("1e-3", "78", "6D"),
            ("0", "00", "00"),
        )
    ],
    Vector("mode: mxfp4", "6 .25 .75 1.25 " * 8, "07 22 " * 8, "7F"),
    Vector("mode: mxfp4, scale: {range: 4, exponent: floor}", "6 .25 .75 1.25 " * 8, "07 22 " * 8, "7F"),
]


def layouts(vector: Vector, dim: int) -> dict[str, str]:
    """The text of a page with planes, and that of rows with an odd number of bytes."""
    leaves = ["key.scale"] * bool(vector.scale) + ["key.zero"] * bool(vector.zero)
    group = " dim" if vector.quant.startswith(("mode: nvfp4", "mode: mxfp")) else ""
    head = f"name: vectors\naxes: {{head: 1, dim: {dim}}}\nblock_size: {BLOCK_SIZE}\n"
    head += f"streams: {{key: {{dtype: float32, quant: {{{vector.quant}}}}}}}\nbuffers:\n"
    step = {"mode: nvfp4": "//16", "mode: mxfp8": "//32", "mode: mxfp4": "//32"}.get(vector.quant[:11], "")
    planes = "".join(f", {{{leaf}: slot head{group}{step if group else ''}}}" for leaf in leaves)
    size = len(vector.codes.split()) + len(f"{vector.scale} {vector.zero}".split())
    fields = [
        "key",
        *(f"{{{leaf}: {(group + step).strip()}}}" if group else leaf for leaf in leaves),
        f"{{pad: {3 + size % 2}}}",
    ]
    return {
        "planar": f"{head}  cache: {{order: block, fields: [{{key: slot head dim}}{planes}, {{pad: 3}}]}}\n",
        "inline": f"{head}  cache: {{order: block slot head, fields: [{{pad: 2}}, {', '.join(fields)}]}}\n",
    }


def expected(vector: Vector, place: str) -> tuple[int, bytes]:
    """Bytes of a block, and those of two blocks and a half with the row in its slots."""
    parts = [bytes.fromhex(text) for text in (vector.codes, vector.scale, vector.zero)]
    sizes = [len(part) for part in parts]
    if place == "planar":
        starts, steps, block = (
            [0, BLOCK_SIZE * sizes[0], BLOCK_SIZE * sum(sizes[:2])],
            sizes,
            BLOCK_SIZE * sum(sizes) + 3,
        )
    else:
        row = 2 + sum(sizes) + 3 + sum(sizes) % 2
        starts, steps, block = [2, 2 + sizes[0], 2 + sum(sizes[:2])], [row] * 3, BLOCK_SIZE * row
    whole = bytearray(b"\xa5" * (3 * block))
    for number in SLOTS:
        for part, start, step in zip(parts, starts, steps, strict=True):
            at = number // BLOCK_SIZE * block + start + number % BLOCK_SIZE * step
            whole[at : at + len(part)] = part
    return block, bytes(whole)


@pytest.mark.parametrize(
    "vector", VECTORS, ids=lambda vector: f"{vector.quant} of {' '.join(vector.values.split()[:8])}"
)
def test_bytes(vector: Vector) -> None:
    row = torch.tensor(numbers(vector.values)).view(1, 1, -1).repeat(3, 1, 1)
    scales = {} if vector.scale else {"key_scale": torch.ones(1)}
    scales |= {"key_scale_scale": torch.ones(1)} if "nvfp4" in vector.quant else {}
    slots = torch.tensor(SLOTS)
    for place, text in layouts(vector, row.shape[-1]).items():
        layout = load_text(text)
        module = module_of(layout)
        block, wanted = expected(vector, place)
        kind = module.allocate(0).dtype
        caches = [torch.full((3, *module.allocate(3).shape[1:]), 0xA5, dtype=torch.uint8).view(kind) for _ in range(2)]
        assert caches[0].numel() == 3 * block
        assert place == "planar" or caches[0].shape[-1] % 2 == 1
        module.append(row, caches[0], slots, *scales.values())
        reference.append(layout, {"key": row}, {"cache": caches[1]}, slots, scales=scales)
        for cache in caches:
            assert bytes(cache.view(torch.uint8).flatten().tolist()) == wanted, place


def test_the_record_of_656_bytes() -> None:
    """Latent all 1, rope all 2: scales of 2^-8, codes of 256, rope as it comes."""
    layout = shipped("mla_fp8_record")
    latent, rope = torch.ones(1, 512).bfloat16(), torch.full((1, 64), 2.0).bfloat16()
    wanted = bytes([0x78] * 512) + struct.pack("<4f", *[2.0**-8] * 4) + b"\x00\x40" * 64
    caches = [torch.zeros(1, 64, 656, dtype=torch.uint8) for _ in range(2)]
    module_of(layout).append(latent, rope, caches[0], torch.tensor([63]))
    reference.append(layout, {"latent": latent, "rope": rope}, {"cache": caches[1]}, torch.tensor([63]))
    for cache in caches:
        assert bytes(cache[0, 63].tolist()) == wanted
        assert not cache[0, :63].any()
