"""Some combinations of encodings on a GPU, with the values of every edge; the rest of the product is interpreted."""

from __future__ import annotations

import pytest

from kvgen import harness
from kvgen.resolve import load_text
from tests.generated import module_of
from tests.product import CODES
from tests.test_product import DRAWN, MADE, REFUSED, cases, drawn

pytestmark = pytest.mark.gpu

EACH = 2
"""Combinations of each mode: every one is some kernels to compile."""


@pytest.mark.parametrize("codes", CODES)
def test_combinations_pass(codes: str) -> None:
    made = [point for point in drawn(DRAWN) if point.codes == codes and REFUSED.get(point, "") in MADE]
    for turn, point in enumerate(made[:EACH]):
        layout = load_text(point.text())
        names = [*cases(layout, turn, True), *cases(layout, 0, True)]
        report = harness.run(layout, module_of(layout), device="cuda", only=names)
        assert report.ok, f"{report}\n{point.text()}"
