"""Plans and schedules to the text of generated modules."""

from kvgen.emit.render import render_all, render_layout
from kvgen.emit.specs import KernelSpec, kernels

__all__ = ["KernelSpec", "kernels", "render_all", "render_layout"]
