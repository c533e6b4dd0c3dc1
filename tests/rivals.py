"""What ``kvgen bench`` compares with in tests: adapters and functions that are right, and some that are wrong."""

from __future__ import annotations


def right(task):
    """Key and value of every token, by a loop; rows into the outputs."""
    size, slots = task.block_size, task.slots.tolist()
    caches = list(task.buffers.values())

    def append():
        for stream, cache in zip(task.streams.values(), caches, strict=True):
            for t, slot in enumerate(slots):
                cache[slot // size, slot % size] = stream[t]

    def gather():
        for out, cache in zip(task.outputs.values(), caches, strict=True):
            for t, slot in enumerate(slots):
                out[t] = cache[slot // size, slot % size]

    return {"append": append, "gather": gather}.get(task.function)


def off_by_one(task):
    if task.function != "append":
        return lambda: next(iter(task.outputs.values()))
    key_cache, size = task.buffers["key_cache"], task.block_size

    def append():
        key_cache[(task.slots + 1) // size % len(key_cache), (task.slots + 1) % size] = task.streams["key"]

    return append


def broken(task):
    raise RuntimeError("no kernel\nfor this")


def never(task):
    return None


number = 5


def write(key, value, key_cache, value_cache, slots):
    size = key_cache.shape[1]
    key_cache[slots // size, slots % size] = key
    value_cache[slots // size, slots % size] = value


def read(key_cache, value_cache, slots):
    size = key_cache.shape[1]
    return tuple(cache[slots // size, slots % size] for cache in (key_cache, value_cache))
