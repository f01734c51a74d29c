"""Test the space of a search and the lists of a grid."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from launch.config.compose import groups
from launch.core.errors import UserError
from launch.schema import Parameter, Sweep
from launch.study import space as sweep_space
from tests.conftest import composed


def space(metric: str | None = "loss", num_trials: int = 20, **parameters: Parameter) -> Sweep:
    return Sweep(name="mine", metric=metric, num_trials=num_trials, space=parameters)


RATE = Parameter(key="method.args.learning_rate", low=1e-6, high=1e-3, log=True)
RANK = Parameter(key="adapter.rank", values=[8, 16])
SEED = Parameter(key="seed", values=[0, 1, 2])


def test_a_grid_is_every_combination():
    fixed, grid = sweep_space.split(["hardware=cpu", "seed=0,1", "~targets", "method=sft,dpo"])
    assert fixed == ["hardware=cpu", "~targets"]
    assert grid == [
        [f"seed={seed}", f"method={method}"] for seed in (0, 1) for method in ("sft", "dpo")
    ]


@pytest.mark.parametrize(("override", "values"), [
    ("seed=range(0,3)", ["0", "1", "2"]),
    ("data.path='a b.jsonl',c.jsonl", ["'a b.jsonl'", "c.jsonl"]),
    ("adapter=glob(*)", groups()["adapter"]),
    ("method.args.loss_type=[ipo],[sigmoid]", ["[ipo]", "[sigmoid]"]),
])  # fmt: skip
def test_lists_of_the_command_line(override, values):
    key = override.partition("=")[0]
    assert sweep_space.split([override]) == ([], [[f"{key}={value}"] for value in values])


@pytest.mark.parametrize(("value", "text"), [
    (0.1, "0.1"),
    (1e-05, "1e-05"),
    (8, "8"),
    (True, "true"),
    (None, "null"),
    ("lora", "lora"),
    ("true", "'true'"),
    ("1e5", "'1e5'"),
    ("it's, so", "'it\\'s, so'"),
    (["ipo", 2], "[ipo,2]"),
    ({"a": [1]}, "{a:[1]}"),
])  # fmt: skip
def test_a_value_reaches_the_override_unchanged(value, text):
    """Hydra parses the override to the same value."""
    assert sweep_space.overrides_of(space(x=Parameter(key="k", values=[value])), {"x": text}) == [
        f"k={text}"
    ]
    assert sweep_space.choices(Parameter(key="k", values=[value])) == [text]
    assert OverridesParser.create().parse_override(f"k={text}").value() == value


def test_a_space_of_lists_is_tried_completely_with_enough_trials():
    found = sweep_space.combinations(space(rank=RANK, seed=SEED, num_trials=6))
    assert found == [
        {"rank": rank, "seed": seed} for rank in ("8", "16") for seed in ("0", "1", "2")
    ]
    assert sweep_space.combinations(space(rank=RANK, seed=SEED, num_trials=5)) is None
    assert sweep_space.combinations(space(rank=RANK, rate=RATE, num_trials=99)) is None


@pytest.mark.parametrize(("sweep", "said"), [
    (space(), "in sweep.space"),
    (space(metric=None, rate=RATE), "and sweep.metric"),
    (space(x=Parameter(key="seed", values=[])), "sweep.space.x: "),
    (space(x=Parameter(key="seed")), "sweep.space.x: "),
    (space(x=Parameter(key="seed", values=[1], low=1.0)), "sweep.space.x: "),
    (space(x=Parameter(key="seed", low=0.0, high=2.0, log=True)), "sweep.space.x: `low > 0`"),
    (space(x=Parameter(key="adapter.rnak", values=[1])), "Did you mean adapter.rank"),
    (space(x=Parameter(key="adapter", values=["lora", "lorra"])),
     "adapter=lorra: no such adapter. Did you mean lora"),
    (space(a=RANK, b=RANK), "two parameters vary adapter.rank"),
])  # fmt: skip
def test_a_space_that_cannot_be_searched(sweep, said):
    with pytest.raises(UserError) as raised:
        sweep_space.check(sweep)
    assert said in str(raised.value)


@pytest.mark.parametrize("name", [name for name in groups()["sweep"] if name != "none"])
def test_every_sweep_of_conf_can_be_searched(name):
    sweep = composed("hardware=cpu", f"sweep={name}").sweep
    sweep_space.check(sweep)
    assert sweep.name == name
