"""Test bandwidths, the links' limit, wrong results, and rccl-tests' output."""

from __future__ import annotations

import os
import signal
import stat
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from launch.core.errors import UserError
from recipes.bench import rccl_tests
from recipes.bench.collective_rank import Collective
from recipes.bench.collectives import (
    BASELINE,
    BUS_FACTOR,
    CollectivesConfig,
    Workers,
    cases,
    chosen,
    limit_gb_s,
    notes,
    one,
)
from tests.conftest import composed

# Printed by rccl-tests on eight MI300X (crickett-hpe/hpc-ai-envs, pull request 30), spaces kept.
ALL_REDUCE = """\
# nThread 1 nGpus 8 minBytes 8388608 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20 \
agg iters: 1 validation: 1 graph: 0
#
rccl-tests: Version develop:83d38d9
# Using devices
#  Rank  0 Group  0 Pid  37300 on   g100n126 device  0 [0000:05:00] AMD Instinct MI300X
#
#                                                              out-of-place            \
           in-place          
#       size         count      type   redop    root     time   algbw   busbw #wrong\
     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)       \
     (us)  (GB/s)  (GB/s)       
     8388608       2097152     float     sum      -1    91.10   92.08  161.14      0\
    94.94   88.36  154.63      0
"""  # noqa: W291
# Of a broadcast between two Strix Halo (ROCm/rccl, pull request 2075).
BROADCAST = """\
    67108864      16777216     float    none       0   9407.6    7.13    7.13      0\
   9352.9    7.18    7.18      0
   134217728      33554432     float    none       0    18781    7.15    7.15      0\
    18756    7.16    7.16      0
# Errors with asterisks indicate errors that have exceeded the maximum threshold.
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 3.41227
#
# Collective test concluded: broadcast_perf
"""


CASE = {"op": "broadcast", "ranks": 2, "bytes": 1024, "dtype": "fp32"}
CASE |= {"setting": BASELINE, "program": "torch"}


def args(**given) -> CollectivesConfig:
    return CollectivesConfig("out", **given)


def config(hardware: str, *overrides: str):
    """Return a configuration as a rank reads it."""
    actual = OmegaConf.structured(
        composed(f"hardware={hardware}", "method=bench/collectives", *overrides)
    )
    return OmegaConf.create(OmegaConf.to_container(actual, enum_to_str=True))


def test_output_of_rccl_tests():
    assert rccl_tests.parse(ALL_REDUCE) == {8388608: (pytest.approx(0.0911), 0)}
    assert rccl_tests.parse(BROADCAST) == {
        67108864: (pytest.approx(9.4076), 0),
        134217728: (pytest.approx(18.781), 0),
    }
    assert rccl_tests.parse(BROADCAST.replace(" 0   9352.9", " N/A   9352.9")) == rccl_tests.parse(
        BROADCAST
    )
    assert rccl_tests.parse(ALL_REDUCE.replace("161.14      0", "161.14      3")) == {
        8388608: (pytest.approx(0.0911), 3)
    }
    assert rccl_tests.parse("all_reduce_perf: no device") == {}


@pytest.mark.parametrize(("text", "op", "ranks", "size", "bus"), [
    (ALL_REDUCE, "all_reduce", 8, 8388608, 161.14),
    (BROADCAST, "broadcast", 2, 134217728, 7.15),
])  # fmt: skip
def test_bandwidth_is_that_of_nccl_tests(text, op, ranks, size, bus):
    case = {**CASE, "op": op, "ranks": ranks, "bytes": size}
    workers = SimpleNamespace(measure=lambda case: rccl_tests.parse(text)[case["bytes"]])
    row = one(case, args(), config("mi300x"), workers)
    assert row["bus_gb_s"] == pytest.approx(bus, rel=1e-3)
    assert row["algorithm_gb_s"] == pytest.approx(row["bus_gb_s"] / BUS_FACTOR[op](ranks))


def test_a_wrong_result_has_no_figure():
    workers = SimpleNamespace(measure=lambda case: (1.0, 5))
    with pytest.raises(UserError, match="5 elements of the result are wrong"):
        one(CASE, args(), config("mi300x"), workers)


def test_the_limit_is_that_of_the_links_in_use():
    """Count seven links of 64 GB/s for an MI300X, one to each other GPU.

    NVLink's switch gives two GPUs all of theirs.
    """
    assert [limit_gb_s(config("mi300x"), ranks) for ranks in (2, 4, 8)] == [64, 192, 448]
    assert [limit_gb_s(config("h200"), ranks) for ranks in (2, 8)] == [450, 450]
    assert limit_gb_s(config("h200"), 16) is None, "another node's links are not these"
    assert [limit_gb_s(config("mi210"), ranks) for ranks in (4, 8)] == [150, 32], (
        "two hives of four, PCIe between them"
    )
    assert limit_gb_s(config("mi250x"), 2) is None, (
        "which links two of its devices have depends on which two"
    )
    assert limit_gb_s(config("mi300x", "smoke=true", "hardware.link=none"), 2) is None
    assert config("mi300a").hardware.link_gb_s is None
    assert limit_gb_s(config("mi300a"), 4) is None
    assert notes(args(ranks=[4]), config("mi300a"), [4]) == []


