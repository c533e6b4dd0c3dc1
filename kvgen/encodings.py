"""What ``store`` and ``quant`` of a stream mean: its ``Encoding``, with what its mode leaves unsaid filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvgen.axes import Axis
from kvgen.diagnostics import Diagnostic
from kvgen.layout import Encoding, Scale
from kvgen.modes import MODES, SCALE_DTYPES, Mode
from kvgen.orders import OrderError, Term, divisor, parse_order
from kvgen.source import Location, Source
from kvgen.spec import QuantSpec, ScaleSpec, StreamSpec
from kvgen.suggest import suggestion
from kvgen.values import LARGEST

_LOGICAL = ("block", "slot", "head", "dim", "layer")
_WORDS = ("token", *_LOGICAL, "request", "position")
_SOURCES = ("float32", "float16", "bfloat16")


@dataclass(slots=True)
class Encodings:
    """Resolves the encoding of one stream; ``problems`` collects what is wrong with it.

    ``axes`` are all that its scale may vary over; ``unsure`` are params that were wrong and reported before.
    """

    source: Source
    name: str
    spec: StreamSpec
    axes: Mapping[str, Axis]
    params: Mapping[str, int]
    unsure: frozenset[str] = frozenset()
    problems: list[Diagnostic] = field(default_factory=list)

    def encoding(self) -> Encoding | None:
        """The encoding; None where there is none, or where something is wrong with it."""
        store, quant = self.spec.store, self.spec.quant
        if store is None and quant is None:
            return None
        if store is not None and quant is not None:
            self._report("KV210", "either `store` or `quant`: each says what is stored", "store", key=True)
            return None
        if others := [dtype for dtype in self.spec.dtype if dtype not in _SOURCES]:
            message = f"`{others[0]}` values cannot be encoded: sources are float32, float16 or bfloat16"
            self._report("KV210", message, "dtype")
        if quant is None:
            if set(self.spec.dtype) == {store}:
                hint = "without `store` values are stored as they come; `dtype` says which are taken"
                self._report("KV210", f"`{self.name}` comes as {store}: there is nothing to cast", "store", hint=hint)
            return Encoding("cast", store)
        return self._quant(quant)

    def _report(self, code: str, message: str, *where: str, hint: str | None = None, key: bool = False) -> None:
        location: Location = ("streams", self.name, *where)
        span = self.source.at_key(location) if key else self.source.at(location)
        self.problems.append(Diagnostic(code, message, span, hint))

    def _quant(self, spec: QuantSpec) -> Encoding | None:
        mode = MODES[spec.mode]
        clamp = mode.clamp
        if mode.clamp is None:
            if spec.clamp is not None:
                message = f"`clamp` belongs to integers; codes of {spec.mode} end at {mode.largest:g}"
                self._report("KV211", message, "quant", "clamp", key=True)
            if spec.round == "away":
                hint = "leave it out"
                self._report("KV211", f"{spec.mode} rounds to even", "quant", "round", hint=hint)
        elif spec.clamp is not None:
            clamp = spec.clamp
            if clamp[0] < -128 or clamp[1] > 127:
                message = f"a clamp to {clamp[0]}..{clamp[1]}: codes of {spec.mode} are from -128 to 127"
                self._report("KV212", message, "quant", "clamp")
        scale = self._scale(spec, mode, clamp)
        return scale and Encoding(spec.mode, mode.code, spec.round or "even", clamp, scale)

    def _scale(self, quant: QuantSpec, mode: Mode, clamp: tuple[int, int] | None) -> Scale | None:
        spec = quant.scale
        axes = self._per(quant, mode)
        if axes is None:
            return None
        names = {axis.name for axis in axes}
        dynamic = spec.source == "dynamic" if spec.source else "slot" in names
        self._check_source(axes, dynamic)
        if dynamic:
            axes = tuple(axis for axis in axes if axis.name != "layer")  # what is stored has it wherever its buffer has
        dtype = SCALE_DTYPES[spec.dtype] if spec.dtype else mode.scale_dtype
        if mode.fixed and dtype != mode.scale_dtype:
            message = f"the scale of {quant.mode} is e8m0"
            self._report("KV211", message, *_SCALE, "dtype", hint="mode `fp8_e4m3` takes other types of scale")
        exponents = dtype == "float8_e8m0fnu"
        grid = spec.grid or ("pow2" if exponents else "any")
        if exponents and grid == "any":
            self._report("KV211", "an e8m0 scale is a power of two", *_SCALE, "grid", hint="leave it out")
        self._check_meaning(spec, mode, dynamic, rounded=grid == "pow2" or dtype != "float32", pow2=grid == "pow2")
        code_range = spec.range or mode.largest
        if dynamic:
            self._check_range(quant, mode, code_range, clamp)
        floor_on, floor = spec.floor or (("scale", mode.floor) if mode.floor else ("none", 0.0))
        return Scale(
            name=f"{self.name}.scale",
            axes=axes,
            dynamic=dynamic,
            dtype=dtype,
            stored=bool(names & {"block", "slot"}),
            grid=grid,
            exponent=spec.exponent or "ceil",
            code_range=code_range if dynamic else mode.largest,
            floor_on=None if floor_on == "none" or not dynamic else floor_on,
            floor=floor if dynamic else 0.0,
            arithmetic=spec.arithmetic or "divide",
            given=spec.given or "scale",
            encode=spec.encode or "stored",
        )

    def _check_source(self, axes: tuple[Axis, ...], dynamic: bool) -> None:
        """Append computes a scale from one token, and takes a static one as an argument."""
        steps = {axis.name: axis.step for axis in axes}
        if not dynamic:
            if steps.keys() & {"block", "slot"}:
                message = "a static scale that varies over tokens or blocks is not supported by this version of kvgen"
                hint = "`source: dynamic` where it varies over `token`, or a `per` without `token` and `block`"
                self._report("KV204", message, *_SCALE, "source" if self.spec.quant.scale.source else "per", hint=hint)
            return
        if {"block", "slot"} <= steps.keys() and steps["slot"] == 1:
            return
        if steps.get("slot", 1) > 1:
            message = f"a dynamic scale of {steps['slot']} tokens cannot be appended: they come one by one"
            hint = "let it vary over `token`"
        else:
            message = (
                "a dynamic scale that tokens share cannot be appended: a later one would change it for those stored"
            )
            hint = "let it vary over `token`, or say `source: static`"
        self._report("KV213", message, *_SCALE, "per", hint=hint)

    def _check_meaning(self, spec: ScaleSpec, mode: Mode, dynamic: bool, *, rounded: bool, pow2: bool) -> None:
        """What is said must mean something here; a default may always be written."""
        floor = ("scale", mode.floor) if mode.floor else ("none", 0.0)
        given = "a static scale is given, not computed"
        rules = [
            ("range", spec.range not in (None, mode.largest) and not dynamic, given),
            ("floor", spec.floor not in (None, ("none", 0.0), floor) and not dynamic, given),
            ("grid", spec.grid == "pow2" and not dynamic and not mode.fixed, given),
            ("exponent", spec.exponent == "floor" and not dynamic, given),
            (
                "exponent",
                spec.exponent == "floor" and dynamic and not pow2,
                "only a power of two has one: `grid: pow2`",
            ),
            ("given", spec.given == "inverse" and dynamic, "a dynamic scale is computed, not given"),
            ("encode", spec.encode == "exact" and not dynamic, given),
            ("encode", spec.encode == "exact" and dynamic and not rounded, "a float32 scale is stored exactly"),
        ]
        for key, wrong, why in rules:
            if wrong:
                self._report("KV211", f"`{key}` means nothing here: {why}", *_SCALE, key, key=True)

    def _check_range(self, quant: QuantSpec, mode: Mode, code_range: float, clamp: tuple[int, int] | None) -> None:
        largest = min(-clamp[0], clamp[1]) if clamp else mode.largest
        if code_range <= largest:
            return
        where, what = ("clamp", "the clamp") if quant.scale.range is None else (None, "the largest code")
        message = f"amax meets {code_range:g}, past {what}, {largest:g}"
        location = ("quant", "clamp") if where else (*_SCALE, "range")
        self._report("KV212", message, *location, hint=f"`range` up to {largest:g}")

    def _per(self, quant: QuantSpec, mode: Mode) -> tuple[Axis, ...] | None:
        """The axes of the scale in logical order, or None after reporting why there are none."""
        spec = quant.scale
        if spec.per is None and mode.per is None:
            where = _SCALE if self._written(*_SCALE) else _SCALE[:1]
            hint = "`[]` for one of the whole tensor, or `head`, `token`, `token head`, `token head dim//32`"
            self._report("KV202", f"`per` is missing: what the scale of {quant.mode} varies over", *where, hint=hint)
            return None
        before = len(self.problems)
        found: dict[str, Axis] = {}
        is_list = isinstance(spec.per, tuple)
        for index, text in enumerate(spec.per if is_list else [spec.per if spec.per is not None else mode.per]):
            where = (*_SCALE, "per", index) if is_list else (*_SCALE, "per")
            try:
                self._add_axes(text, found, implied=spec.per is None)
            except OrderError as error:
                span = self.source.inside(("streams", self.name, *where), error.start, error.end)
                self.problems.append(Diagnostic(error.code, error.message, span, error.hint))
            except _Unsure:
                return None
        if len(self.problems) > before:
            return None
        return tuple(found[name] for name in _LOGICAL if name in found)

    def _written(self, *where: str) -> bool:
        key, _ = self.source.node(("streams", self.name, *where))
        return key is not None and key.text == where[-1]

    def _add_axes(self, text: str, found: dict[str, Axis], implied: bool) -> None:
        for group in parse_order(text):
            if len(group.terms) != 1 or text[group.start] == "(":
                raise OrderError("KV301", "`per` is a list of axes", group.start, group.end)
            term = group.terms[0]
            if implied and term.axis == "head" and "head" not in self.axes:
                continue  # a stream without heads has scales without them
            for axis in self._axes_of(term):
                if axis.name in found:
                    raise OrderError("KV305", f"`{axis.name}` is named twice", term.start, term.end)
                found[axis.name] = axis

    def _axes_of(self, term: Term) -> tuple[Axis, ...]:
        if term.axis == "kv":
            hint = "each of the two streams has a scale of its own"
            raise OrderError("KV306", "`kv` in `per`: a scale belongs to one stream", term.start, term.end, hint)
        if term.axis not in _WORDS:
            hint = suggestion(term.axis, _WORDS)
            raise OrderError("KV302", f"unknown axis `{term.axis}`", term.start, term.start + len(term.axis), hint)
        name = {"request": "block", "position": "slot", "token": "slot"}.get(term.axis, term.axis)
        if name not in self.axes:
            message = f"`{term.axis}` in `per`, and `{self.name}` does not vary over it"
            raise OrderError("KV306", message, term.start, term.end)
        axis = self.axes[name]
        if term.operations:
            axis = Axis(name, axis.extent, self._step(term, axis))
        return (self.axes["block"], axis) if term.axis == "token" else (axis,)

    def _step(self, term: Term, axis: Axis) -> int:
        operation = term.operations[0]
        if len(term.operations) > 1 or operation.symbol != "//" or axis.name not in ("slot", "dim"):
            hint = "groups along one axis are written `dim//32` or `token//32`"
            raise OrderError("KV301", f"`{term}` is no axis, and no groups of one", term.start, term.end, hint)
        if operation.operand in self.unsure:
            raise _Unsure
        step = divisor(operation, self.params)
        if step > LARGEST:
            raise OrderError("KV301", f"`{step}` cannot split an axis", operation.start, operation.end)
        if axis.extent is None:
            raise OrderError("KV308", f"`{term.axis}` cannot be split: its extent is dynamic", term.start, term.end)
        if axis.name == "slot" and axis.extent % step:
            message = f"{step} does not divide {axis.extent}, the tokens of a block"
            raise OrderError("KV303", message, operation.start, operation.end)
        return step


_SCALE = ("quant", "scale")


class _Unsure(Exception):
    """What this rests on was wrong, and reported before."""
