"""The text of addresses."""

import pytest

from kvgen.axes import Digit
from kvgen.emit.index import Variable, address, digit_text, dim_name, subscript
from kvgen.layout import Dim
from kvgen.lower import lower
from kvgen.resolve import load_text

HEAD = "name: x\naxes: {head: 8, dim: 128}\nblock_size: 16\nbuffers:\n"
VECTORS = {
    "block": Variable("block", 0),
    "slot": Variable("slot", 0),
    "slot_number": Variable("slot_number", 0),
    "head": Variable("head"),
    "dim": Variable("dim", 1),
}


def text(order: str, stream: str = "key") -> list[str]:
    layout = load_text(HEAD + f"  pool: {{holds: [key, value], order: {order}}}\n")
    view = next(c.destination for c in lower(layout)[0].copies if c.stream == stream)
    names = {step.dim: f"s{step.dim}" for step in view.steps if step.dim is not None}
    extents = {"block": None, "slot": 16, "head": 8, "dim": 128, "slot_number": None, "kv": 2}
    found = address(layout, view, VECTORS, extents, names, 2)
    assert found.values == ()
    return list(found.elements)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("block slot kv head dim", ["block[:, None] * s0", "slot[:, None] * s1", "head * s3", "dim[None, :]"]),
        ("kv (block slot) (head dim)", ["slot_number[:, None] * s1", "head * 128", "dim[None, :]"]),
        (
            "block kv head dim//8 slot dim%8",
            [
                "block[:, None] * s0",
                "head * s2",
                "(dim // 8)[None, :] * s3",
                "slot[:, None] * s4",
                "(dim % 8)[None, :]",
            ],
        ),
        (
            "kv (block slot//4) head//2 (slot%4 head%2) dim",
            [
                "(slot_number // 4)[:, None] * s1",
                "(head // 2) * s2",
                "(slot % 4)[:, None] * s3 * 2",
                "(head % 2) * s3",
                "dim[None, :]",
            ],
        ),
        (
            "block slot//2%4 slot%2 slot//8 head kv dim",
            [
                "block[:, None] * s0",
                "(slot // 2 % 4)[:, None] * s1",
                "(slot % 2)[:, None] * s2",
                "(slot // 8)[:, None] * s3",
                "head * s4",
                "dim[None, :]",
            ],
        ),
    ],
)
def test_addresses(order: str, expected: list[str]) -> None:
    assert text(order) == expected


def test_the_second_of_a_pair_adds_its_stride() -> None:
    assert "s1" in text("block kv slot head dim", "value")
    assert "s1" not in text("block kv slot head dim", "key")
    assert "tl.cast(s0, tl.int64) * 16" in text("(kv slot) block head dim", "value")


def test_digits() -> None:
    assert digit_text(Digit("dim", 1, 128), "dim", 128) == "dim"
    assert digit_text(Digit("dim", 8, 16), "dim", 128) == "dim // 8"
    assert digit_text(Digit("dim", 1, 8), "dim", 128) == "dim % 8"
    assert digit_text(Digit("dim", 8, 2), "dim", 128) == "dim // 8 % 2"
    assert digit_text(Digit("dim", 8, None), "dim", None) == "dim // 8"


def test_subscripts() -> None:
    assert subscript(None, 3) == ""
    assert subscript(0, 1) == ""
    assert subscript(1, 3) == "[None, :, None]"


def test_names_of_dimensions() -> None:
    extents = {"slot": 16, "dim": 128, "block": None}
    assert dim_name(Dim((Digit("block", 1, None), Digit("slot", 1, 16))), extents) == "token"
    assert dim_name(Dim((Digit("slot", 4, 2),)), extents) == "slot_div4_mod2"
    assert dim_name(Dim(()), extents) == "one"
