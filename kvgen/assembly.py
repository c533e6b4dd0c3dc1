"""Reading what compilers print: the accesses to global memory in PTX and AMDGCN, and the resources of a kernel."""

from __future__ import annotations

import re
from collections import Counter

_PTX = re.compile(r"^\s*(?:@!?%\w+\s+)?(ld|st)\.((?:[\w:]+\.)*)([bufs]\d+|bf16|f16x2)\b", re.M)
_PTX_ASYNC = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\b[^;]*?,\s*(0x[0-9a-f]+|\d+)\s*[;,]", re.I)
_GCN = re.compile(r"^\s*(?:global|buffer|flat)_(load|store)_(?:lds_)?(\w+)", re.M)
_GCN_WORDS = {"byte": 1, "ubyte": 1, "sbyte": 1, "short": 2, "ushort": 2, "sshort": 2, "format": 4}
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


def ptx_accesses(text: str) -> tuple[dict[str, int], dict[str, int]]:
    """Loads and stores of global memory: how many there are of each width in bytes.

    A conditional instruction counts once; what a loop repeats counts once too.
    """
    counts = {"ld": Counter(), "st": Counter()}
    for kind, modifiers, element in _PTX.findall(text):
        if "global" not in modifiers.split("."):
            continue
        vector = re.search(r"\bv(\d)\b", modifiers)
        bits = int(re.sub(r"\D", "", element.split("x")[0])) * (2 if element.endswith("x2") else 1)
        counts[kind][bits // 8 * (int(vector[1]) if vector else 1)] += 1
    for size in _PTX_ASYNC.findall(text):
        counts["ld"][int(size, 0)] += 1
    return _plain(counts["ld"]), _plain(counts["st"])


def gcn_accesses(text: str) -> tuple[dict[str, int], dict[str, int]]:
    """The same for AMD. Scalar loads (arguments, values that a whole wave shares) do not count."""
    counts = {"load": Counter(), "store": Counter()}
    for kind, word in _GCN.findall(text):
        counts[kind][_gcn_bytes(word)] += 1
    return _plain(counts["load"]), _plain(counts["store"])


def _gcn_bytes(word: str) -> int:
    """``dwordx4`` 16, ``ushort`` 2, ``short_d16_hi`` 2, ``b128`` 16, ``d16_hi_b16`` 2."""
    if match := re.fullmatch(r"dword(?:x(\d))?", word):
        return 4 * int(match[1] or 1)
    if match := re.search(r"(?:^|_)[bui](\d+)$", word):
        return int(match[1]) // 8
    return _GCN_WORDS[word.split("_")[0]]


def gcn_resources(text: str) -> tuple[int, int]:
    """Vector registers, and bytes that a thread spills: to scratch memory, or to the accumulation registers."""

    def field(name: str) -> int:
        match = re.search(rf"^\s*\.{name}:\s*(\d+)", text, re.M)
        return int(match[1]) if match else 0

    return field("vgpr_count"), max(field("private_segment_fixed_size"), 4 * field("vgpr_spill_count"))


def cubin_resources(dump: str) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory, from ``cuobjdump --dump-resource-usage``.

    The kernels keep no arrays, so that whatever lies there was spilled, if anything does.
    """
    match = _RESOURCES.search(dump)
    if match is None:
        raise ValueError("cuobjdump named no resources")
    return int(match[1]), int(match[2]) + int(match[3])


def uses_stack(code: str) -> bool:
    """Whether ``cuobjdump -sass`` shows a store there: a frame for calls, of which divisions are, may stay empty."""
    return re.search(r"\bSTL\b", code) is not None


def _plain(counts: Counter[int]) -> dict[str, int]:
    return {str(width): counts[width] for width in sorted(counts, reverse=True)}
