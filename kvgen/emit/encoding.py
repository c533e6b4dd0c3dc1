"""Encodings in kernels: which functions make and read codes, and what a scale is computed from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from kvgen.axes import Digit
from kvgen.emit.sections import Masks, ScaleContext, Side, ZeroContext
from kvgen.layout import Encoding, Scale
from kvgen.plan import View
from kvgen.tiles import Tile

FP8 = {
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "float8_e4m3fnuz": "fp8_e4m3fnuz",
    "float8_e5m2fnuz": "fp8_e5m2fnuz",
}
NATIVE = ("float8_e4m3fn", "float8_e5m2")
"""Codes that sm_90 and later cast to as the integer recipe does, and quicker."""
E2M1 = "e2m1"
INTEGERS = ("int8", "int4", "uint4")
WIDE = {"float32": "tl.float32", "float16": "tl.float16", "bfloat16": "tl.bfloat16"}


def code_type(encoding: Encoding) -> str:
    """What codes are in a kernel: a byte each, or the type a value is cast to."""
    return WIDE.get(encoding.code, "tl.uint8")


def scale_type(dtype: str) -> str:
    """What a stored scale or zero is in a kernel."""
    return WIDE.get(dtype, "tl.uint8")


def codes_of(encoding: Encoding, stream: str, source: str) -> str:
    """The codes of a stream's values, which are divided by their scale first unless they are divided on the way.

    ``source`` is the type that they came in.
    """
    values = stream
    if divides_itself(encoding):
        values += ", scale" + (", lift" if lifted(encoding) else "")
        values += "" if _power_of_two(encoding.scale) else f", {source}"
    if in_bytes(encoding):
        return f"_int8_bytes({values}{limits(encoding)}, NATIVE)"
    if encoding.code in INTEGERS and not _bounded(encoding):
        values = f"_number({stream})"
    return f"{encoder(encoding)}({values}{limits(encoding)})"


def in_bytes(encoding: Encoding) -> bool:
    """Whether codes are made of what may be no number, in words of four where processors have instructions for it."""
    return encoding.code == "int8" and encoding.rounding == "even" and encoding.clamp[1] == 127


def pairs_at_once(encoding: Encoding, stream: str, source: str, apart: str, outer: str, transposed: bool) -> str:
    """The bytes that pairs of a stream's codes share, made of values and their scale in words of several.

    ``apart`` is the shape of the tile with the codes of a byte last, ``outer`` what its scales are counted in; words of
    planes, where they are ``transposed``. Empty where codes are made one by one: of values or scales of so many bits
    that quotients must be rounded to tell ties.
    """
    scale = encoding.scale
    if _uint4(encoding):
        return f"_uint4_pairs_near({stream}, scale, {apart}, NATIVE)"
    if source == "tl.float32":
        return ""
    if _int4(encoding):
        return f"_int4_{'planes' if transposed else 'pairs'}_near({stream}, scale, {apart}, {source}, NATIVE)"
    if transposed or not divides_itself(encoding):
        return ""
    if _power_of_two(scale):
        kind, divisor = "shifted", "scale"
    elif lifted(encoding) and scale.dtype == "float8_e4m3fn":
        kind, divisor = "lifted", f"scale, {outer}, lift"
    elif _near(scale):
        kind, divisor = "near", "scale"
    else:
        return ""
    return f"_e2m1_pairs_{kind}({stream}, {divisor}, {apart}, {source}, NATIVE)"


def in_words(encoding: Encoding) -> bool:
    """Whether bfloat16 values are taken out of words by twos, codes being made one by one: where that was quicker."""
    scale = encoding.scale
    return in_bytes(encoding) or (encodes_natively(encoding) and scale is not None and scale.dynamic)


def _int4(encoding: Encoding) -> bool:
    """Whether codes are those of symmetric int4, of quotients by scales of 11 bits or less."""
    plain = encoding.code == "int4" and encoding.rounding == "even" and encoding.clamp == (-7, 7)
    return plain and _bounded(encoding) and encoding.zero is None and _near(encoding.scale)


def _uint4(encoding: Encoding) -> bool:
    """Whether codes are those of int4 above a minimum, of quotients by scales of 11 bits or less."""
    zero, plain = encoding.zero, encoding.code == "uint4" and encoding.rounding == "even" and encoding.clamp == (0, 15)
    return plain and zero is not None and zero.kind == "minimum" and _bounded(encoding) and _near(encoding.scale)


def _bounded(encoding: Encoding) -> bool:
    """Whether quotients are those of integers: bounded, and numbers."""
    scale, zero = encoding.scale, encoding.zero
    plain = scale is not None and scale.arithmetic == "divide" and not _power_of_two(scale)
    return encoding.code in INTEGERS and plain and (zero is None or zero.kind == "minimum")


def shares_one(encoding: Encoding) -> bool:
    """Whether codes are 8-bit floats of values over a scale that is handed in and that all of them share."""
    scale = encoding.scale
    plain = scale is not None and not scale.dynamic and not scale.axes and scale.arithmetic == "divide"
    return plain and encoding.code in FP8


def divided(encoding: Encoding, stream: str, source: str, busy: bool, ready: str = "") -> str:
    """The values of a stream over their scale; ``source`` is the type that they came in.

    Where a kernel is ``busy``, with stages or with turning rows, arithmetic counts; elsewhere memory does. What values
    are divided by may be at hand, under a name, before they are worked on: ``ready``.
    """
    scale = encoding.scale
    if scale.arithmetic == "multiply":
        if _inverted(encoding):
            return f"{stream} * _reciprocal(scale, NATIVE)"
        inverse = "inverse" if scale.given == "inverse" else "tl.div_rn(1.0, scale)"
        if encoding.code in INTEGERS:  # what is no number has the code of 0 anyway
            return f"{stream} * tl.where(scale == 0.0, 0.0, {inverse})"
        return f"_times({stream}, {inverse}, scale)"
    if _bounded(encoding):
        quotient = f"_near_quotient({stream}, scale)" if _near(scale) else f"_quotient({stream}, scale, {source})"
        if in_bytes(encoding):
            return quotient
        return f"{'_held_number' if encoding.clamp[0] == 0 else '_number'}({quotient})"
    if _power_of_two(scale):
        return f"_shifted({stream}, scale)"
    if ready:
        return f"_over_known({stream}, {ready}, {source}, MANY)"
    return f"{'_over_one' if busy and shares_one(encoding) else '_over'}({stream}, scale, {source})"


def divides_itself(encoding: Encoding) -> bool:
    """Whether codes are made of values and scale at once, which takes less than a quotient of any size does."""
    scale = encoding.scale
    return encoding.code == E2M1 and scale is not None and encoding.zero is None and scale.arithmetic == "divide"


def encoder(encoding: Encoding) -> str:
    """The function that makes codes of float32 values."""
    if encoding.code in WIDE:
        return f"_to_{encoding.code}"
    if encoding.code in INTEGERS:
        return f"_{encoding.code}_codes_{encoding.rounding}"
    if encoding.code == E2M1 and divides_itself(encoding):
        if _power_of_two(encoding.scale):
            return "_e2m1_codes_shifted"
        if lifted(encoding):
            return "_e2m1_codes_lifted"
        return "_e2m1_codes_near" if _near(encoding.scale) else "_e2m1_codes_over"
    return "_e2m1_codes_of" if encoding.code == E2M1 else f"_{FP8.get(encoding.code, encoding.code)}_codes"


def limits(encoding: Encoding) -> str:
    """What an encoder takes beside the values: the codes that integers are clamped to, or whether casts are native."""
    if encoding.code in INTEGERS:
        return "".join(f", {limit}" for limit in encoding.clamp)
    return ", NATIVE" if encoding.code in (*NATIVE, E2M1) else ""


def encodes_natively(encoding: Encoding | None) -> bool:
    """Whether some targets make codes of values in ways of their own."""
    if encoding is None:
        return False
    return casts(encoding) or in_bytes(encoding) or _inverted(encoding)


def casts(encoding: Encoding | None) -> bool:
    """Whether codes or scales are 8-bit floats that some targets cast to themselves."""
    if encoding is None:
        return False
    return encoding.code in (*NATIVE, E2M1) or (encoding.scale is not None and encoding.scale.dtype in NATIVE)


def decoder(encoding: Encoding) -> str:
    """The function that reads codes as float32 values."""
    if encoding.code in WIDE:
        return "_to_float32"
    return f"_{FP8.get(encoding.code, encoding.code)}_values"


def describe(encoding: Encoding) -> str:
    """A few words on an encoding, for a comment."""
    rotated = "rotated, " if encoding.rotation else ""
    if encoding.scale is None:
        return f"{rotated}cast to {encoding.code}"
    names = {"slot": "tokens", "dim": "dims"}
    axes = [f"{axis.step} {names[axis.name]}" if axis.step > 1 else axis.name for axis in encoding.scale.axes]
    per = " and ".join(["token" if name == "slot" else name for name in axes if name != "block"]) or "tensor"
    kind = "a" if encoding.scale.dynamic else "a given"
    return f"{rotated}{encoding.mode} with {kind} scale per {per}"


def reduced(reduce: str, text: str, tile: Tile, kept: Sequence[str]) -> str:
    """``text``, the values of a tile, reduced over the axes that share one scale."""
    if not kept:
        return f"{reduce}({text})" if tile.order else text
    for i in reversed(range(len(tile.order))):
        if tile.order[i] not in kept:
            text = f"{reduce}({text}, axis={i}, keep_dims=True)"
    return text


def regroup(view: View, scale: Scale, extents: dict[str, int | None]) -> tuple[View, dict[str, int | None]]:
    """The view of a scale with ``dim`` counted in its groups, and the extents to print it with."""
    group = next((axis for axis in scale.axes if axis.name == "dim"), None)
    if group is None or group.step == 1:
        return view, extents
    steps = tuple(
        replace(s, digit=Digit("dim", s.digit.div // group.step, s.digit.size)) if s.digit.axis == "dim" else s
        for s in view.steps
    )
    return replace(view, steps=steps), extents | {"dim": group.count}


STORED_AS = {"float32": "", "float16": "_to_scale_float16", "bfloat16": "_to_scale_bfloat16", "uint8": "_to_uint8"}
NO_MASKS = Masks()
Loaded = Literal["early", "placed", "late"]
"""When a scale is loaded: with the values of all streams, behind them, or where it is used."""


def build_zero(
    encoding: Encoding,
    stream: str,
    side: Side,
    masks: Masks,
    tile: Tile,
    kept: Sequence[str],
    bounds: str,
    own: str,
    by_twos: str,
) -> ZeroContext:
    """Everything a section says of its zero. Lanes outside ``bounds`` are no part of a group.

    ``by_twos``: what finds both extremes of values as they come, where these have 16 bits and lie two in a word.
    """
    inside = f", {bounds}" if bounds else ""
    guarded = "_within" if bounds else "_numbers"
    lowest = reduced("tl.min", f"{guarded}({stream}, 3.4028234663852886e38{inside})", tile, kept)
    highest = reduced("tl.max", f"{guarded}({stream}, -3.4028234663852886e38{inside})", tile, kept)
    zero = encoding.zero
    return ZeroContext(
        side=side,
        masks=masks,
        extremes=by_twos or f"_extremes({lowest}, {highest})",
        by_twos=bool(by_twos),
        point=zero.kind == "point",
        extended=zero.kind == "point" and not zero.clamped,
        last=repr(float(encoding.clamp[1])),
        stored_as=STORED_AS[zero.dtype],
        decode="_to_float32",
        own=own,
    )


def _power_of_two(scale: Scale) -> bool:
    """Whether a scale and its inverse are normal powers of two for sure: multiplying is then the same as dividing."""
    if not scale.dynamic or scale.scale or scale.encode != "stored":
        return False
    normal = scale.grid == "pow2" and scale.floor_on == "scale" and scale.floor >= 2.0**-126
    return scale.dtype == "float8_e8m0fnu" or (scale.dtype == "float32" and normal)


def _near(scale: Scale) -> bool:
    """Whether scales are so near 1, if not 0, that values can be divided by them as they are."""
    small = scale.dtype in ("float16", "float8_e4m3fn")
    return small and scale.dynamic and scale.encode == "stored" and scale.scale is None


def lifted(encoding: Encoding) -> bool:
    """Whether scales are so near one factor, which is the same for all, that nothing else need be brought near 1."""
    scale = encoding.scale
    if not divides_itself(encoding) or scale.scale is None or scale.scale.axes:
        return False
    return scale.grid != "pow2" and _near(replace(scale, scale=None))


def _floored(scale: Scale, zeroed: bool) -> bool:
    """Whether magnitudes are finite, and what is below 2**-100 of them or of scales does not count.

    The distance of the lowest from the highest, of which scales with a zero are made, may be infinite.
    """
    floored = scale.floor >= 2.0**-100 and scale.floor_on in ("amax", "scale")
    return floored and scale.dynamic and scale.scale is None and not zeroed


def _inverted(encoding: Encoding) -> bool:
    """Whether values are multiplied by the inverse of a scale that lies, with it, within 2**-126 and 2**126."""
    scale = encoding.scale
    if scale is None or not _floored(scale, encoding.zero is not None):
        return False
    stored = scale.floor_on == "scale" and scale.dtype == "float32" and scale.encode == "stored"
    return stored and scale.arithmetic == "multiply" and scale.code_range >= 4.0


def _short(number: float) -> bool:
    """Whether a number has 16 bits or less."""
    return (math.frexp(number)[0] * 2.0**16).is_integer()


def _at_once(scale: Scale) -> bool:
    """Whether a stored power of two follows from the bits of amax: of steps of 2 or more, tiny ones need no care."""
    plain = scale.dynamic and scale.encode == "stored" and not scale.scale and scale.floor_on != "scale"
    return plain and scale.dtype == "float8_e8m0fnu" and scale.code_range >= 2.0


def _quotient(scale: Scale, steps: str, lift: str, zeroed: bool) -> str:
    """amax over steps: rounded as a division is, or only so that what is stored of it is the same."""
    if lift:
        return f"_lifted_ratio(amax, {steps}, lift, {lift}, NATIVE)"
    if scale.dtype in ("float8_e4m3fn", "float16") and scale.encode == "stored" and scale.grid != "pow2":
        return f"_ratio(amax, {steps if scale.scale else f'tl.full((), {steps}, tl.float32)'})"
    if _floored(scale, zeroed) and _short(scale.code_range):
        return f"_over_steps(amax, {steps})"
    return f"tl.div_rn(amax, {steps})"


def build_scale(
    scale: Scale,
    stream: str,
    side: Side,
    masks: Masks,
    largest: str,
    outer: Side = Side(""),  # noqa: B008
    outer_masks: Masks = NO_MASKS,
    zeroed: bool = False,
    loaded: Loaded = "late",
    lift: str = "",
    groups: str = "",
    stretch: str = "",
    shaped: str = "",
    by_norm: str = "",
    table: str = "",
    eights: str = "",
    kept: str = "stored",
) -> ScaleContext:
    """Everything a section says of its scale; ``lift`` is the type that values came in where scales are lifted."""
    # Each stream has a name of its own for a scale that several share: tiles differ.
    own, outers = ("scale", "outer") if loaded == "late" else (f"{stream}_scale", f"{stream}_scale_scale")
    given = outers if scale.scale else own
    e8m0 = scale.dtype == "float8_e8m0fnu"
    at_once = _at_once(scale) and not zeroed
    formats = {"float8_e4m3fn": "_fp8_e4m3_codes", "float8_e8m0fnu": f"_e8m0_codes_{scale.exponent}"}
    stored_as = (STORED_AS | formats)[scale.dtype]
    pow2, as_stored = scale.grid == "pow2" and not e8m0, scale.encode == "stored"
    steps = repr(float(scale.code_range)) + (f" * {given}" if scale.scale else "")
    limit = ", NATIVE" if scale.dtype in NATIVE else ""
    power = f"_pow2_{scale.exponent}(scale, amax, {steps}, {scale.floor_on == 'scale'})"
    stored = shaped or f"{stored_as}({power if e8m0 else 'scale'}{limit})"
    return ScaleContext(
        side=side,
        masks=masks,
        dynamic=scale.dynamic,
        magnitude=largest,
        steps=steps,
        floor=repr(float(scale.floor)),
        floor_on_amax=scale.floor_on == "amax",
        floor_on_scale=scale.floor_on == "scale",
        pow2=pow2,
        power=power,
        apart=not at_once,
        quotient=_quotient(scale, steps, lift, zeroed),
        stored=f"_e8m0_over_{scale.exponent}(amax, {steps})" if at_once else stored,
        cast_limits=limit,
        rounds=bool(stored_as),
        decode={"float8_e4m3fn": "_fp8_e4m3_values", "float8_e8m0fnu": "_e8m0_values"}.get(scale.dtype, "_to_float32"),
        bounded=(zeroed or scale.scale is not None or scale.code_range < 1.0)
        and not (stored_as and as_stored and not pow2),
        keeps_exact=pow2 and not as_stored,
        exact="exact" if pow2 else "scale",
        as_stored=as_stored,
        counted=scale.scale is not None,
        lifted=bool(lift),
        outer=outer,
        outer_masks=outer_masks,
        kept=kept,
        inverse=scale.given == "inverse",
        handed="",
        divisor="",
        groups=groups,
        stretch=stretch,
        by_norm=by_norm,
        table=table,
        eights=eights,
        own=own,
        given=given,
        early=loaded == "early",
        placed=loaded == "placed",
        late=loaded == "late",
    )
