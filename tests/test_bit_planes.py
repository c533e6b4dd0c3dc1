"""Codes whose bits lie apart: bytes counted by hand, addresses by brute force, and what is done with them."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvgen import documents, harness, reference
from kvgen.canonical import canonical
from kvgen.lower_transfer import lower_transfer
from kvgen.resolve import load_text
from kvgen.schedule_transfer import moves_bytes
from tests.generated import module_of

INT4 = "{dtype: float32, quant: {mode: int4, scale: {per: token head, dtype: float16}}}"
TURBO3 = "{dtype: float32, quant: {mode: turbo3}}"
NVFP4 = "{dtype: float32, quant: {mode: nvfp4, scale: {scale: none}}}"


def layout_text(stream: str, dim: int, buffers: str, name: str = "apart", heads: int = 1) -> str:
    head = f"name: {name}\naxes: {{head: {heads}, dim: {dim}}}\nblock_size: 4\nstreams: {{key: {stream}}}\n"
    return f"{head}buffers:\n{buffers}"


INT4_ROW = [7, 0, 1, 2, 3, -1, -2, -7]  # codes 7 0 1 2 3 F E 9
INT4_PLANES = "B5 79 61 E0"
E2M1_ROW = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 6]  # codes 0 to 7, 9 to F, 7
E2M1_PLANES = "AA D5 CC E6 F0 F8 00 7F"
TURBO3_ROW = [*range(-8, 8)]  # indices 0 0 1 1 1 2 2 3 4 4 5 5 6 6 6 7
TURBO3_PLANES = "9C 8C E0 F0 00 FF"


@pytest.mark.parametrize(
    ("stream", "row", "planes", "scale"),
    [
        (INT4, INT4_ROW, INT4_PLANES, "00 3C"),
        (NVFP4, E2M1_ROW, E2M1_PLANES, "38"),
        (TURBO3, TURBO3_ROW, TURBO3_PLANES, "46"),
    ],
    ids=["int4", "nvfp4", "turbo3"],
)
@pytest.mark.parametrize("place", ["inline", "planar", "outermost"])
def test_bytes(stream: str, row: list[float], planes: str, scale: str, place: str) -> None:
    """Bit 0 of all values, then bit 1, and so on; value i in bit i % 8 of byte i // 8."""
    group = "" if stream == INT4 else " dim//16"
    buffers = {
        "inline": "  cache: {order: block slot head, fields: "
        f"[{{pad: 1}}, {{key: bit dim}}, {{key.scale: 1{group}}}]}}",
        "planar": f"  cache: {{order: block, fields: [{{key: slot head bit dim}}, {{key.scale: slot head{group}}}]}}",
        "outermost": f"  cache: {{holds: key, order: bit block slot head dim}}\n"
        f"  scales: {{holds: key.scale, order: block slot head{group}}}",
    }[place]
    layout = load_text(layout_text(stream, len(row), buffers + "\n"))
    assert load_text(canonical(layout)) == layout
    wanted, each = bytes.fromhex(planes), len(row) // 8
    source, slots = torch.tensor(row, dtype=torch.float32).view(1, 1, -1), torch.tensor([6])
    module, names = module_of(layout), [buffer.name for buffer in layout.buffers]
    for generated in (True, False):
        made = module.allocate(2)
        caches = dict(zip(names, made if isinstance(made, tuple) else (made,), strict=True))
        if generated:
            module.append(source, *caches.values(), slots)
        else:
            reference.append(layout, {"key": source}, caches, slots)
        cache = caches["cache"]
        if place == "inline":
            found, left = cache[1, 2, 0, 1:], bytes.fromhex(scale)
        elif place == "planar":
            found, left = cache[1, 2 * len(wanted) :][: len(wanted)], b""
            at = 4 * len(wanted) + 2 * len(bytes.fromhex(scale))
            assert bytes(cache[1, at:][: len(bytes.fromhex(scale))].tolist()) == bytes.fromhex(scale)
        else:
            assert cache.shape == (len(wanted) // each, 2, 4, 1, each)
            found, left = cache[:, 1, 2, 0].reshape(-1), b""
        assert bytes(found.tolist()) == wanted + left


ORDERS = [
    "block slot head dim//16 bit dim%16",
    "bit%2 block head bit//2 slot dim",
    "block dim//16%2 head bit (slot dim//32) dim%2 dim//2%8",
]


@pytest.mark.parametrize("order", ORDERS)
def test_bits_lie_where_brute_force_says(order: str) -> None:
    """The terms of the order evaluated as Python, for every value and bit; value 0 of eight in the lowest bit."""
    text = layout_text(
        "{quant: {mode: int4, scale: {per: [], source: static}}}",
        64,
        f"  cache: {{holds: key, order: {order}}}\n",
        heads=2,
    )
    layout, sizes = load_text(text), {"block": 2, "slot": 4, "head": 2, "dim": 64, "bit": 4}
    cache = module_of(layout).allocate(2)
    codes = torch.randint(-7, 8, (8, 2, 64), generator=torch.Generator().manual_seed(0))
    one = {"key_scale": torch.ones(1, dtype=torch.float16)}
    reference.append(layout, {"key": codes.bfloat16()}, {"cache": cache}, torch.arange(8), scales=one)
    terms = order.replace("(", "").replace(")", "").split()
    index = {axis: [] for axis in sizes}
    for values in itertools.product(*map(range, sizes.values())):
        for axis, value in zip(sizes, values, strict=True):
            index[axis].append(value)
    index = {axis: torch.tensor(values) for axis, values in index.items()}
    digits = [eval(term, {}, index) for term in terms]
    extents = [int(digit.max()) + 1 for digit in digits]
    at = torch.zeros_like(digits[0])
    for digit, extent in zip(digits, extents, strict=True):
        at = at * extent + digit
    stored = cache.view(-1)[at // 8] >> (at % 8) & 1
    wanted = codes[index["block"] * 4 + index["slot"], index["head"], index["dim"]] >> index["bit"] & 1
    assert torch.equal(stored.long(), wanted)
    report = harness.run(layout, module_of(layout), only=["append/T7", "gather/transposed", "gather_codes/skipped_out"])
    assert report.ok, str(report)


def test_codes_are_handed_out_bit_by_bit() -> None:
    buffers = "  cache: {order: block slot head, fields: [{key: dim//8 bit dim%8}, key.scale]}\n"
    layout = load_text(layout_text(INT4, 16, buffers))
    module, slots = module_of(layout), torch.tensor([3])
    cache = module.allocate(1)
    module.append(torch.tensor([*INT4_ROW, *INT4_ROW[::-1]]).float().view(1, 1, 16), cache, slots)
    codes, _ = module.gather_codes(cache, slots)
    forwards, backwards = bytes.fromhex(INT4_PLANES), [int(f"{b:08b}"[::-1], 2) for b in bytes.fromhex(INT4_PLANES)]
    assert codes.flatten().tolist() == [b for pair in zip(forwards, backwards, strict=True) for b in pair]


APART = "  cache: {holds: key, order: block slot head dim//32 bit dim%32}\n"
APART += "  scales: {holds: key.scale, order: block slot head dim//16}\n"
OTHER = "  cache: {order: block, fields: [{key: bit head slot dim}, {key.scale: slot head dim//16}]}\n"
TOGETHER = "  cache: {order: block slot head, fields: [key, {key.scale: dim//16}]}\n"


@pytest.mark.parametrize(
    ("source", "destination", "as_bytes"),
    [(APART, OTHER, True), (APART, TOGETHER, False), (TOGETHER, OTHER, False)],
    ids=["apart", "to_together", "from_together"],
)
def test_transfers(source: str, destination: str, as_bytes: bool, tmp_path) -> None:
    """Bits apart on both sides are moved as bytes, a copy for each; else codes are put together anew."""
    for name, buffers in (("first", source), ("second", destination)):
        text = layout_text(TURBO3, 64, buffers, name, heads=3)
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    text = "name: moved\ntransfer: {from: first, to: second}\nlayers: one\n"
    transfer = documents.load_text(text, str(tmp_path / "moved.yaml"))
    copies = [copy for copy in lower_transfer(transfer)[0].copies if copy.leaf == "key"]
    assert [moves_bytes(copy) for copy in copies] == ([True] * 3 if as_bytes else [False])
    found = harness.run(transfer, module_of(transfer), only=["transfer/T7", "transfer_blocks/padded"])
    assert found.ok, str(found)
