"""Test that the seconds of GRPO's step by kind sum to the step, whatever generates."""

import pytest

from tests.helpers.engines import GATHERS, GENERATES, JUDGES, SENDS, STEPS, WAITS, run_grpo

SUMMED = ("generation_s", "wait_s", "sync_s", "reward_s", "train_s")
SPLIT = ["topology=split", "hardware.vllm=true", "hardware.gpus_per_node=2", "topology.num_gpus=2"]
COLOCATE = ["topology=colocate", "hardware.vllm=true"]
MICRO = ["method.args.steps_per_generation=4", "method.args.gradient_accumulation_steps=2"]
TWICE = ["method.args.num_iterations=2"]  # a generation serves two steps
# Of the steps that generate: generation_s, wait_s, sync_s, reward_s. A server is asked once the
# ranks' prompts and images are gathered.
ASKED = {
    "transformers": ([], [GENERATES, 0, 0, JUDGES]),
    "server": (SPLIT, [GENERATES, 2 * GATHERS, SENDS, JUDGES]),
    "colocate": (COLOCATE, [GENERATES, 0, SENDS, JUDGES]),
    "colocate that sleeps": (
        [*COLOCATE, "method.args.vllm_enable_sleep_mode=true"],
        [GENERATES, 0, SENDS, JUDGES],
    ),
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return `run(*overrides)`, which gives lines of metrics.jsonl, each of which sums."""

    def lines(*overrides):
        logged = run_grpo(tmp_path, monkeypatch, *overrides)
        for line in logged:
            assert sum(line[name] for name in SUMMED) == pytest.approx(line["step_s"], abs=1e-9)
        return logged

    return lines


def shares(line):
    return [line[name] for name in SUMMED]


def test_every_step_generates(run):
    parts = ASKED["transformers"][1]
    logged = run()
    assert [line["step"] for line in logged] == [1, 2]
    assert [line["time_s"] for line in logged] == [sum(parts) + STEPS, 2 * (sum(parts) + STEPS)]
    assert [shares(line) for line in logged] == [[*parts, STEPS]] * 2


@pytest.mark.parametrize(
    ("kind", "twice"), [("transformers", MICRO), ("server", TWICE), ("colocate", TWICE)]
)
def test_a_generation_serves_two_steps(run, kind, twice):
    overrides, parts = ASKED[kind]
    logged = run(*overrides, *twice, "method.args.max_steps=4")
    assert [line["time_s"] for line in logged] == [
        n * sum(parts) + m * STEPS for n, m in ((1, 1), (1, 2), (2, 3), (2, 4))
    ]
    assert [shares(line) for line in logged] == [[*parts, STEPS], [0, 0, 0, 0, STEPS]] * 2
    assert not any("server_s" in line for line in logged)


@pytest.mark.parametrize("kind", ["server", "colocate that sleeps"])
def test_a_step_generates_twice(run, kind):
    overrides, (generation, wait, sync, reward) = ASKED[kind]
    accumulated = "method.args.gradient_accumulation_steps=2 method.args.steps_per_generation=1"
    logged = run(*overrides, *accumulated.split())
    sent = 2 * sync if kind == "colocate that sleeps" else sync  # which forgets its weights
    expected = [2 * generation, 2 * wait, sent, 2 * reward, STEPS]
    assert [shares(line) for line in logged] == [expected] * 2


@pytest.mark.parametrize("kind", ["transformers", "server"])
def test_held_out_answers_are_no_part_of_a_step(run, kind):
    overrides, parts = ASKED[kind]
    measured = "method.args.save_strategy=steps method.args.save_steps=1 data.num_heldout=4".split()
    logged = run(*overrides, "method.selection.metric=eval_reward", *measured)
    assert all(line["eval_s"] >= GENERATES + JUDGES for line in logged)
    generation, wait, sync, reward = parts  # the weights are sent before the measurement
    expected = [[generation, wait, seconds, reward, STEPS] for seconds in (sync, 0)]
    assert [shares(line) for line in logged] == expected


@pytest.mark.parametrize("cycle", [1, 2])
def test_with_overlap_completions_are_waited_for(run, cycle):
    iterations = ["method.args.max_steps=4", f"method.args.num_iterations={cycle}"]
    logged = run(*SPLIT, "topology.overlap=true", *iterations)
    # The first generation sends its own prompts and those of the next one; the last compares its
    # prompts and has none to send.
    gathered = [2 * GATHERS] * (4 // cycle - 1) + [GATHERS]
    # The optimizer waits for the weights to arrive, which takes SENDS beside the step.
    expected = [[0, WAITS + seconds, WAITS, JUDGES, STEPS] for seconds in gathered]
    assert [shares(line) for line in logged[::cycle]] == expected
    assert all(line["transfer_s"] >= SENDS for line in logged[::cycle])
    assert [line["server_s"] for line in logged[::cycle]] == [GENERATES] * len(expected)
    for line in logged[1::2] if cycle == 2 else []:
        assert [*shares(line), line["server_s"]] == [0, 0, 0, 0, STEPS, 0]
