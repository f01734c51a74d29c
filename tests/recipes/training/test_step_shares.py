"""Test that the parts of GRPO's step add up to its time, with all kinds of generation."""

import pytest

from tests.helpers.engines import GATHERS, GENERATES, JUDGES, SENDS, STEPS, WAITS, run_grpo

SUMMED = ("generation_s", "wait_s", "sync_s", "reward_s", "train_s")
SPLIT = ["topology=split", "hardware.vllm=true", "hardware.gpus_per_node=2", "topology.num_gpus=2"]
COLOCATE = ["topology=colocate", "hardware.vllm=true"]
MICRO = ["method.args.steps_per_generation=4", "method.args.gradient_accumulation_steps=2"]
TWICE = ["method.args.num_iterations=2"]  # two steps per generation
# Overrides, and generation_s, wait_s, sync_s and reward_s of a step that generates. With a server,
# prompts and images are gathered first.
GENERATORS = {
    "transformers": ([], [GENERATES, 0, 0, JUDGES]),
    "server": ([*SPLIT, "topology.overlap=false"], [GENERATES, 2 * GATHERS, SENDS, JUDGES]),
    "colocate": (COLOCATE, [GENERATES, 0, SENDS, JUDGES]),
    "colocate that sleeps": (
        [*COLOCATE, "method.args.vllm_enable_sleep_mode=true"],
        [GENERATES, 0, SENDS, JUDGES],
    ),
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that trains and returns the checked lines of metrics.jsonl."""

    def lines(*overrides):
        logged = run_grpo(tmp_path, monkeypatch, *overrides)
        for line in logged:
            assert sum(line[name] for name in SUMMED) == pytest.approx(line["step_s"], abs=1e-9)
        return logged

    return lines


def shares(line):
    return [line[name] for name in SUMMED]


def test_every_step_generates(run):
    parts = GENERATORS["transformers"][1]
    logged = run()
    assert [line["step"] for line in logged] == [1, 2]
    assert [line["time_s"] for line in logged] == [sum(parts) + STEPS, 2 * (sum(parts) + STEPS)]
    assert [shares(line) for line in logged] == [[*parts, STEPS]] * 2


@pytest.mark.parametrize(
    ("kind", "twice"), [("transformers", MICRO), ("server", TWICE), ("colocate", TWICE)]
)
def test_two_steps_per_generation(run, kind, twice):
    overrides, parts = GENERATORS[kind]
    logged = run(*overrides, *twice, "method.args.max_steps=4")
    assert [line["time_s"] for line in logged] == [
        n * sum(parts) + m * STEPS for n, m in ((1, 1), (1, 2), (2, 3), (2, 4))
    ]
    assert [shares(line) for line in logged] == [[*parts, STEPS], [0, 0, 0, 0, STEPS]] * 2
    assert not any("server_s" in line for line in logged)


@pytest.mark.parametrize("kind", ["server", "colocate that sleeps"])
def test_two_generations_per_step(run, kind):
    overrides, (generation, wait, sync, reward) = GENERATORS[kind]
    accumulated = "method.args.gradient_accumulation_steps=2 method.args.steps_per_generation=1"
    logged = run(*overrides, *accumulated.split())
    # An engine that sleeps loses its weights.
    sent = 2 * sync if kind == "colocate that sleeps" else sync
    expected = [2 * generation, 2 * wait, sent, 2 * reward, STEPS]
    assert [shares(line) for line in logged] == [expected] * 2


@pytest.mark.parametrize("kind", ["transformers", "server"])
def test_step_excludes_evaluation(run, kind):
    overrides, parts = GENERATORS[kind]
    measured = "method.args.save_strategy=steps method.args.save_steps=1 data.num_heldout=4".split()
    logged = run(*overrides, "method.selection.metric=eval_reward", *measured)
    assert all(line["eval_s"] >= GENERATES + JUDGES for line in logged)
    generation, wait, sync, reward = parts  # the weights are sent before the evaluation
    expected = [[generation, wait, seconds, reward, STEPS] for seconds in (sync, 0)]
    assert [shares(line) for line in logged] == expected


@pytest.mark.parametrize("cycle", [1, 2])
def test_wait_for_completions_with_overlap(run, cycle):
    iterations = ["method.args.max_steps=4", f"method.args.num_iterations={cycle}"]
    logged = run(*SPLIT, "topology.overlap=true", *iterations)
    # The first generation gathers the next one's prompts too. The last gathers only its own.
    gathered = [2 * GATHERS] * (4 // cycle - 1) + [GATHERS]
    # The optimizer waits for the transfer, which takes SENDS in parallel with the step.
    expected = [[0, WAITS + seconds, WAITS, JUDGES, STEPS] for seconds in gathered]
    assert [shares(line) for line in logged[::cycle]] == expected
    assert all(line["transfer_s"] >= SENDS for line in logged[::cycle])
    assert [line["server_s"] for line in logged[::cycle]] == [GENERATES] * len(expected)
    for line in logged[1::2] if cycle == 2 else []:
        assert [*shares(line), line["server_s"]] == [0, 0, 0, 0, STEPS, 0]
