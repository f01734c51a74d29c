"""Benchmarks: each a program that measures a series of cases and shows every figure beside the published one."""
