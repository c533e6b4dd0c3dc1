"""Benchmarks: generated functions beside what else does the same, in one run, on one device.

``task`` and ``transfers`` make tensors, of fused appends with ``fused``; ``traffic`` counts bytes, ``functions`` calls
the module, ``rivals`` and ``libraries`` what it is compared with. ``ahead`` compiles, ``run`` checks and times,
``results`` is what comes out; ``table``, ``markdown``, ``targets`` and ``plot`` show it.
"""
