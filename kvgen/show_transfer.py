"""What ``kvgen show`` says of a transfer: what is moved and how, and both layouts."""

from __future__ import annotations

from typing import Any

from kvgen import show
from kvgen.functions import chosen
from kvgen.layout import Layout, Stream
from kvgen.transfer import Transfer, token_refusal


def describe(what: Transfer) -> dict[str, Any]:
    """Everything that is shown, for programs."""
    return {
        "name": what.name,
        "summary": what.summary,
        "layers": what.layers,
        "programs": what.programs,
        "functions": list(chosen(what)),
        "streams": {stream.name: _stream(what, stream) for stream in what.source.streams},
        "source": show.describe(what.source),
        "destination": show.describe(what.destination),
    }


def _stream(what: Transfer, stream: Stream) -> str:
    """How a stream gets from one side to the other."""
    if what.raw(stream.name):
        return "its bytes are moved"
    stored = [_stored(layout, stream.name) for layout in what.sides]
    return f"decoded from {stored[0]}, encoded as {stored[1]}"


def _stored(layout: Layout, stream: str) -> str:
    facts = next(s for s in show.describe(layout)["streams"] if s["name"] == stream)
    return facts["stored"] or " or ".join(facts["dtypes"])


def lines_of(what: Transfer) -> list[str]:
    """What is moved and how, in a few lines."""
    facts = describe(what)
    lines = [f"{name:<10} {how}" for name, how in facts["streams"].items()]
    lines.append(f"{'layers':<10} {'all of them in one launch' if what.layers == 'all' else 'one a call'}")
    lines.append(f"{'functions':<10} {', '.join(facts['functions'])}")
    if why := token_refusal(what):
        lines.append(f"{'':<10} no single tokens: {why}")
    return lines


def text(what: Transfer) -> str:
    """The same for people, with a picture of a page of each side."""
    lines = [f"{what.name}: {what.summary}" if what.summary else what.name, "", *lines_of(what)]
    for title, layout in zip(("from", "to"), what.sides, strict=True):
        lines += ["", f"{title} {show.text(layout).rstrip()}"]
    return "\n".join(lines) + "\n"
