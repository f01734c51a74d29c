"""List the packages of this Python, for the launcher's record and the ranks'."""

import functools


@functools.cache  # takes a second, and every phase of a pipeline needs it
def packages() -> dict[str, str]:
    """Return the version of each installed package by name. Do not modify the cached result."""
    from importlib.metadata import distributions  # takes 15 ms

    installed = reversed([*distributions()])  # of two versions, Python imports the first
    return dict(sorted({each.name: each.version for each in installed if each.name}.items()))
