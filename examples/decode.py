"""A decoder of `transformers` with its keys and values in a generated paged cache: logits are those of its own cache.

    python examples/decode.py

Random weights; a tiny model on the CPU, a larger one on a GPU. Several requests of different lengths share one pool:
each is prefilled and then decoded greedily, a token of each in turn, as a server does. At every step the logits must
equal, bit for bit, those that the library's own cache gives. Then the same with one slot of two requests swapped,
which must change them, and with fp8 codes in the pool, which shows what the encoding costs. Exits 1 if not so.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from dataclasses import dataclass
from typing import Any

from kvgen import runtime
from kvgen.emit import render_layout
from kvgen.resolve import load_text

ENCODINGS = {
    "bf16": "{dtype: bfloat16}",
    "fp8": "{dtype: bfloat16, quant: {mode: fp8_e4m3, scale: {per: head, source: static}}}",
}
LAYOUT = """
name: pool_{name}
axes: {{head: {heads}, dim: {dim}}}
block_size: 4
streams: {{key: {stream}, value: key}}
buffers:
  kv_cache: {{holds: [key, value], order: block kv head slot dim}}
"""
BLOCKS = 64


@dataclass(frozen=True)
class Size:
    """A model, and what is asked of it: prompt lengths, and tokens to decode."""

    hidden: int
    layers: int
    query_heads: int
    heads: int
    prompts: tuple[int, ...]
    steps: int

    @property
    def dim(self) -> int:
        return self.hidden // self.query_heads


TINY = Size(hidden=64, layers=2, query_heads=4, heads=2, prompts=(3, 9, 6), steps=3)
LARGE = Size(hidden=2048, layers=16, query_heads=32, heads=8, prompts=(5, 40, 17, 33), steps=16)


def make_model(size: Size, device: str) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.query_heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device, torch.bfloat16).eval()


class Pool:
    """One buffer for each layer of a model, and pages of them for requests. All layers of a request have one table."""

    def __init__(self, name: str, size: Size, device: str) -> None:
        import torch

        layout = load_text(LAYOUT.format(name=name, heads=size.heads, dim=size.dim, stream=ENCODINGS[name]))
        self.module = runtime.import_module(layout.name, render_layout(layout))
        self.block_size = layout.block_size
        self.buffers = [self.module.allocate(BLOCKS, device=device) for _ in range(size.layers)]
        self.free = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
        # Static scales: these keys and values are small.
        scale = torch.full((size.heads,), 1 / 64, device=device)
        self.scales = (scale, scale) if layout.stream("key").encoding else ()

    def table(self, tokens: int) -> Any:
        """A block table for a request of so many tokens, ``[columns]``."""
        import torch

        pages = [self.free.pop() for _ in range(-(-tokens // self.block_size))]
        return torch.tensor(pages, dtype=torch.int32, device=self.buffers[0].device)

    def swap(self, one: int, other: int) -> None:
        """Exchange the contents of two slots of the first layer."""
        import torch

        pair, turned = torch.tensor([one, other]), torch.tensor([other, one])
        pages = self.buffers[0].transpose(2, 3)  # [block, kv, slot, head, dim]
        pages[pair // self.block_size, :, pair % self.block_size] = pages[
            turned // self.block_size, :, turned % self.block_size
        ]


def paged_cache(pool: Pool, table: Any) -> Any:
    """A cache of `transformers` for one request, whose keys and values lie in the pages of its table."""
    from transformers.cache_utils import Cache, CacheLayerMixin

    class PagedLayer(CacheLayerMixin):
        is_sliding = False

        def __init__(self, buffer: Any) -> None:
            super().__init__()
            self.buffer, self.length = buffer, 0

        def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
            """Nothing: the pool is there."""

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            """Append ``[1, H, T, D]``, and give back what the request has, ``[1, H, length, D]``."""
            new = key_states.shape[2]
            key, value = (states[0].transpose(0, 1) for states in (key_states, value_states))
            slots = pool.module.fill_slots(table, self.length, new)
            pool.module.append(key, value, self.buffer, slots, *pool.scales)
            self.length += new
            slots = pool.module.fill_slots(table, 0, self.length)
            rows = pool.module.gather(self.buffer, slots, *pool.scales)
            keys, values = (x.transpose(0, 1).unsqueeze(0).contiguous() for x in rows)
            return keys, values

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.length + query_length, 0

        def get_seq_length(self) -> int:
            return self.length

        def get_max_length(self) -> int:
            return -1

    return Cache(layers=[PagedLayer(buffer) for buffer in pool.buffers])


def decode(model: Any, size: Size, caches: list[Any], between: Any = None, told: Any = None) -> tuple[list[Any], Any]:
    """Logits of every step of every request, in turn, and the tokens that were fed.

    ``between`` is called after the prefills. ``told``: tokens to feed instead of those with the highest logits.
    """
    import torch

    device = model.device
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # before 5.40
    generator = torch.Generator().manual_seed(2)
    feed = [torch.randint(512, (1, length), generator=generator).to(device) for length in size.prompts]
    logits, fed = [], []
    with torch.no_grad():
        for step in range(1 + size.steps):
            for r, cache in enumerate(caches):
                tokens = feed[r] if told is None else told[len(fed)]
                fed.append(tokens)
                logits.append(model(tokens, use_cache=True, **{argument: cache}).logits[0])
                feed[r] = logits[-1][-1:].argmax(-1, keepdim=True)
            if step == 0 and between:
                between()
    return logits, fed


def run(model: Any, size: Size, name: str, told: Any = None, swapped: bool = False) -> list[Any]:
    """The same steps with the requests in a pool of one of the layouts."""
    pool = Pool(name, size, str(model.device))
    tables = [pool.table(length + size.steps) for length in size.prompts]
    caches = [paged_cache(pool, table) for table in tables]
    # The first slots of two requests: two of one request would be read in another order, and mean the same.
    first, second = (int(table[0]) * pool.block_size for table in tables[:2])
    between = (lambda: pool.swap(first, second)) if swapped else None
    return decode(model, size, caches, between, told)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    device = runtime.choose_device(parser.parse_args().device)  # before modules are imported: Triton decides then
    size = TINY if device == "cpu" else LARGE

    import torch
    from transformers.cache_utils import DynamicCache

    model = make_model(size, device)
    wanted, fed = decode(model, size, [DynamicCache() for _ in size.prompts])
    print(f"{len(size.prompts)} requests, prompts of {size.prompts} tokens, {size.steps} steps, on {device}")

    def differ(logits: list[Any]) -> int:
        return sum(not torch.equal(a, b) for a, b in zip(logits, wanted, strict=True))

    paged = differ(run(model, size, "bf16"))
    swapped = differ(run(model, size, "bf16", fed, swapped=True))
    coded = run(model, size, "fp8", fed)
    error = max((a - b).abs().max().item() for a, b in zip(coded, wanted, strict=True))
    largest = max(x.abs().max().item() for x in wanted)
    print(f"bf16 pages: logits differ in {paged} of {len(wanted)} steps")
    print(f"two slots swapped: they differ in {swapped}")
    print(f"fp8 pages: they differ by at most {error:.4f}, where the largest is {largest:.4f}")
    right = paged == 0 and swapped > 0 and 0 < error < largest / 4
    print("as it should be" if right else "FAILED")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
