"""What ``store`` and ``quant`` of a stream mean: its ``Encoding``, with what its mode leaves unsaid filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvgen.axes import Axis
from kvgen.diagnostics import Diagnostic
from kvgen.layout import Encoding, Scale
from kvgen.orders import OrderError, Term, divisor, parse_order
from kvgen.quant import MODES, Mode
from kvgen.source import Location, Source
from kvgen.spec import QuantSpec, ScaleSpec, StreamSpec
from kvgen.suggest import suggestion
from kvgen.values import LARGEST, SCALE_DTYPES

_LOGICAL = ("block", "slot", "head", "dim", "layer")
_WORDS = ("token", *_LOGICAL, "request", "position")
_SCALE = ("quant", "scale")
_SOURCES = ("float32", "float16", "bfloat16")


@dataclass(slots=True)
class Encodings:
    """Resolves the encoding of one stream; ``problems`` collects what is wrong with it.

    ``axes`` are all that its scale may vary over. ``broken_params`` were reported before: what uses them has
    ``failed`` without a problem of its own.
    """

    source: Source
    name: str
    spec: StreamSpec
    axes: Mapping[str, Axis]
    params: Mapping[str, int]
    broken_params: frozenset[str] = frozenset()
    problems: list[Diagnostic] = field(default_factory=list)
    failed: bool = False

    def encoding(self) -> Encoding | None:
        """The encoding, or None where there is none; what it is says nothing where it ``failed``."""
        try:
            return self._encoding()
        except _Unsure:
            self.failed = True
            return None

    def _encoding(self) -> Encoding | None:
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
        self._problem(Diagnostic(code, message, span, hint))

    def _problem(self, problem: Diagnostic) -> None:
        self.problems.append(problem)
        self.failed = True

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
        if mode.group is not None and dtype != mode.scale_dtype:
            message = f"the scale of {quant.mode} is e8m0"
            self._report("KV211", message, *_SCALE, "dtype", hint="mode `fp8_e4m3` takes other types of scale")
        grid = spec.grid or ("pow2" if dtype == "float8_e8m0fnu" else "any")
        if grid == "any" and dtype == "float8_e8m0fnu":
            self._report("KV211", "an e8m0 scale is a power of two", *_SCALE, "grid", hint="leave it out")
        code_range, floor = spec.range or mode.code_range, spec.floor or _floor(mode)
        if dynamic:
            self._check_dynamic(spec, pow2=grid == "pow2", rounded=grid == "pow2" or dtype != "float32")
            self._check_range(quant, mode, code_range, clamp)
        else:
            self._check_static(spec, mode, dtype)
            code_range, floor = mode.code_range, ("none", 0.0)
        return Scale(
            name=f"{self.name}.scale",
            axes=axes,
            dynamic=dynamic,
            dtype=dtype,
            stored=bool(names & {"block", "slot"}),
            grid=grid,
            exponent=spec.exponent or "ceil",
            code_range=code_range,
            floor_on=None if floor[0] == "none" else floor[0],
            floor=floor[1],
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

    def _check_static(self, spec: ScaleSpec, mode: Mode, dtype: str) -> None:
        """How a scale is computed means nothing of one that is given; defaults may always be written."""
        meaningless = {
            "range": spec.range not in (None, mode.code_range),
            "floor": spec.floor not in (None, ("none", 0.0), _floor(mode)),
            "grid": spec.grid == "pow2" and dtype != "float8_e8m0fnu",
            "exponent": spec.exponent == "floor",
            "encode": spec.encode == "exact",
        }
        self._report_meaningless(meaningless, "a static scale is handed in, not computed")

    def _check_dynamic(self, spec: ScaleSpec, *, pow2: bool, rounded: bool) -> None:
        self._report_meaningless({"given": spec.given == "inverse"}, "a dynamic scale is computed, not handed in")
        self._report_meaningless(
            {"exponent": spec.exponent == "floor" and not pow2}, "it is for scales of `grid: pow2` or `dtype: e8m0`"
        )
        self._report_meaningless({"encode": spec.encode == "exact" and not rounded}, "what is stored is exact")

    def _report_meaningless(self, keys: Mapping[str, bool], why: str) -> None:
        for key, meaningless in keys.items():
            if meaningless:
                self._report("KV211", f"`{key}` means nothing here: {why}", *_SCALE, key, hint="leave it out", key=True)

    def _check_range(self, quant: QuantSpec, mode: Mode, code_range: float, clamp: tuple[int, int] | None) -> None:
        largest = min(-clamp[0], clamp[1]) if clamp else mode.largest
        if code_range > largest:
            where = ("quant", "clamp") if quant.scale.range is None else (*_SCALE, "range")
            message = f"amax is to meet {code_range:g}, and codes end at {largest:g}"
            self._report(
                "KV212", message, *where, hint=f"a `range` of {largest:g}, or a wider `clamp`" if clamp else None
            )

    def _per(self, quant: QuantSpec, mode: Mode) -> tuple[Axis, ...] | None:
        """The axes of the scale in logical order, or None after reporting why there are none."""
        spec = quant.scale
        if spec.per is None and mode.group is None:
            where = _SCALE if self._written(*_SCALE) else _SCALE[:1]
            hint = "`[]` for one of the whole tensor, or `head`, `token`, `token head`, `token head dim//32`"
            self._report("KV202", f"`per` is missing: what the scale of {quant.mode} varies over", *where, hint=hint)
            return None
        before = len(self.problems)
        found: dict[str, Axis] = {}
        is_list = isinstance(spec.per, tuple)
        default = f"token head dim//{mode.group}"
        for index, text in enumerate(spec.per if is_list else [default if spec.per is None else spec.per]):
            where = (*_SCALE, "per", index) if is_list else (*_SCALE, "per")
            try:
                self._add_axes(text, found, implied=spec.per is None)
            except OrderError as error:
                span = self.source.inside(("streams", self.name, *where), error.start, error.end)
                self._problem(Diagnostic(error.code, error.message, span, error.hint))
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
        if operation.operand in self.broken_params:
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


def _floor(mode: Mode) -> tuple[str, float]:
    return ("scale", mode.floor) if mode.floor else ("none", 0.0)


class _Unsure(Exception):
    """What this rests on was wrong, and reported before."""
