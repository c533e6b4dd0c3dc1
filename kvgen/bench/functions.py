"""The functions of a generated module that are timed: how each is called, what it moves and what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from kvgen.bench import traffic
from kvgen.bench.fused import query_width
from kvgen.bench.task import POISON, Scene, Task, fill, storage_bytes, whole_blocks
from kvgen.bench.transfers import TransferScene, TransferTask, block_options, transferred
from kvgen.documents import Document
from kvgen.transfer import Transfer
from kvgen.values import ITEMSIZE

Arguments = tuple[list[Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Function:
    """A function by its ``name``: the arguments of a call, and the bytes that it moves in a scene.

    ``writes`` is what it leaves: the ``outputs``, the ``pool``, ``pages`` of it, or pool and query (``staged``).
    ``applies``: whether it does a token's whole work in one call here.
    """

    name: str
    arguments: Callable[[Task], Arguments]
    moved: Callable[[Scene, int], int]
    writes: Literal["pool", "outputs", "pages", "staged"] = "pool"
    applies: Callable[[Document], bool] = lambda document: True

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
        if self.writes in ("pool", "staged"):
            scene.poison()
            for tensor in _query_out(task):
                fill(tensor, POISON)
        elif self.writes == "pages":
            scene.scramble()
        else:
            for tensor in task.outputs.values():
                fill(tensor, POISON)

    def results(self, task: Task, returned: Any) -> Iterable[Tensor]:
        """What a call left: rows, those it ``returned`` or else the outputs; or every byte of the pool."""
        if self.writes != "outputs":
            query = _query_out(task) if self.writes == "staged" else []
            return [*(storage_bytes(tensor) for tensor in task.buffers.values()), *query]
        if returned is None:
            return list(task.outputs.values())
        return list(returned) if isinstance(returned, tuple | list) else [returned]


def _append(task: Task) -> Arguments:
    return [*task.streams.values(), *task.buffers.values(), task.slots, *_extra(task)], _layer(task)


def _append_fused(task: Task) -> Arguments:
    dense = [*task.fused.given, *_query_out(task)]
    remap = [] if task.remap is None else [task.remap]
    rest = [*remap, *task.fused.arguments, *task.scales.values()]
    return [*dense, *task.buffers.values(), task.slots, *rest], _layer(task)


def _query_out(task: Task) -> list[Tensor]:
    return [] if task.fused is None or task.fused.query_out is None else [task.fused.query_out]


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


def _transfer(task: TransferTask) -> Arguments:
    return [*task.pools, *task.slots, *task.scales.values()], dict(task.options)


def _transfer_blocks(task: TransferTask) -> Arguments:
    return [*task.pools, *task.blocks, *task.scales.values()], task.options | block_options(task)


def _appended(scene: Scene, tokens: int) -> int:
    return traffic.appended(scene.layout, scene.extents, tokens, scene.dtypes)


def _fused(scene: Scene, tokens: int) -> int:
    """The query is read and written, and a row of the table read for each token."""
    layout = scene.layout
    query = query_width(layout) if layout.fuse.of("query") else 0
    rows = layout.fuse.rope.rotary_dim * 4 if scene.tables else 0
    return _appended(scene, tokens) + tokens * (2 * query * ITEMSIZE[scene.dtypes[layout.streams[0].name]] + rows)


def _gathered(scene: Scene, tokens: int) -> int:
    return traffic.gathered(scene.layout, scene.extents, tokens, scene.dtypes)


def _zeroed(scene: Scene, tokens: int) -> int:
    blocks = whole_blocks(tokens, scene.sizes.block_size)
    return traffic.pages(scene.layout, scene.extents, blocks, scene.sizes.layers)


def _copied(scene: Scene, tokens: int) -> int:
    return 2 * _zeroed(scene, tokens)


def _unsharded(layout: Document) -> bool:
    """Of a sharded cache a paged gather finds the tokens of one rank alone."""
    return layout.slots.shard is None


FUNCTIONS = (
    Function("append", _append, _appended),
    Function("append_fused", _append_fused, _fused, "staged"),
    Function("gather", _gather, _gathered, "outputs"),
    Function("gather_paged", _gather_paged, _gathered, "outputs", _unsharded),
    Function("copy_blocks", _copy_blocks, _copied, "pages"),
    Function("zero_blocks", _zero_blocks, _zeroed, "pages"),
    Function("transfer", _transfer, transferred),
    Function("transfer_blocks", _transfer_blocks, transferred),
)


def scene_of(document: Document, module: Any, device: str, most: int, pool_tokens: int) -> Scene | TransferScene:
    """What tasks of up to ``most`` tokens are made of: a pool of ``pool_tokens``, or both pools of a transfer."""
    if isinstance(document, Transfer):
        return TransferScene(document, module, device, most)
    return Scene(document, device, most, pool_tokens)


def functions_of(document: Document, module: Any, names: Iterable[str] | None = None) -> list[Function]:
    """Those that a module has and that are asked for, in a fixed order."""
    wanted = None if names is None else set(names)
    return [
        function
        for function in FUNCTIONS
        if hasattr(module, function.name) and function.applies(document) and (wanted is None or function.name in wanted)
    ]
