"""Move the requests of a paged pool to host memory and bring them back in another layout, and compare every byte.

    python examples/offload.py

Two generated transfers: from NHD pages to pinned host memory where all layers of a token lie together, and from there
to HND pages of another pool. All layers go in one launch each way. Runs on a GPU if there is one and otherwise on the
CPU. Exits 1 if anything differs; `--wrong-slot` brings one token back from its neighbour's slot, to see that it would.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kvgen import runtime
from kvgen.documents import Document, load, load_text
from kvgen.emit import render_layout

LAYOUTS = Path(__file__).resolve().parent.parent / "layouts"
BACK = """
name: host_to_hnd
transfer: {from: host_page_first, to: paged_hnd}
layers: all
"""
LAYERS = 3
BLOCKS = 4
TOKENS = 37


def module(document: Document) -> Any:
    """The module of a layout or a transfer."""
    return runtime.import_module(document.name, render_layout(document))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument("--wrong-slot", action="store_true", help="bring one token back from its neighbour's slot")
    arguments = parser.parse_args()
    device = runtime.choose_device(arguments.device)  # before modules are imported: Triton decides then how it runs

    import torch

    nhd, hnd, host = (module(load(LAYOUTS / f"{name}.yaml")) for name in ("paged_nhd", "paged_hnd", "host_page_first"))
    offload, onload = module(load(LAYOUTS / "transfers" / "nhd_to_host_page_first.yaml")), module(load_text(BACK))
    generator = torch.Generator().manual_seed(0)

    def slots(count: int) -> Any:
        return torch.randperm(BLOCKS * nhd.BLOCK_SIZE, generator=generator)[:count].to(device)

    def values() -> Any:
        return torch.randn(TOKENS, nhd.NUM_HEADS, nhd.HEAD_DIM, generator=generator).bfloat16().to(device)

    pools = [nhd.allocate(BLOCKS, device=device) for _ in range(LAYERS)]
    source = slots(TOKENS)
    given = [(values(), values()) for _ in pools]
    for (key, value), pool in zip(given, pools, strict=True):
        nhd.append(key, value, *pool, source)

    memory = host.allocate(BLOCKS, num_layers=LAYERS, pin_memory=device == "cuda")
    there = slots(TOKENS)
    offload.transfer(*([pool[i] for pool in pools] for i in (0, 1)), memory, source, there)
    kind = "pinned host memory" if device == "cuda" else "host memory"
    print(f"{TOKENS} tokens of {LAYERS} layers lie in {kind}, of {memory.nbytes} bytes")

    for pool in pools:
        for buffer in pool:
            buffer.zero_()  # their pages are somebody else's now
    others = [hnd.allocate(BLOCKS, device=device) for _ in range(LAYERS)]
    back = slots(TOKENS)
    read = there.clone()
    if arguments.wrong_slot:
        read[0] = read[1]
    onload.transfer(memory, *([pool[i] for pool in others] for i in (0, 1)), read, back)

    wrong = 0
    for layer, ((key, value), pool) in enumerate(zip(given, others, strict=True)):
        for name, wanted, rows in zip(("key", "value"), (key, value), hnd.gather(*pool, back), strict=True):
            for token in (rows != wanted).flatten(1).any(1).nonzero().flatten().tolist():
                print(f"FAILED: layer {layer}, {name} of token {token} differs")
                wrong += 1
    if not wrong:
        print("back in HND pages: every key and value is as it was")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
