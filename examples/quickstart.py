"""Build a layout, append keys and values to it, read them back, and prove that every byte of the pool is right.

    python examples/quickstart.py

Runs on a GPU if there is one and otherwise on the CPU. Exits 1 if anything differs; to see that it would,
`--flip-byte N` flips one bit of byte N of the key cache between writing and reading.
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
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--flip-byte", type=int, metavar="N", help="flip one bit of byte N of the key cache in between")
    arguments = parser.parse_args()
    device = runtime.choose_device(arguments.device)  # before the module is imported: Triton decides then how it runs

    layout = load(LAYOUT)
    cache = runtime.import_module(layout.name, render_layout(layout))
    print(f"built {layout.name}: {layout.summary}")

    import torch

    from kvgen import reference

    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(NUM_TOKENS, 8, 128, generator=generator).bfloat16().to(device) for _ in range(2))
    slots = torch.randperm(NUM_BLOCKS * layout.block_size, generator=generator)[:NUM_TOKENS].to(device)

    key_cache, value_cache = cache.allocate(NUM_BLOCKS, device=device)
    cache.append(key, value, key_cache, value_cache, slots)
    print(f"appended {NUM_TOKENS} tokens on {device}, in slots {slots[:4].tolist()} and others")

    if arguments.flip_byte is not None:
        key_cache.view(torch.uint8).view(-1)[arguments.flip_byte] ^= 1

    read_key, read_value = cache.gather(key_cache, value_cache, slots)
    agree = torch.equal(read_key, key) and torch.equal(read_value, value)
    print(f"read them back: {'they agree' if agree else 'they DIFFER'}")

    # What the pool must look like, from the reference: PyTorch alone, which shares no code with the generated kernels.
    pool = {"key_cache": key_cache, "value_cache": value_cache}
    expected = {name: torch.zeros_like(buffer) for name, buffer in pool.items()}
    reference.append(layout, {"key": key, "value": value}, expected, slots)
    for name, buffer in pool.items():
        actual, wanted = (tensor.view(torch.uint8).view(-1).cpu() for tensor in (buffer, expected[name]))
        for byte in (actual != wanted).nonzero().view(-1)[:1].tolist():
            print(f"{name} byte {byte} is {actual[byte]:#04x}, expected {wanted[byte]:#04x}")
            agree = False
    if agree:
        total = sum(buffer.nbytes for buffer in pool.values())
        print(f"and all {total} bytes of the pool are as the reference has them")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
