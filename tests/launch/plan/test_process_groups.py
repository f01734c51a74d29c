"""Test the commands of profile=rocprof."""

from __future__ import annotations

import pytest

from launch.plan.planning import make_plan, prepare
from tests.conftest import composed, host_with
from tests.launch.execution.test_docker_engine import fake, image_json  # noqa: F401  a fixture

ON_MI300X = (
    "hardware=mi300x",
    "model=qwen3_4b",
    "topology=single",
    "runtime=local",
    "method.args.save_strategy=no",
)


def plan_of(run_dir, *overrides: str):
    config, _ = prepare(composed(*ON_MI300X, "profile=rocprof", *overrides))
    return make_plan(config, host_with(8), run_dir)


@pytest.mark.parametrize(("program", "expected"), [
    ("v3", "rocprofv3 --runtime-trace --stats --output-directory {profile} "
     "--output-file rank%env{RANK}% --output-format pftrace csv"),
    ("v3 rocprof_counters=[SQ_WAVES,TCC_HIT_sum]", "rocprofv3 --pmc SQ_WAVES TCC_HIT_sum "
     "--output-directory {profile} --output-file rank%env{RANK}% --output-format csv"),
    ("compute", "python -m recipes.measure.compute_profile {profile}"),
    ("sys", "rocprof-sys-sample --trace --output {profile} rank%env{RANK}%"),
])  # fmt: skip
def test_the_profiler_wraps_each_rank(tmp_path, program, expected):
    [process] = plan_of(tmp_path, *f"rocprof={program}".split()).processes
    begin = process.argv.index("--no-python") + 1
    wrapped = [word.replace("{profile}", str(tmp_path / "profile")) for word in expected.split()]
    assert process.argv[begin:] == [
        *wrapped,
        *"-- python -m recipes.sft --config".split(),
        str(tmp_path / "config.yaml"),
    ]
    assert process.argv[begin - 3 : begin - 1] == ["--nproc-per-node", "1"]
