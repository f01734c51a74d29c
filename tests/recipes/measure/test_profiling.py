"""Test profile=torch on a CPU, modules in fp32, and memory from snapshots like torch's."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from recipes.measure import fp32_modules, memory_table, profiling


def config(tmp_path, profile: str = "torch", compute: str = "fp32"):
    return OmegaConf.create(
        {"run_dir": str(tmp_path), "profile": profile, "precision": {"compute": compute}}
    )


@pytest.mark.parametrize(("num_steps", "cycle", "expected"), [
    (None, 1, (2, 1, 2)),
    (4, 1, (1, 1, 2)),
    (2, 1, (0, 1, 1)),  # smoke=true
    (1, 1, (0, 0, 1)),
    (100, 4, (3, 1, 4)),  # grpo: whole generation cycles
    (6, 4, (1, 1, 4)),
])  # fmt: skip
def test_numbers_of_skipped_warmup_and_profiled_steps(num_steps, cycle, expected):
    assert profiling.steps(num_steps, cycle) == expected


class InFp32(nn.Module):
    """Compute in fp32 like a library that casts its inputs itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 512))

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return x.float() @ self.weight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512)) for _ in range(2)
        )
        self.last = InFp32()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def train(settings, num_steps: int, model: nn.Module) -> None:
    with profiling.session(settings, num_steps, model=model) as profile:
        for _ in range(num_steps):
            with torch.autocast(
                "cpu", dtype=torch.bfloat16, enabled=settings.precision.compute == "bf16"
            ):
                loss = model(torch.randn(256, 512)).square().mean()
            loss.backward()
            profile.step()


def read(tmp_path, name: str) -> dict:
    return json.loads((tmp_path / "profile" / name).read_text())


@pytest.mark.parametrize("profile", ["none", "rocprof"])
def test_nothing_is_written_without_a_profile(tmp_path, profile):
    train(config(tmp_path, profile), 3, Model())
    assert not list(tmp_path.iterdir())


