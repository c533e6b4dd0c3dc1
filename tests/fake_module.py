"""A module under test that is made of the reference: what a generated module answers, without its kernels.

It lets the harness be tried on planted faults of every kind before and beside any generated text.
"""

from __future__ import annotations

from typing import Any

import torch

from kvgen import reference
from kvgen.layout import Layout, leaves_of


class FakeModule:
    """The documented functions of a layout, with the documented refusals; subclasses break one thing each."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.streams = [s.name for s in layout.streams]
        self.buffers = [b.name for b in layout.buffers]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("append_") and name.removeprefix("append_") in self.streams:
            stream = name.removeprefix("append_")
            return lambda *args, **options: self._append([stream], *args, **options)
        raise AttributeError(name)

    def _take(self, args: tuple, names: list[str]) -> tuple[dict[str, Any], list[Any]]:
        return dict(zip(names, args, strict=False)), list(args[len(names) :])

    def _append(self, streams: list[str], *args: Any, **options: Any) -> None:
        sources, rest = self._take(args, streams)
        names = [b for b in self.buffers if set(self._held(b)) & set(streams)]
        buffers, rest = self._take(tuple(rest), names)
        slots, *remap = rest
        self.write(sources, buffers, slots, remap=remap[0] if remap else None, **options)

    def _held(self, buffer: str) -> tuple[str, ...]:
        return leaves_of(self.layout.buffer(buffer).place)

    def write(self, sources, buffers, slots, **options: Any) -> None:
        sources = {s: self._flat(s, x) for s, x in sources.items()}
        reference.append(self.layout, sources, buffers, slots, **options)

    def _flat(self, stream: str, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) if len(self.layout.stream(stream).axes) == 1 else x

    def append(self, *args: Any, **options: Any) -> None:
        self._append(self.streams, *args, **options)

    def append_positions(self, *args: Any, **options: Any) -> None:
        sources, rest = self._take(args, self.streams)
        buffers, rest = self._take(tuple(rest), self.buffers)
        table, positions, *remap = rest
        reference.append_positions(
            self.layout, sources, buffers, table, positions, remap=remap[0] if remap else None, **options
        )

    def _packed(self, rows: dict[str, torch.Tensor]) -> Any:
        values = tuple(rows.values())
        return values[0] if len(values) == 1 else values

    def _outputs(self, options: dict[str, Any]) -> dict[str, Any]:
        if options.get("out") is not None:
            out = options["out"] if isinstance(options["out"], tuple) else (options["out"],)
            options["out"] = dict(zip(self.streams, out, strict=True))
        return options

    def gather(self, *args: Any, **options: Any) -> Any:
        buffers, rest = self._take(args, self.buffers)
        slots, *remap = rest
        rows = reference.gather(
            self.layout, buffers, slots, remap=remap[0] if remap else None, **self._outputs(options)
        )
        return self._packed(rows)

    def gather_paged(self, *args: Any, **options: Any) -> Any:
        buffers, rest = self._take(args, self.buffers)
        table, lengths, bounds, *remap = rest
        rows = reference.gather_paged(
            self.layout,
            buffers,
            table,
            lengths,
            bounds,
            remap=remap[0] if remap else None,
            **self._outputs(options),
        )
        return self._packed(rows)

    def slot_mapping(self, *args: Any, **options: Any) -> torch.Tensor:
        return reference.slot_mapping(self.layout, *args, **options)

    def fill_slots(self, *args: Any, **options: Any) -> torch.Tensor:
        return reference.fill_slots(self.layout, *args, **options)
