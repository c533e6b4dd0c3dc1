"""Build a layout, append keys and values to it, read them back, and prove that every byte of the pool is right.

    python examples/quickstart.py

Runs on a GPU if there is one and otherwise on the CPU. Exits 1 if anything differs; to see that it would,
`--flip-byte N` flips one bit of byte N of the pool between writing and reading.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvgen import runtime
from kvgen.emit import render_layout
from kvgen.resolve import load

LAYOUT = Path(__file__).resolve().parent.parent / "layouts" / "paged_nhd.yaml"
NUM_BLOCKS = 6
NUM_TOKENS = 37


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument("--flip-byte", type=int, metavar="N", help="flip one bit of byte N of the pool in between")
    arguments = parser.parse_args()
    device = runtime.choose_device(arguments.device)  # before the module is imported: Triton decides then how it runs

    layout = load(LAYOUT)
    cache = runtime.import_module(layout.name, render_layout(layout))
    print(f"built {layout.name}: {layout.summary}")

    import torch

    from kvgen import reference

    generator = torch.Generator().manual_seed(0)
    heads, dims = (axis.extent for axis in layout.stream("key").axes)
    key, value = (torch.randn(NUM_TOKENS, heads, dims, generator=generator).bfloat16().to(device) for _ in range(2))
    slots = torch.randperm(NUM_BLOCKS * layout.block_size, generator=generator)[:NUM_TOKENS].to(device)

    key_cache, value_cache = cache.allocate(NUM_BLOCKS, device=device)
    cache.append(key, value, key_cache, value_cache, slots)
    print(f"appended {NUM_TOKENS} tokens on {device}, in slots {slots[:4].tolist()} and others")

    # The pool as bytes, key cache first, and as it must be according to the reference: PyTorch alone, which shares no
    # code with the generated kernels.
    pool = {"key_cache": key_cache, "value_cache": value_cache}
    expected = {name: torch.zeros_like(buffer) for name, buffer in pool.items()}
    reference.append(layout, {"key": key, "value": value}, expected, slots)
    size = sum(buffer.nbytes for buffer in pool.values())
    if arguments.flip_byte is not None:
        if not 0 <= arguments.flip_byte < size:
            parser.error(f"--flip-byte: the pool has bytes 0 to {size - 1}")
        flip(pool, arguments.flip_byte)

    read_key, read_value = cache.gather(key_cache, value_cache, slots)
    agree = torch.equal(read_key, key) and torch.equal(read_value, value)
    print(f"read them back: they {'agree' if agree else 'DIFFER'}")
    for name, buffer in pool.items():
        actual, wanted = (as_bytes(tensor).cpu() for tensor in (buffer, expected[name]))
        for byte in (actual != wanted).nonzero().flatten()[:1].tolist():
            print(f"FAILED: {name} byte {byte} is {actual[byte]:#04x}, it should be {wanted[byte]:#04x}")
            agree = False
    if agree:
        print(f"and all {size} bytes of the pool are as the reference has them")
    return 0 if agree else 1


def as_bytes(buffer):
    """A contiguous tensor as its bytes, uint8 ``[n]``."""
    import torch

    return buffer.view(torch.uint8).flatten()


def flip(pool, byte: int) -> None:
    """Flip the lowest bit of one byte, counted through the buffers in turn."""
    for buffer in pool.values():
        if byte < buffer.nbytes:
            as_bytes(buffer)[byte] ^= 1
            return
        byte -= buffer.nbytes


if __name__ == "__main__":
    sys.exit(main())