def test_files_of_a_plain_loop_with_modules_in_fp32(tmp_path, capsys):
    model = Model()
    train(config(tmp_path, compute="bf16"), 6, model=model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    names = {path.name for path in (tmp_path / "profile").iterdir()}
    assert names == {"trace-rank0.json.gz", "kernels.json", "fp32_modules.json"}
    kernels = read(tmp_path, "kernels.json")
    assert (kernels["steps"], kernels["device"]) == (2, "cpu")
    assert kernels["shares"]["gemm"] > 0.05
    products = next(row for row in kernels["kernels"] if row["name"] == "aten::addmm")
    assert (products["kind"], products["calls"]) == ("gemm", 4), "two layers, two steps"
    with gzip.open(tmp_path / "profile/trace-rank0.json.gz", "rt") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    steps = {name for name in names if name.startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#3", "ProfilerStep#4"}
    table = read(tmp_path, "fp32_modules.json")
    (product,) = (row for row in table["modules"] if row["what"] == fp32_modules.PRODUCTS)
    assert (product["name"], product["class"]) == ("last", "InFp32")
    # The backward pass has a product for the input and one for the weight, in the same module.
    assert product["calls"] == 2 * 3
    assert product["share"] == pytest.approx(product["time_s"] / kernels["time_s"])
    assert table["products_share"] == pytest.approx(product["share"])
    names = {(row["name"], row["class"], row["what"]) for row in table["modules"]}
    assert ("layers.*.*", "LayerNorm", fp32_modules.REST) in names
    assert "last (InFp32)" in capsys.readouterr().out


def event(category: str, name: str, ts: float, dur: float, pid: int, tid: int, args: dict) -> dict:
    place = {"pid": pid, "tid": tid, "args": args}
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, **place}


def operator(
    name: str, ts: float, dur: float, identifier: int, types: list[str], tid: int = 1, **args
) -> dict:
    args = {"External id": identifier, "Input type": types, **args}
    return event("cpu_op", name, ts, dur, 1, tid, args)


def kernel(name: str, dur: float, identifier: int) -> dict:
    return event("kernel", name, 0, dur, 0, 7, {"External id": identifier})


def test_modules_cost_the_time_of_their_kernels():
    """As on a GPU, kernels run after short operators, and the backward pass in another thread."""
    fp32, bf16 = ["float", "float"], ["c10::BFloat16", "c10::BFloat16"]
    forward, backward = ({"Sequence number": 9, "Fwd thread id": thread} for thread in (0, 1))
    node = "autograd::engine::evaluate_function: MmBackward0"
    events = [
        event("user_annotation", "module: head Linear", 0, 100, 1, 1, {}),
        operator("aten::mm", 10, 5, 1, fp32, **forward),
        operator("aten::mm", 20, 5, 2, bf16),
        operator("aten::copy_", 30, 5, 3, ["float", "c10::BFloat16"]),
        operator(node, 200, 50, 4, [], tid=2, **backward),
        operator("aten::mm", 210, 5, 5, fp32, tid=2),
        operator("aten::addcdiv_", 300, 5, 6, ["float", "float", "float"]),  # the optimizer's
        *(kernel("nvjet", 1e6, 1), kernel("nvjet", 5e6, 2), kernel("copy", 5e6, 3)),
        *(kernel("nvjet", 2e6, 5), kernel("adam", 5e6, 6)),
    ]
    table = fp32_modules.summary(events, time_s=10.0)
    (row,) = table["modules"]
    assert (row["name"], row["class"], row["what"]) == ("head", "Linear", "matrix products")
    assert (row["calls"], row["time_s"], row["share"]) == (2, 3.0, 0.3)
    assert (table["share"], table["products_share"]) == (0.3, 0.3)


def entry(action: str, addr: int, size: int, *frames: tuple[str, int, str]) -> dict:
    return {
        "action": action,
        "addr": addr,
        "size": size,
        "frames": [{"filename": f, "line": n, "name": w} for f, n, w in frames],
    }


def test_memory_at_its_peak():
    """The snapshot has the keys and actions in the docstring of torch.cuda.memory._snapshot."""
    own, inside = (
        ("/opt/lib/trl/trainer/sft.py", 40, "loss"),
        ("/opt/lib/torch/nn/functional.py", 7, "linear"),
    )
    trace = [
        entry("segment_alloc", 1, 2**30),
        entry("alloc", 1, 2_000_000_000, inside, own),
        entry("alloc", 2, 1_000_000_000, inside, own),
        entry("free_requested", 1, 2_000_000_000),
        entry("alloc", 3, 3_000_000_000),
        entry("free_completed", 1, 2_000_000_000),
        entry("free_completed", 99, 500),  # of a block that was there before
        entry("alloc", 1, 1_000_000_000, inside),
        entry("free_completed", 3, 3_000_000_000),
    ]
    stats = {
        "allocated_bytes.all.peak": 10_000_000_000,
        "reserved_bytes.all.peak": 12_000_000_000,
        "reserved_bytes.all.current": 8_000_000_000,
        "inactive_split_bytes.all.current": 2_000_000_000,
        "num_alloc_retries": 1,
    }
    snapshot, most = {"device_traces": [[], trace]}, len(trace)
    assert memory_table.summary(snapshot, stats, 1, max_events=most)["history_is_cut"]
    table = memory_table.summary(snapshot, stats, 1, max_events=most + 1)
    assert table.pop("at_peak") == [
        {"line": "trl/trainer/sft.py:40 loss", "blocks": 2, "gb": 3.0},
        {"line": "no Python line (backward)", "blocks": 1, "gb": 3.0},
    ]
    sizes = {"allocated_peak_gb": 10.0, "reserved_peak_gb": 12.0, "before_gb": 4.0}
    counts = {"history_is_cut": False, "num_alloc_retries": 1, "num_ooms": 0}
    assert table == {**sizes, "fragmentation": 0.25, **counts}


@pytest.fixture
def recorder(monkeypatch):
    """Replace torch's recorder, which needs a GPU, and return the list of its arguments."""
    calls: list[str] = []

    def record(enabled: str | None = "all", **kwargs) -> None:
        calls.append("on" if enabled else "off")

    def dump(path: str) -> None:
        calls.append(path.rpartition("/")[2])

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    snapshot = {"device_traces": [[entry("alloc", 1, 4_000_000_000)]]}
    stats = {"allocated_bytes.all.peak": 5_000_000_000}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return calls


@pytest.mark.parametrize(("num_steps", "recorded"), [(10, 3), (2, 2)])
def test_memory_of_the_first_steps(tmp_path, recorder, num_steps, recorded):
    with profiling.session(config(tmp_path, "memory"), num_steps) as profile:
        for number in range(1, num_steps + 1):
            profile.step()
            assert ("off" in recorder) == (number >= recorded)  # the rest is not slowed down
    assert recorder == ["on", "memory.pickle", "off"]
    table = read(tmp_path, "memory.json")
    assert (table["steps"], table["before_gb"], table["at_peak"][0]["gb"]) == (recorded, 1.0, 4.0)
