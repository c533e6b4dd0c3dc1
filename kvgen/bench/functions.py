"""The functions of a generated module that are timed: how each is called, what it moves and what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from kvgen.bench import traffic
from kvgen.bench.task import POISON, Scene, Task, fill, storage_bytes, whole_blocks
from kvgen.layout import Layout

Arguments = tuple[list[Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Function:
    """A function by its ``name``: the arguments of a call, and the bytes that it moves in a scene.

    ``writes`` is what it leaves: the ``outputs``, the ``pool``, or ``pages`` of it. ``applies``: whether it does a
    token's whole work in one call here.
    """

    name: str
    arguments: Callable[[Task], Arguments]
    moved: Callable[[Scene, int], int]
    writes: Literal["pool", "outputs", "pages"] = "pool"
    applies: Callable[[Layout], bool] = lambda layout: True

    @property
    def reads(self) -> bool:
        """Whether it takes tokens out of the pool."""
        return self.writes == "outputs"

    def call(self, module: Any, task: Task) -> Callable[[], Any]:
        """A call of the module's function on a task, its arguments ready."""
        function = getattr(module, self.name)
        positional, options = self.arguments(task)
        return lambda: function(*positional, **options)

    def prepare(self, scene: Scene, task: Task) -> None:
        """Poison what a call is to write; pages that are copied differ from each other."""
        if self.writes == "pool":
            scene.poison()
        elif self.writes == "pages":
            scene.scramble()
        else:
            for tensor in task.outputs.values():
                fill(tensor, POISON)

    def results(self, task: Task, returned: Any) -> Iterable[Tensor]:
        """What a call left: rows, those it ``returned`` or else the outputs; or every byte of the pool."""
        if self.writes != "outputs":
            return [storage_bytes(tensor) for tensor in task.buffers.values()]
        if returned is None:
            return list(task.outputs.values())
        return list(returned) if isinstance(returned, tuple | list) else [returned]


def _append(task: Task) -> Arguments:
    return [*task.streams.values(), *task.buffers.values(), task.slots, *_extra(task)], _layer(task)


def _gather(task: Task) -> Arguments:
    return [*task.buffers.values(), task.slots, *_extra(task)], _out(task)


def _gather_paged(task: Task) -> Arguments:
    tables = [task.block_table, task.seq_lens, task.cu_seq_lens]
    return [*task.buffers.values(), *tables, *_extra(task)], _out(task) | {"starts": task.starts}


def _extra(task: Task) -> list[Tensor]:
    """What follows the slots: the remap table and the static scales that the layout asks for."""
    return [*([] if task.remap is None else [task.remap]), *task.scales.values()]


def _layer(task: Task) -> dict[str, Any]:
    return {} if task.layer is None else {"layer": task.layer}


def _out(task: Task) -> dict[str, Any]:
    out = tuple(task.outputs.values())
    return _layer(task) | {"out": out if len(out) > 1 else out[0]}


def _copy_blocks(task: Task) -> Arguments:
    return [*task.buffers.values(), task.pairs], {}


def _zero_blocks(task: Task) -> Arguments:
    return [*task.buffers.values(), task.pairs[:, 1].contiguous()], {}


def _appended(scene: Scene, tokens: int) -> int:
    return traffic.appended(scene.layout, scene.extents, tokens, scene.dtypes)


def _gathered(scene: Scene, tokens: int) -> int:
    return traffic.gathered(scene.layout, scene.extents, tokens, scene.dtypes)


def _zeroed(scene: Scene, tokens: int) -> int:
    blocks = whole_blocks(tokens, scene.sizes.block_size)
    return traffic.pages(scene.layout, scene.extents, blocks, scene.sizes.layers)


def _copied(scene: Scene, tokens: int) -> int:
    return 2 * _zeroed(scene, tokens)


def _unsharded(layout: Layout) -> bool:
    """Of a sharded cache a paged gather finds the tokens of one rank alone."""
    return layout.slots.shard is None


FUNCTIONS = (
    Function("append", _append, _appended),
    Function("gather", _gather, _gathered, "outputs"),
    Function("gather_paged", _gather_paged, _gathered, "outputs", _unsharded),
    Function("copy_blocks", _copy_blocks, _copied, "pages"),
    Function("zero_blocks", _zero_blocks, _zeroed, "pages"),
)


def functions_of(layout: Layout, module: Any, names: Iterable[str] | None = None) -> list[Function]:
    """Those that a module has and that are asked for, in a fixed order."""
    wanted = None if names is None else set(names)
    return [
        function
        for function in FUNCTIONS
        if hasattr(module, function.name) and function.applies(layout) and (wanted is None or function.name in wanted)
    ]
