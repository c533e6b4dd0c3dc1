"""What ``store`` and ``quant`` of a stream mean: its ``Encoding``, with what its mode leaves unsaid filled in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvgen.axes import Axis
from kvgen.diagnostics import Diagnostic
from kvgen.layout import Encoding, Layout, Scale, Stream, Zero
from kvgen.orders import OrderError, Term, divisor, parse_order
from kvgen.quant import MODES, Mode
from kvgen.source import Location, Source
from kvgen.spec import OuterScaleSpec, QuantSpec, ScaleSpec, StreamSpec
from kvgen.suggest import known_here, suggestion
from kvgen.values import LARGEST, SCALE_DTYPES, ZERO_DTYPES

_LOGICAL = ("block", "slot", "head", "dim", "layer")
_WORDS = ("token", *_LOGICAL, "request", "position")
_SCALE = ("quant", "scale")
_SOURCES = ("float32", "float16", "bfloat16")


@dataclass(slots=True)
class Encodings:
    """Resolves the encoding of one stream; ``problems`` collects what is wrong with it.

    ``axes`` are all that its scale may vary over. ``broken_params`` were reported before: what uses them has
    ``failed`` without a problem of its own. ``specs`` and ``streams`` are what is written of other streams, by name,
    and what it means; None of those that are wrong.
    """

    source: Source
    name: str
    spec: StreamSpec
    axes: Mapping[str, Axis]
    params: Mapping[str, int]
    broken_params: frozenset[str] = frozenset()
    specs: Mapping[str, StreamSpec | None] = field(default_factory=dict)
    streams: Callable[[str], Stream | None] = lambda name: None
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
        store, quant, rotation = self.spec.store, self.spec.quant, self.spec.rotate
        if store is None and quant is None:
            if rotation:
                hint = "`store: bfloat16` rounds what was rotated, `quant` makes codes of it"
                self._report("KV210", "`rotate` without `store` or `quant`", "rotate", hint=hint, key=True)
            return None
        if store is not None and quant is not None:
            self._report("KV210", "either `store` or `quant`: each says what is stored", "store", key=True)
            return None
        if others := [dtype for dtype in self.spec.dtype if dtype not in _SOURCES]:
            message = f"`{others[0]}` values cannot be encoded: sources are float32, float16 or bfloat16"
            self._report("KV210", message, "dtype")
        if rotation:
            self._check_rotation(self.axes["dim"].extent)
        if quant is None:
            if set(self.spec.dtype) == {store} and not rotation:
                hint = "without `store` values are stored as they come; `dtype` says which are taken"
                self._report("KV210", f"`{self.name}` comes as {store}: there is nothing to cast", "store", hint=hint)
            return Encoding("cast", store, rotation=rotation)
        return self._quant(quant)

    def _check_rotation(self, dims: int | None) -> None:
        if dims is None or dims & (dims - 1):
            number = "a number known at launch" if dims is None else dims
            message = f"`rotate` mixes the dims of a row: they are a power of two, not {number}"
            self._report("KV214", message, "rotate", key=True)

    def _report(self, code: str, message: str, *where: str, hint: str | None = None, key: bool = False) -> None:
        location: Location = ("streams", self.name, *where)
        span = self.source.at_key(location) if key else self.source.at(location)
        self._problem(Diagnostic(code, message, span, hint))

    def _problem(self, problem: Diagnostic) -> None:
        self.problems.append(problem)
        self.failed = True

    def _quant(self, spec: QuantSpec) -> Encoding | None:
        mode = MODES[spec.mode]
        clamp = self._clamp(spec, mode)
        scale = self._scale(spec, mode, clamp)
        zero = self._zero(spec, mode, scale)
        return scale and Encoding(spec.mode, mode.code, spec.round or "even", clamp, scale, zero, self.spec.rotate)

    def _clamp(self, spec: QuantSpec, mode: Mode) -> tuple[int, int] | None:
        """The smallest and the largest integer code, None of floats."""
        if mode.clamp is None and spec.round == "away":
            where = "has bounds between its codes" if mode.by_norm else "rounds to even"
            self._report("KV211", f"{spec.mode} {where}", "quant", "round", hint="leave it out")
        if spec.clamp is None:
            return mode.clamp
        if mode.clamp is None or mode.asymmetric:
            start = "are from 0 to" if mode.asymmetric else "end at"
            message = f"`clamp` belongs to signed integers; codes of {spec.mode} {start} {mode.largest:g}"
            self._report("KV211", message, "quant", "clamp", key=True)
            return mode.clamp
        least, most = -(1 << mode.bits - 1), (1 << mode.bits - 1) - 1
        if spec.clamp[0] < least or spec.clamp[1] > most:
            message = f"a clamp to {spec.clamp[0]}..{spec.clamp[1]}: codes of {spec.mode} are from {least} to {most}"
            self._report("KV212", message, "quant", "clamp")
        return spec.clamp

    def _zero(self, quant: QuantSpec, mode: Mode, scale: Scale | None) -> Zero | None:
        """What lies under the codes, where they are steps above something."""
        spec = quant.zero
        if not mode.asymmetric:
            if spec is not None:
                hint = "mode `int4_asymmetric` has one"
                self._report("KV211", f"codes of {quant.mode} have no zero", "quant", "zero", hint=hint, key=True)
            return None
        if scale is not None and not scale.dynamic:
            message = f"{quant.mode} with a static scale: it goes with a zero, and both are made of the values"
            where = _SCALE if self._written(*_SCALE) else _SCALE[:1]
            self._report(
                "KV204", message, *where, hint="let the scale vary over `token`, or take mode `int4`, which has no zero"
            )
            return None
        kind, dtype, clamped = (spec.kind, spec.dtype, spec.clamped) if spec else ("minimum", None, False)
        if dtype is not None and dtype not in ZERO_DTYPES[kind]:
            hint = known_here(ZERO_DTYPES[kind])
            self._report("KV211", f"a zero of kind `{kind}` in {dtype}", "quant", "zero", "dtype", hint=hint)
        if clamped and kind != "point":
            message = "`clamped` means nothing here: it is for a zero of kind `point`"
            self._report("KV211", message, "quant", "zero", "clamped", hint="leave it out", key=True)
        if kind == "point" and quant.round == "away":
            message = "a zero point with `round: away` is not supported by this version of kvgen"
            self._report("KV204", message, "quant", "round", hint="codes above a zero point are rounded to even")
        return Zero(f"{self.name}.zero", kind, dtype or ZERO_DTYPES[kind][0], clamped)

    def _scale(self, quant: QuantSpec, mode: Mode, clamp: tuple[int, int] | None) -> Scale | None:
        spec = quant.scale
        if isinstance(spec, str):
            return self._shared(spec, quant, mode)
        axes = self._per(quant, mode)
        if axes is None:
            return None
        names = {axis.name for axis in axes}
        dynamic, stored = spec.source == "dynamic" if spec.source else "slot" in names, bool(names & {"block", "slot"})
        if dynamic and "block" not in names:
            message = (
                "a dynamic scale that blocks share: a later token would change it for those that are stored already"
            )
            hint = "let it vary over `token`, or say `source: static`"
            self._report("KV213", message, *_SCALE, "per", hint=hint)
        self._check_groups(mode, axes)
        if stored:
            axes = tuple(axis for axis in axes if axis.name != "layer")  # what is stored has it wherever its buffer has
        dtype, grid = self._number(quant, mode)
        code_range, floor = spec.range or mode.code_range, spec.floor or _floor(mode)
        if mode.by_norm:
            self._check_norm(quant, mode, axes, dynamic)
        elif dynamic:
            self._check_dynamic(spec, pow2=grid == "pow2", rounded=grid == "pow2" or dtype != "float32")
            self._check_range(quant, mode, code_range, clamp)
        else:
            self._check_static(spec, mode, dtype, stored)
            code_range, floor = mode.code_range, ("none", 0.0)
        return Scale(
            name=f"{self.name}.scale",
            axes=axes,
            dynamic=dynamic,
            dtype=dtype,
            stored=stored,
            grid=grid,
            exponent=spec.exponent or "ceil",
            code_range=code_range,
            floor_on=None if floor[0] == "none" else floor[0],
            floor=floor[1],
            arithmetic=spec.arithmetic or "divide",
            given=spec.given or "scale",
            encode=spec.encode or "stored",
            scale=self._outer(spec.scale, mode, names) if dynamic else None,
        )

    def _shared(self, name: str, quant: QuantSpec, mode: Mode) -> Scale | None:
        """The static scale of another stream, which is this one's too."""
        scale = self._scale_of(name, _SCALE, lambda stream: stream.scale)
        self._check_groups(mode, scale.axes)
        if mode.by_norm:
            self._report("KV215", f"the scale of {quant.mode} is made of the values: it is no static one", *_SCALE)
        elif mode.group is not None and scale.dtype != mode.scale_dtype:
            self._report("KV215", f"the scale of `{name}` is {scale.dtype}, that of {quant.mode} is not", *_SCALE)
        return scale

    def _scale_of(self, name: str, where: tuple[str, ...], part: Callable[[Stream], Scale | None]) -> Scale:
        """The static ``part`` of another stream; raises _Unsure where there is none, after reporting why."""
        if name not in self.specs or name == self.name:
            others = [other for other in self.specs if other != self.name]
            message = "a scale cannot be its own" if name == self.name else f"unknown stream `{name}`"
            self._report("KV206", message, *where, hint=suggestion(name, others))
            raise _Unsure
        spec = self.specs[name]
        if spec is not None and spec.quant is not None and isinstance(spec.quant.scale, str):
            hint = f"name `{spec.quant.scale}`"
            self._report("KV215", f"the scale of `{name}` is that of another stream itself", *where, hint=hint)
            raise _Unsure
        stream = self.streams(name)
        if stream is None:
            raise _Unsure
        scale = part(stream)
        if scale is None or scale.dynamic or scale.stored:
            message = f"`{name}` has no static scale that is an argument, which could be shared"
            self._report("KV215", message, *where, hint="write the scale out: `{per: ..., source: ...}`")
            raise _Unsure
        if differs := next((axis for axis in scale.axes if self._extent(axis.name) != axis.extent), None):
            message = f"the scale of `{name}` varies over `{differs.name}`, which is another one here"
            self._report("KV215", message, *where)
            raise _Unsure
        return scale

    def _extent(self, axis: str) -> int | None:
        """The extent of an axis, 0 of one that the stream does not have."""
        return self.axes[axis].extent if axis in self.axes else 0

    def _number(self, quant: QuantSpec, mode: Mode) -> tuple[str, str]:
        """The element type of the scale, and its grid."""
        spec = quant.scale
        dtype = SCALE_DTYPES[spec.dtype] if spec.dtype else mode.scale_dtype
        if mode.group is not None and dtype != mode.scale_dtype:
            word = next(word for word, known in SCALE_DTYPES.items() if known == mode.scale_dtype)
            hint = "mode `fp8_e4m3` takes other types of scale" if mode.bits == 8 else "mode `int4` takes other types"
            self._report("KV211", f"the scale of {quant.mode} is {word}", *_SCALE, "dtype", hint=hint)
        grid = spec.grid or ("pow2" if dtype == "float8_e8m0fnu" else "any")
        if grid == "any" and dtype == "float8_e8m0fnu":
            self._report("KV211", "an e8m0 scale is a power of two", *_SCALE, "grid", hint="leave it out")
        return dtype, grid

    def _outer(self, spec: OuterScaleSpec | str | None, mode: Mode, inner: set[str]) -> Scale | None:
        """The static scale that a scale over the axes ``inner`` is counted in."""
        if spec == "none" or (spec is None and not mode.counted):
            return None
        if isinstance(spec, str):
            where = (*_SCALE, "scale")
            shared = self._scale_of(spec, where, lambda stream: stream.scale and stream.scale.scale)
            self._check_outer_heads(shared.axes, inner, where)
            return shared
        where = (*_SCALE, "scale", "per")
        found = self._axes(() if spec is None else spec.per, where)
        if found is None:
            raise _Unsure
        if others := [axis.name for axis in found if axis.name not in ("head", "layer")]:
            message = f"a scale of a scale varies over `head` and `layer` at most, not over `{others[0]}`"
            self._report("KV306", message, *where)
        else:
            self._check_outer_heads(found, inner, where)
        return Scale(f"{self.name}.scale.scale", found, dynamic=False, dtype="float32", stored=False, code_range=1.0)

    def _check_outer_heads(self, axes: tuple[Axis, ...], inner: set[str], where: tuple[str, ...]) -> None:
        if "head" in {axis.name for axis in axes} - inner:
            message = "a scale that all heads share is counted in one that differs between them"
            self._report("KV306", message, *where, hint="let the scale vary over `head` too, or leave `head` out here")

    def _check_groups(self, mode: Mode, axes: tuple[Axis, ...]) -> None:
        """What shares a byte, or is rotated, is put together in tiles, whose sides are powers of two."""
        group = next((a for a in axes if a.name == "dim" and a.step > 1 and a.count != 1), None)
        if group is None or not group.step & (group.step - 1):
            return
        if mode.bits < 8:
            message = f"groups of {group.step} dims: those of codes narrower than a byte are a power of two"
            self._report("KV314", message, *_SCALE, "per")
        elif self.spec.rotate:
            message = f"groups of {group.step} dims: those of a rotated stream are a power of two"
            self._report("KV214", message, *_SCALE, "per")

    def _check_norm(self, quant: QuantSpec, mode: Mode, axes: tuple[Axis, ...], dynamic: bool) -> None:
        """A scale that is the norm of a group of values over that of its codes has little to say for itself."""
        spec, dims = quant.scale, self.axes["dim"].extent
        if not dynamic:
            message = f"the scale of {quant.mode} is made of the values: it is no static one"
            self._report("KV211", message, *_SCALE, "source", hint="leave it out")
        wanted = {"block", "slot", "dim", *(self.axes.keys() & {"head"})}
        if {axis.name for axis in axes} - {"layer"} != wanted or {axis.step for axis in axes} != {1, mode.group}:
            heads = " head" if "head" in wanted else ""
            message = f"the scale of {quant.mode} varies over `token{heads} dim//{mode.group}`"
            self._report("KV211", message, *_SCALE, "per", hint="leave it out")
        elif dims is None or dims % mode.group:
            number = "known at launch only" if dims is None else f"{dims}"
            message = f"{quant.mode} takes whole groups of {mode.group} dims, and `dim` is {number}"
            self._report("KV214", message, "quant", "mode")
        meaningless = {
            "range": spec.range not in (None, mode.code_range),
            "floor": spec.floor not in (None, ("none", 0.0)),
            "grid": spec.grid == "pow2",
            "exponent": spec.exponent == "floor",
            "arithmetic": spec.arithmetic == "multiply",
            "given": spec.given == "inverse",
            "encode": spec.encode == "exact",
            "scale": spec.scale not in (None, "none"),
        }
        self._report_meaningless(meaningless, "the scale is the norm of the values over that of their codes")

    def _check_static(self, spec: ScaleSpec, mode: Mode, dtype: str, stored: bool) -> None:
        """How a scale is computed means nothing of one that is given; defaults may always be written."""
        self._report_meaningless(
            {"given": stored and spec.given == "inverse"}, "a scale that lies in a buffer is no argument"
        )
        meaningless = {
            "range": spec.range not in (None, mode.code_range),
            "floor": spec.floor not in (None, ("none", 0.0), _floor(mode)),
            "grid": spec.grid == "pow2" and dtype != "float8_e8m0fnu",
            "exponent": spec.exponent == "floor",
            "encode": spec.encode == "exact",
            "scale": spec.scale not in (None, "none"),
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
        largest = min(-clamp[0], clamp[1]) if clamp and not mode.asymmetric else mode.largest
        if code_range > largest:
            where = ("quant", "clamp") if quant.scale.range is None else (*_SCALE, "range")
            message = f"amax is to meet {code_range:g}, and codes end at {largest:g}"
            hint = f"a `range` of {largest:g}, or a wider `clamp`" if clamp and not mode.asymmetric else None
            self._report("KV212", message, *where, hint=hint)

    def _per(self, quant: QuantSpec, mode: Mode) -> tuple[Axis, ...] | None:
        """The axes of the scale in logical order, or None after reporting why there are none."""
        spec = quant.scale
        if spec.per is None and mode.group is None:
            where = _SCALE if self._written(*_SCALE) else _SCALE[:1]
            hint = "`[]` for one of the whole tensor, or `head`, `token`, `token head`, `token head dim//32`"
            self._report("KV202", f"`per` is missing: what the scale of {quant.mode} varies over", *where, hint=hint)
            return None
        default = f"token head dim//{mode.group}"
        return self._axes(default if spec.per is None else spec.per, (*_SCALE, "per"), implied=spec.per is None)

    def _axes(
        self, per: str | tuple[str, ...], where: tuple[str, ...], implied: bool = False
    ) -> tuple[Axis, ...] | None:
        before = len(self.problems)
        found: dict[str, Axis] = {}
        is_list = isinstance(per, tuple)
        for index, text in enumerate(per if is_list else [per]):
            at = (*where, index) if is_list else where
            try:
                self._add_axes(text, found, implied)
            except OrderError as error:
                span = self.source.inside(("streams", self.name, *at), error.start, error.end)
                self._problem(Diagnostic(error.code, error.message, span, error.hint))
        if len(self.problems) > before:
            return None
        if "slot" in found and "block" not in found:
            message = "blocks would share the scales of their slots, and a buffer holds what varies over `block`"
            self._report("KV306", message, *where, hint="`token` is `block` and `slot`")
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


def append_refusal(layout: Layout, stream: str) -> str | None:
    """Why the values of a stream cannot be appended, and what can be done instead; None where they can."""
    return stream_refusal(layout.stream(stream), "request" if layout.contiguous else "block")


def stream_refusal(stream: Stream, block: str = "block") -> str | None:
    """The same of a stream by itself; ``block`` is what the layout calls one."""
    scale, name = stream.scale, stream.name
    if scale is None or not scale.dynamic:
        return None
    tokens = next((axis.step for axis in scale.axes if axis.name == "slot"), None)
    if tokens == 1:
        return None
    whose = f"all tokens of a {block}" if tokens is None else f"{tokens} tokens"
    static = "" if stream.encoding.zero else ", or be handed in (`source: static`)"
    return (
        f"{whose} share a dynamic scale, which is made of all of them at once; a transfer of whole {block}s writes "
        f"them from another pool, or let `{name}.scale` vary over `token`{static}"
    )


def _floor(mode: Mode) -> tuple[str, float]:
    return ("scale", mode.floor) if mode.floor else ("none", 0.0)


class _Unsure(Exception):
    """What this rests on was wrong, and reported before."""
