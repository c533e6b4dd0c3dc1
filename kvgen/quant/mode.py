"""What every encoding says of itself: facts for the language and for kernels, and its meaning in PyTorch.

Nothing here or in the modules beside imports torch before a tensor is at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kvgen.layout import Encoding


@dataclass(frozen=True, slots=True)
class Mode:
    """An encoding by its name in a layout file, and what a layout that says no more of it gets.

    ``code`` is the element type of codes and ``largest`` the largest of their values; ``clamp`` bounds integer codes.
    ``scale_dtype``, ``code_range``, ``floor`` (on the scale, 0 for none) and ``group`` (the ``n`` of
    ``token head dim//n``, None where ``per`` must be written) are those of the scale; a ``counted`` one has a static
    scale of its own. ``bits`` are those of a code. ``asymmetric`` codes count ``code_range`` steps above a zero. A
    scale that goes ``by_norm`` is the norm of a group's values over that of its codes.

    ``to_codes`` turns values that are already divided by their scale, float32, into codes; ``from_codes`` turns codes
    into float32. Codes are tensors of their element type, float8 ones of uint8.
    """

    name: str
    code: str
    largest: float
    code_range: float
    scale_dtype: str
    floor: float
    to_codes: Callable[[Encoding, Tensor], Tensor]
    from_codes: Callable[[Tensor], Tensor]
    clamp: tuple[int, int] | None = None
    group: int | None = None
    bits: int = 8
    asymmetric: bool = False
    counted: bool = False
    by_norm: bool = False
