"""Addresses that pass 32 bits are computed in 64."""

import pytest

from kvgen.emit.render import render_raw
from kvgen.resolve import load_text

HEAD = "name: x\naxes: {head: 2, dim: 160}\nblock_size: 16777216\nbuffers:\n"


@pytest.mark.parametrize(
    ("order", "wide"),
    [
        ("request head (dim position)", True),  # 160 times 2**24 elements in one dimension
        ("request head position dim", False),
    ],
)
def test_a_constant_that_leaves_32_bits_widens_its_axis(order: str, wide: bool) -> None:
    text = render_raw(load_text(HEAD + f"  pool: {{holds: [key, value], order: kv {order}}}\n"))
    found = {line.strip() for line in text.splitlines() if line.strip().startswith("dim = ")}
    assert found == {"dim = tl.arange(0, 256)" + (".to(tl.int64)" if wide else "")}
