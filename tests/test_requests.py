"""Which request a token belongs to, found by a search among the bounds of all of them."""

from __future__ import annotations

import pytest
import torch

from kvgen.resolve import load_text
from tests.generated import module_of

LAYOUT = load_text("""\
name: rows
axes: {head: 1, dim: 8}
block_size: 2
buffers:
  key_cache:   {holds: key,   order: block slot head dim}
  value_cache: {holds: value, order: block slot head dim}
""")
SIZES = (1, 2, 6, 7, 8, 62, 63, 64, 513, 5000)
"""Of batches: steps of the search take 8 ways in slot_mapping, and 64 in gather_paged."""


@pytest.fixture(scope="module")
def module():
    return module_of(LAYOUT)


def ragged(requests: int, first: int) -> torch.Tensor:
    """Bounds of requests of up to two tokens, most of many are empty; the first begins at ``first``."""
    generator = torch.Generator().manual_seed(requests)
    lengths = torch.randint(0, 3, (requests,), generator=generator)
    if requests > 100:
        lengths *= torch.rand(requests, generator=generator) < 100 / requests
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)) + first


@pytest.mark.parametrize("requests", SIZES)
@pytest.mark.parametrize("first", [0, 3])
def test_slot_mapping_finds_the_request_of_every_token(module, requests: int, first: int) -> None:
    bounds = ragged(requests, first)
    table = torch.randperm(requests, generator=torch.Generator().manual_seed(1)).int()[:, None]
    tokens = int(bounds[-1]) + 3
    found = module.slot_mapping(table, torch.ones(tokens, dtype=torch.int64), query_start_loc=bounds.int())
    request = torch.searchsorted(bounds, torch.arange(tokens), right=True) - 1
    known = (request >= 0) & (request < requests)
    expected = torch.where(known, table[request.clamp(0, requests - 1), 0] * 2 + 1, -1)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("requests", SIZES)
def test_gather_paged_finds_the_request_of_every_row(module, requests: int) -> None:
    bounds = ragged(requests, 0)
    rows = int(bounds[-1]) + 1
    pool = torch.randn(2, requests, 2, 1, 8).to(torch.bfloat16)
    table = torch.randperm(requests, generator=torch.Generator().manual_seed(1)).int()[:, None]
    lengths = bounds.diff().int()
    keys, values = module.gather_paged(pool[0], pool[1], table, lengths, bounds.int(), total_tokens=rows)
    request = torch.searchsorted(bounds, torch.arange(rows - 1), right=True) - 1
    place = table[request, 0].long(), torch.arange(rows - 1) - bounds[request]
    for found, cache in ((keys, pool[0]), (values, pool[1])):
        assert torch.equal(found[:-1], cache[place])
        assert not found[-1].any()
