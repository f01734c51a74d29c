"""Test bandwidths, the limit of links, the check of results, and rccl-tests' output."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from launch.core.errors import UserError
from recipes.bench import benchmark
from recipes.bench.collective_rank import Collective
from recipes.bench.collective_variables import check_variables
from recipes.bench.collectives import (
    BASELINE,
    BUS_FACTOR,
    CollectivesConfig,
    Workers,
    cases,
    distinct_settings,
    limit_gb_s,
    measure_one,
    notes,
    parse_rccl_tests,
)
from tests.conftest import composed

# Output of rccl-tests on eight MI300X (crickett-hpe/hpc-ai-envs, pull request 30).
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


CASE = {"op": "broadcast", "ranks": 2, "bytes": 1024, "dtype": "fp32"}
CASE |= {"setting": BASELINE, "program": "torch"}


def args(**changes) -> CollectivesConfig:
    return CollectivesConfig("out", **changes)


def config(hardware: str, *overrides: str):
    """Return a configuration in the form that a rank reads."""
    typed = OmegaConf.structured(
        composed(f"hardware={hardware}", "method=bench/collectives", *overrides)
    )
    return OmegaConf.create(OmegaConf.to_container(typed, enum_to_str=True))


def test_output_of_rccl_tests_and_its_bandwidth():
    unchecked = ALL_REDUCE.replace("161.14      0", "161.14    N/A")
    wrong = ALL_REDUCE.replace("161.14      0", "161.14      3")
    expected = {8388608: (pytest.approx(0.0911), 0)}
    assert parse_rccl_tests(ALL_REDUCE) == parse_rccl_tests(unchecked) == expected
    assert parse_rccl_tests(wrong) == {8388608: (pytest.approx(0.0911), 3)}
    assert parse_rccl_tests("all_reduce_perf: no device") == {}
    case = {**CASE, "op": "all_reduce", "ranks": 8, "bytes": 8388608}
    row = measure_with(case, parse_rccl_tests(ALL_REDUCE)[8388608])
    assert row["bus_gb_s"] == pytest.approx(161.14, rel=1e-3)
    assert row["algorithm_gb_s"] == pytest.approx(92.08, rel=1e-3)
    with pytest.raises(UserError, match="3 elements"):
        measure_with(case, parse_rccl_tests(wrong)[8388608])


def measure_with(case, figures):
    workers = SimpleNamespace(measure=lambda case: figures)
    return measure_one(case, args(), config("mi300x"), workers)


@pytest.mark.parametrize(("hardware", "limits"), [
    ("mi300x", {2: 64, 4: 192, 8: 448}),  # 7 links of 64 GB/s, one to each other GPU
    ("h200", {2: 450, 8: 450, 16: None}),  # a switch; 16 ranks need a second node
    ("mi210", {4: 150, 8: 32}),  # two hives of four, connected by PCIe
    ("mi250x", {2: None}),  # the number of links depends on the pair of devices
    ("mi300a", {4: None}),
])  # fmt: skip
def test_the_limit_is_that_of_the_links_in_use(hardware, limits):
    assert {ranks: limit_gb_s(config(hardware), ranks) for ranks in limits} == limits


def test_sizes_and_settings_of_a_series(monkeypatch):
    monkeypatch.setenv("NCCL_MIN_NCHANNELS", "112")
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    lines: list[str] = []
    same = [{"NCCL_MIN_NCHANNELS": 112}, {"NCCL_ALGO": None}]
    settings = distinct_settings(
        [*same, {"NCCL_MIN_NCHANNELS": None}, {"NCCL_ALGO": "Ring"}], lines
    )
    assert settings == {
        BASELINE: {},
        "NCCL_MIN_NCHANNELS unset": {"NCCL_MIN_NCHANNELS": None},
        "NCCL_ALGO=Ring": {"NCCL_ALGO": "Ring"},
    }
    names = [line.partition(":")[0] for line in lines]
    assert names == ["NCCL_MIN_NCHANNELS=112", "NCCL_ALGO unset"]
    series = args(ops=["broadcast"], min_bytes=1024, max_bytes=70000, factor=8)
    assert series.sizes == [1024, 8192, 65536, 70000]
    assert series.series == [(1024, 65536), (70000, 70000)]
    assert args(min_bytes=1024, max_bytes=65536).series == [(1024, 65536)]
    rows = cases(series, config("mi300x"), [2, 4], settings)
    smallest = [row for row in rows if row["bytes"] == 1024]
    assert [(row["ranks"], row["dtype"], row["setting"]) for row in smallest] == [
        (2, "bf16", BASELINE),
        (4, "bf16", BASELINE),
        (4, "fp32", BASELINE),
        (4, "bf16", "NCCL_MIN_NCHANNELS unset"),
        (4, "bf16", "NCCL_ALGO=Ring"),
    ]
    assert cases(args(), config("mi300x"), [], settings) == []
    assert "topology.num_gpus=2" in notes(args(), [])[-1]


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("op", BUS_FACTOR)
def test_every_element_of_a_result_is_checked(one_process, op, dtype):
    """Check the second of three ranks, with the inputs of all three."""
    case = {"op": op, "ranks": 3, "bytes": 3 * 1000, "dtype": dtype}
    ranks = []
    for number in range(3):
        rank = Collective(case, None, torch.device("cpu"))
        rank.rank = number
        ranks.append(rank)
    sent = [rank._sent(torch.arange(len(rank.input)), rank.rank).float() for rank in ranks]
    second, chunk = ranks[1], ranks[1].chunk
    expected = {
        "all_reduce": sum(sent),
        "all_gather": torch.cat(sent),
        "reduce_scatter": sum(sent)[chunk : 2 * chunk],
        "all_to_all": torch.cat([part[chunk : 2 * chunk] for part in sent]),
        "broadcast": sent[0],
    }[op]
    second.call = lambda: second.output.copy_(expected)
    assert second.wrong() == 0
    second.call = lambda: second.output.copy_(expected)[-2:].add_(1)
    assert second.wrong() == 2
    second.call = lambda: None
    assert second.wrong() > 100, "a call that sends no data"


def test_a_worker_measures_despite_a_signal_while_it_starts(one_process, monkeypatch):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    workers = Workers(args(use_cpu=True, warmup=1, repetitions=1), [1], {BASELINE: {}})
    try:
        workers.start(BASELINE)
        for number in (signal.SIGTERM, signal.SIGINT):
            workers.process.send_signal(number)  # while the worker still imports
        ms, wrong = workers.measure({**CASE, "ranks": 1})
    finally:
        workers.close()
    assert ms > 0
    assert wrong == 0


def test_rccl_tests_are_run_if_installed(one_process, tmp_path, monkeypatch):
    program = tmp_path / "all_reduce_perf"
    program.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/argv\necho "$NCCL_ALGO" > {tmp_path}/env\n'
        f"cat <<'END'\n{ALL_REDUCE}END\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    sizes = {"min_bytes": 2**21, "max_bytes": 2**23}
    settings = {"tree": {"NCCL_ALGO": "Tree"}, "ring": {"NCCL_ALGO": "Ring"}}
    programs = {"ops": ["all_reduce"], "programs": ["rccl-tests"]}
    workers = Workers(args(**sizes, **programs, timeout_s=60.0), [8], settings)
    case = {**CASE, "op": "all_reduce", "ranks": 8, "bytes": 2**23, "program": "rccl-tests"}
    case |= {"dtype": "bf16", "setting": "tree"}
    row = measure_one(case, workers.args, config("mi300x"), workers)
    assert row["us"] == pytest.approx(91.1)
    argv = "-b 2097152 -e 8388608 -f 4 -t 8 -g 1 -d bfloat16 -w 5 -n 20\n"
    assert (tmp_path / "argv").read_text() == argv
    assert (tmp_path / "env").read_text() == "Tree\n"
    # With MPI, each GPU has a process.
    assert "thread per GPU" in notes(workers.args, [8])[-1]
    program.write_text(f"{program.read_text()}# MPI_Init\n")
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f'#!/bin/sh\necho "$1 $2" > {tmp_path}/mpi\nshift 2\nexec "$@"\n')
    mpirun.chmod(0o755)
    assert not any("thread per GPU" in line for line in notes(workers.args, [8]))
    workers.rccl_results.clear()
    assert measure_one(case, workers.args, config("mi300x"), workers) == row
    assert (tmp_path / "mpi").read_text() == "-np 8\n"
    assert (tmp_path / "argv").read_text() == argv.replace("-t 8", "-t 1")
    with pytest.raises(UserError, match="no row for this size"):
        measure_one({**case, "bytes": 2**21}, workers.args, config("mi300x"), workers)
    mpirun.unlink()
    program.write_text("#!/bin/sh\necho Test CUDA failure >&2\nexit 3\n")
    case["setting"] = "ring"
    with pytest.raises(UserError, match="exit code 3.*Test CUDA failure"):
        measure_one(case, workers.args, config("mi300x"), workers)
    assert "Test CUDA failure" in workers.skip(case, [])
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(UserError, match=r"0\.01 s"):
        benchmark.parse_output([str(program)], parse_rccl_tests, timeout_s=0.01)


def test_a_misspelled_variable_is_rejected_by_the_names_in_the_library(tmp_path):
    library = tmp_path / "librccl.so.1"
    library.write_bytes(b"\x7fELF\0NCCL_MIN_NCHANNELS\0NCCL_IB_DISABLE\0NCCL_ALGO\0")
    allowed = ["NCCL_MIN_NCHANNELS", "NCCL_IBEXT_DISABLE", "HSA_NO_SCRATCH_RECLAIM"]
    check_variables(allowed, "method.args.space", [library])
    with pytest.raises(UserError, match=r"space\.NCCL_MIN_NCHANEL: .* NCCL_MIN_NCHANNELS"):
        check_variables(["NCCL_MIN_NCHANEL"], "method.args.space", [library])
    check_variables(["NCCL_MIN_NCHANEL"], "method.args.space")  # a CPU build of torch has none
