"""Benchmarks: programs that measure series of cases, each figure next to a published one."""
