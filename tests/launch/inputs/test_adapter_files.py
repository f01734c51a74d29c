"""Test the checks of an adapter's files, the layers that a plan counts, and a run's record."""

from __future__ import annotations

import copy
import json

import pytest

from launch import reproduce
from launch.config.request import Request
from launch.core import json_files
from launch.core.errors import EXIT_INTERRUPTED, UserError
from launch.estimate import adapter_layers
from launch.execution import record
from launch.inputs.adapter_files import check_adapter
from launch.plan import rundir, sealed
from launch.plan.planning import make_plan
from launch.schema.shapes import LINEARS, linear_sizes
from launch.study import pipeline
from tests.conftest import composed, host_with

LORA = ["hardware=cpu", "model=tiny", "adapter=lora", "adapter.rank=4", "adapter.alpha=8"]


def write_adapter(folder, settings=None):
    content = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **(settings or {})}
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(content))
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes((2).to_bytes(8, "little") + b"{}")
    return weights


@pytest.mark.parametrize(("settings", "override", "message"), [
    ({}, "adapter.alpha=9", r"adapter.alpha=9: .* has 8. Use: adapter.alpha=8"),
    ({"alpha_pattern": {"q_proj": 64}}, "seed=1", "has alpha_pattern="),
    ({"bias": "all"}, "seed=1", "has bias=all"),
    ({}, "adapter.target_modules=[k_proj]", r"target_modules=\[k_proj\]: .* other layers"),
    ({"use_dora": True}, "seed=1", "Use: adapter.dora=true"),
])  # fmt: skip
def test_adapters_with_other_settings_are_rejected(tmp_path, settings, override, message):
    write_adapter(tmp_path, settings)
    config = copy.deepcopy(composed(*LORA, override))
    config.adapter.path = str(tmp_path)
    with pytest.raises(UserError, match=message):
        check_adapter(config)


def test_incomplete_adapters_are_rejected(tmp_path):
    weights = write_adapter(tmp_path)
    config = copy.deepcopy(composed(*LORA))
    config.adapter.path = str(tmp_path)

    def assert_rejected(message):
        with pytest.raises(UserError, match=message):
            check_adapter(config)

    weights.write_bytes(b"short")
    assert_rejected("cannot be read")
    (tmp_path / "adapter_config.json").write_text("[]")
    assert_rejected("must be a JSON object")
    weights.unlink()
    assert_rejected("no adapter_model.safetensors")


@pytest.mark.parametrize(
    ("target_modules", "layers"),
    [(["self_attn.q_proj"], ["q_proj"]), ("q_proj|k_proj", LINEARS), (None, LINEARS)],
)
def test_the_planner_counts_the_layers_of_the_adapter_that_is_trained_on(
    target_modules, layers, tmp_path
):
    """Count all seven for a regular expression, and for files that do not exist yet."""
    if target_modules:
        content = json.dumps({"target_modules": target_modules})
        (tmp_path / "adapter_config.json").write_text(content)
    config = composed("hardware=cpu", "model=tiny", "adapter=lora", f"adapter.path={tmp_path}")
    assert adapter_layers.layers(config.model, config.adapter) == [*layers]
    sizes = dict(zip(LINEARS, linear_sizes(config.model), strict=True))
    trained = adapter_layers.trainable_parameters(config.model, config.adapter)
    assert trained == config.model.num_layers * config.adapter.rank * sum(
        sum(sizes[name]) for name in layers
    )


def test_runs_identify_adapters_by_content(tmp_path, capsys, monkeypatch):
    """Resume runs and pipelines only with the same content; reproduce prints what differs."""
    folder = tmp_path / "adapter"
    weights = write_adapter(folder)
    overrides = [*LORA, f"adapter.path={folder}", f"run_root={tmp_path}/runs", "name=n"]
    plan = make_plan(
        composed(*overrides), host_with(0), tmp_path / "runs/n/1", request=Request(overrides)
    )
    entry, before = record.begin(plan, host_with(0), None, None), json_files.sha256(weights)
    json_files.write_json(
        plan.run_dir / "record.json", sealed.seal({**entry, "status": "interrupted"})
    )
    phases = [*overrides, "phases=[{name: a}, {name: b, model_from: a}]"]
    plans = pipeline.make_plans(composed(*phases), Request(phases), host_with(0), tmp_path / "2")
    of_all = pipeline.input_data(tmp_path / "2", list(plans.values()))
    assert entry["model"]["adapter"] == {
        str(file): json_files.sha256(file) for file in sorted(folder.iterdir())
    }
    assert rundir.choose(plan.config) == (plan.run_dir, True)
    weights.write_bytes((3).to_bytes(8, "little") + b"{ }")
    assert rundir.changed_data(entry) == rundir.changed_data({"data": of_all}) == [str(weights)]
    assert rundir.choose(plan.config)[1] is False
    with pytest.raises(
        UserError, match=r"adapter/adapter_model\.safetensors changed since that run began"
    ):
        rundir.choose(composed(*overrides, f"resume={plan.run_dir}"))
    monkeypatch.setattr(reproduce, "check_host", lambda plan, host: None)
    monkeypatch.setattr(reproduce, "execute", lambda *args, **kwargs: EXIT_INTERRUPTED)
    reproduce.reproduce_one(plan.run_dir, entry, [])
    assert (
        f"model.adapter.{weights}: {before} -> {json_files.sha256(weights)}"
        in capsys.readouterr().out
    )
