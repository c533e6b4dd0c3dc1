"""Benchmarks: generated functions beside what else does the same, in one run, on one device.

``traffic`` counts bytes, ``task`` makes tensors, ``functions`` calls the module, ``rivals`` what it is compared with,
``run`` checks and times, ``results`` is what comes out; ``table`` and ``plot`` show it.
"""