def test_sizes_and_settings_of_a_series(monkeypatch):
    monkeypatch.setenv("NCCL_MIN_NCHANNELS", "112")
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    actual, message = {}, []
    actual = chosen(
        [
            {"NCCL_MIN_NCHANNELS": 112},
            {"NCCL_ALGO": None},
            {"NCCL_MIN_NCHANNELS": None},
            {"NCCL_ALGO": "Ring"},
        ],
        message,
    )
    assert actual == {
        BASELINE: {},
        "NCCL_MIN_NCHANNELS unset": {"NCCL_MIN_NCHANNELS": None},
        "NCCL_ALGO=Ring": {"NCCL_ALGO": "Ring"},
    }
    assert [line.partition(":")[0] for line in message] == [
        "NCCL_MIN_NCHANNELS=112",
        "NCCL_ALGO unset",
    ]
    series = args(ops=["broadcast"], min_bytes=1024, max_bytes=70000, factor=8)
    assert series.sizes == [1024, 8192, 65536, 70000]
    assert series.series == [(1024, 65536), (70000, 70000)]
    assert args(max_bytes=8 << 30).sizes[-2:] == [4 << 30, 8 << 30], "1 KiB x 4^k passes it by"
    assert args(min_bytes=1024, max_bytes=65536).series == [(1024, 65536)]
    assert args(min_bytes=1024, max_bytes=1024).series == [(1024, 1024)]
    rows = cases(series, config("mi300x"), [2, 4], actual)
    assert [
        (row["ranks"], row["dtype"], row["setting"]) for row in rows if row["bytes"] == 1024
    ] == [
        (2, "bf16", BASELINE),
        (4, "bf16", BASELINE),
        (4, "fp32", BASELINE),
        (4, "bf16", "NCCL_MIN_NCHANNELS unset"),
        (4, "bf16", "NCCL_ALGO=Ring"),
    ]


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("op", BUS_FACTOR)
def test_every_element_of_a_result_is_checked(one_process, op, dtype):
    """Put together here what the second of three ranks receives from each."""
    case = {"op": op, "ranks": 3, "bytes": 3 * 1000, "dtype": dtype}
    ranks = []
    for number in range(3):
        rank = Collective(case, None, torch.device("cpu"))
        rank.rank = number
        ranks.append(rank)
    sent = [rank._sent(torch.arange(len(rank.input)), rank.rank).float() for rank in ranks]
    second, chunk = ranks[1], ranks[1].chunk
    arrives = {
        "all_reduce": sum(sent),
        "all_gather": torch.cat(sent),
        "reduce_scatter": sum(sent)[chunk : 2 * chunk],
        "all_to_all": torch.cat([whole[chunk : 2 * chunk] for whole in sent]),
        "broadcast": sent[0],
    }[op]
    second.call = lambda: second.output.copy_(arrives)
    assert second.wrong() == 0
    second.call = lambda: second.output.copy_(arrives)[-2:].add_(1)
    assert second.wrong() == 2
    second.call = lambda: None
    assert second.wrong() > 100, "a call that moves nothing"
    second.prepare()
    assert bool(second.input.any()) == (op != "all_reduce")


def test_a_worker_that_is_told_to_stop_as_it_starts_answers(one_process, monkeypatch):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    workers = Workers(args(use_cpu=True, warmup=1, repetitions=1), [1], {BASELINE: {}})
    try:
        workers.start(BASELINE)
        for number in (signal.SIGTERM, signal.SIGINT):
            workers.process.send_signal(number)  # long before its imports have ended
        ms, wrong = workers.measure({**CASE, "ranks": 1})
    finally:
        workers.close()
    assert ms > 0
    assert wrong == 0


def test_rccl_tests_are_driven_where_they_are(tmp_path, monkeypatch):
    program = tmp_path / "all_reduce_perf"
    program.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/argv\necho "$NCCL_ALGO" > {tmp_path}/env\n'
        f"cat <<'END'\n{ALL_REDUCE}END\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert rccl_tests.installed("all_reduce")
    argv = rccl_tests.argv("all_reduce", "bf16", 8, (1024, 1 << 32, 4), 5, 20)
    assert rccl_tests.measure(argv, {**os.environ, "NCCL_ALGO": "Tree"}, 60) == {
        8388608: (pytest.approx(0.0911), 0)
    }
    assert (
        tmp_path / "argv"
    ).read_text() == "-b 1024 -e 4294967296 -f 4 -t 8 -g 1 -d bfloat16 -w 5 -n 20\n"
    assert (tmp_path / "env").read_text() == "Tree\n"
    program.write_text("#!/bin/sh\necho Test CUDA failure >&2\nexit 3\n")
    with pytest.raises(UserError, match="exit code 3.*Test CUDA failure"):
        rccl_tests.measure(argv, os.environ, 60)
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(UserError, match=r"no end after 0\.01 s"):
        rccl_tests.measure(argv, os.environ, 0.01)
