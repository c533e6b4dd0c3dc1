"""What the device functions of codes are printed from, the same in every module: those that nothing uses go again."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.emit.codebook import Book, codebooks
from kvgen.emit.packing import Packing, packings
from kvgen.quant.turbo import GROUP


@dataclass(frozen=True, slots=True)
class Fp8:
    """The constants of an 8-bit float: how a float32's bits become its code, and back."""

    name: str
    dtype: str
    shift: int  # bits of float32's mantissa that are rounded off
    rebias: int
    smallest_normal: str  # as float32 bits
    magic_bits: str  # the power of two that small values are added to, as float32 bits
    magic: str
    largest: str
    nan: str
    negative_zero: bool
    has_infinity: bool
    is_nan: str

    @property
    def half(self) -> str:
        return f"0x{(1 << self.shift - 1) - 1:X}"

    @property
    def mantissa_bits(self) -> int:
        return 23 - self.shift

    @property
    def mantissa_mask(self) -> int:
        return (1 << self.mantissa_bits) - 1

    @property
    def triton(self) -> str:
        """Triton's type of it, where some target casts to it as the integers here do."""
        return {"fp8_e4m3": "tl.float8e4nv", "fp8_e5m2": "tl.float8e5"}.get(self.name, "")

    @property
    def native(self) -> bool:
        return bool(self.triton)

    @property
    def native_parameter(self) -> str:
        return ", native: tl.constexpr" if self.native else ""

    @property
    def bias_bits(self) -> str:
        return f"0x{self.rebias << self.shift:X}"

    @property
    def smallest(self) -> str:
        exponent = (int(self.smallest_normal, 16) >> 23) - 127 - self.mantissa_bits
        return repr(2.0**exponent)


FP8_FORMATS = (
    Fp8(
        "fp8_e4m3", "e4m3", 20, 960, "0x3C800000", "0x46800000", "16384.0", "0x7E", "0x7F", True, False, "size == 0x7F"
    ),
    Fp8("fp8_e5m2", "e5m2", 21, 448, "0x38800000", "0x43000000", "128.0", "0x7B", "0x7F", True, True, ""),
    Fp8(
        "fp8_e4m3fnuz",
        "e4m3fnuz",
        20,
        952,
        "0x3C000000",
        "0x46000000",
        "8192.0",
        "0x7F",
        "0x80",
        False,
        False,
        "code == 0x80",
    ),
    Fp8(
        "fp8_e5m2fnuz",
        "e5m2fnuz",
        21,
        444,
        "0x38000000",
        "0x42800000",
        "64.0",
        "0x7F",
        "0x80",
        False,
        False,
        "code == 0x80",
    ),
)


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer code: what cuts it to its bits, and how its bits are read."""

    name: str
    cut: str
    signed: str


INTEGERS = (
    Integer("int8", ".to(tl.uint8)", "code.to(tl.int8, bitcast=True)"),
    Integer("int4", " & 15", "((code ^ 8).to(tl.int8, bitcast=True) - 8)"),
    Integer("uint4", ".to(tl.uint8)", "code"),
)


@dataclass(frozen=True, slots=True)
class Codes:
    """All codes that there are functions of, for ``templates/kernels/codes.py.j2``."""

    fp8: tuple[Fp8, ...]
    integers: tuple[Integer, ...]
    packs: tuple[Packing, ...]
    codebooks: tuple[Book, ...]

    @property
    def group(self) -> str:
        """Parameters for the values of a group under one scale by norm, and their codes."""
        return ", ".join(f"{name}{i}" for name in ("x", "code") for i in range(GROUP))


CODES = Codes(FP8_FORMATS, INTEGERS, packings(), codebooks())
