"""Templates hold no decisions: loops, and ``if`` on what was decided before."""

from pathlib import Path

import pytest
from jinja2 import Environment, nodes

from kvgen.resources import folder

TEMPLATES = sorted(folder("templates").rglob("*.j2"))
FORBIDDEN = (
    nodes.Compare,
    nodes.BinExpr,
    nodes.UnaryExpr,
    nodes.Test,
    nodes.CondExpr,
    nodes.Assign,
    nodes.AssignBlock,
)
FILTERS = {"join", "map", "indent"}


def decisions(source: str) -> list[str]:
    """Whatever in a template decides or computes something."""
    tree = Environment().parse(source)
    found = [f"{type(node).__name__} at line {node.lineno}" for node in tree.find_all(FORBIDDEN)]
    found += [
        f"filter {node.name} at line {node.lineno}" for node in tree.find_all(nodes.Filter) if node.name not in FILTERS
    ]
    for node in tree.find_all(nodes.Call):
        if not isinstance(node.node, nodes.Name):  # a macro is called by its name
            found.append(f"Call at line {node.lineno}")
    for node in tree.find_all(nodes.If):
        if not isinstance(node.test, nodes.Getattr | nodes.Name):
            found.append(f"if on {type(node.test).__name__} at line {node.lineno}")
    return found


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_templates_hold_no_decisions(path: Path) -> None:
    assert decisions(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "{% if a > 1 %}{% endif %}",
        "{{ a + 1 }}",
        "{{ 'x' if a else 'y' }}",
        "{% set a = 1 %}",
        "{% if a is defined %}{% endif %}",
        "{% if not a %}{% endif %}",
        "{{ a | upper }}",
        "{{ a.upper() }}",
    ],
)
def test_the_lint_sees_a_decision(source: str) -> None:
    assert decisions(source) != []


def test_templates_stay_readable() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in TEMPLATES}
    assert {name: count for name, count in lengths.items() if count > 150} == {}
