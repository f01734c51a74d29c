"""Test recipes/sampling/stream.py: the groups of each step, and resuming."""

import random
import threading
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import pytest

from recipes import grpo
from recipes.sampling import stream
from tests.helpers.engines import (
    JUDGES,
    SENDS,
    STEPS,
    WAITS,
    Clock,
    Sends,
    client,
    run_grpo,
    without_server,
)
from tests.helpers.trainers import configured

SPLIT = [
    "topology=split", "hardware.vllm=true", "hardware.gpus_per_node=2", "topology.num_gpus=2",
    "topology.overlap=stream",
]  # fmt: skip
SAVED = """
    method.args.save_strategy=steps method.args.save_steps=1 method.args.save_total_limit=null
""".split()
CYCLES = 40


class SimulatedServer:
    """Finish a random group whenever the trainer waits, and random groups in `work`."""

    def __init__(self, monkeypatch, chance: random.Random) -> None:
        self.chance, self.open = chance, []
        self.stream = stream.Stream(self.submit)
        monkeypatch.setattr(stream, "wait", lambda answers, return_when: self.answer(answers))

    def submit(self, row):
        answer = Future()
        self.open.append(answer)
        return answer

    def answer(self, answers) -> None:
        assert answers, "the trainer waits without a request"
        actual = self.chance.choice(answers)
        self.open.remove(actual)
        actual.set_result([])

    def work(self) -> None:
        for answer in self.chance.sample(self.open, self.chance.randint(0, len(self.open))):
            self.answer([answer])


@pytest.mark.parametrize("seed", range(5))
def test_take_each_group_once_and_in_time(monkeypatch, seed):
    chance = random.Random(seed)
    count, staleness = chance.randint(1, 5), chance.randint(1, 6)
    ahead = (staleness + 1) // 2
    server = SimulatedServer(monkeypatch, chance)
    taken, sent = [], 0
    for step in range(CYCLES):
        while sent <= min(step + ahead, CYCLES - 1):
            server.stream.send([{"row": sent * count + n} for n in range(count)], step)
            sent += 1
        server.work()
        groups = server.stream.take(count, lambda of, step=step: staleness - (step - of))
        assert len(groups) == count
        assert all(step - group.step <= staleness for group in groups)
        taken += [group.row["row"] for group in groups]
    assert sorted(taken) == list(range(CYCLES * count))
    assert server.stream.groups == []


def test_wait_for_long_groups(monkeypatch):
    server = SimulatedServer(monkeypatch, random.Random(0))
    server.stream.send([{"row": n} for n in range(4)], 0)
    for answer in server.open[1:]:
        answer.set_result([])
    server.open = server.open[:1]
    rows = [group.row["row"] for group in server.stream.take(2, lambda step: 2 - (0 - step))]
    assert rows == [1, 2]
    assert len(server.open) == 1
    server.stream.send([{"row": 4}, {"row": 5}], 1)
    groups = server.stream.take(2, lambda step: 0 if step == 0 else 1)
    assert [group.row["row"] for group in groups] == [0, 3]


@pytest.mark.parametrize("staleness", [1, 5])
def test_streamed_runs_respect_max_staleness(tmp_path, monkeypatch, staleness):
    options = [f"topology.max_staleness={staleness}", "method.args.max_steps=6"]
    lines = run_grpo(tmp_path, monkeypatch, *SPLIT, *options)
    assert [line["step"] for line in lines] == list(range(1, 7))
    ahead = (staleness + 1) // 2
    for line in lines:
        parts = [line[name] for name in ("generation_s", "sync_s", "reward_s", "train_s")]
        assert parts == [0, WAITS, JUDGES, STEPS]
        assert line["transfer_s"] >= SENDS
        assert 0 <= line["staleness/mean"] <= line["staleness/max"] <= staleness
    assert lines[0]["staleness/max"] == 0
    assert max(line["staleness/max"] for line in lines) >= ahead


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Return a function that trains: (rows of each step, salts of requests)."""
    clock = Clock()
    salts = []

    class Client(client(clock)):
        def generate(self, prompts, n, generation_kwargs, **others):
            salts.append(generation_kwargs["cache_salt"])
            return super().generate(prompts, n, **others)

    without_server(monkeypatch, Client, Sends)

    def run(*overrides, resume=None):
        rows = []

        def train(config, trainer, *_):
            calculate = trainer._calculate_rewards

            def recorded(inputs, *rest):
                rows.append([row["prompt"] for row in inputs])
                return calculate(inputs, *rest)

            monkeypatch.setattr(trainer, "_calculate_rewards", recorded)
            trainer.train(resume_from_checkpoint=resume)
            return {}

        monkeypatch.setattr(grpo, "train", train)
        salts.clear()
        grpo.grpo(configured(tmp_path, "grpo", *SPLIT, *SAVED, *overrides))
        return rows, list(salts)

    return run


@pytest.mark.parametrize("mode", ["true", "stream"])
def test_send_weights_during_step_before_update(tmp_path, monkeypatch, mode):
    computed, events = threading.Event(), []

    class Client(client(Clock())):
        def update_named_params(self, metadata, params):
            if threading.current_thread() is not threading.main_thread():
                # Only the first generation waits for the weights.
                assert not events or computed.wait(60)
                events.append("sent")

    without_server(monkeypatch, Client, Sends)

    def train(config, trainer, *_):
        compute_loss = trainer.compute_loss

        def recorded(*args, **kwargs):
            computed.set()
            return compute_loss(*args, **kwargs)

        def updated(*_):
            computed.clear()
            events.append("updated")

        monkeypatch.setattr(trainer, "compute_loss", recorded)
        trainer.create_optimizer()
        trainer.optimizer.register_step_pre_hook(updated)
        trainer.train()
        return {}

    monkeypatch.setattr(grpo, "train", train)
    options = [*SPLIT, f"topology.overlap={mode}", "method.args.max_steps=3"]
    grpo.grpo(configured(tmp_path, "grpo", *options))
    assert events == ["sent", "updated"] * 3


def prompts_of(step: list) -> list[str]:
    """Return the prompts of a step, each of which has four adjacent rows."""
    groups = [step[n : n + 4] for n in range(0, len(step), 4)]
    assert all(group.count(group[0]) == 4 for group in groups)
    return [str(group[0]) for group in groups]


def test_resumed_run_trains_on_each_row_once(trained, tmp_path):
    overrides = ["topology.max_staleness=4", "method.args.gradient_accumulation_steps=2"]
    overrides += ["method.args.max_steps=6"]
    complete, _ = trained(*overrides)
    expected = sorted(row for step in complete for row in prompts_of(step))
    assert len(set(expected)) == 12
    for stopped in (5, 3, 1):  # a resumed run overwrites the later checkpoints
        saved = tmp_path / f"checkpoints/checkpoint-{stopped}"
        rest, salts = trained(*overrides, resume=str(saved))
        rows = [row for step in [*complete[:stopped], *rest] for row in prompts_of(step)]
        assert sorted(rows) == expected
        sent_after = [int(salt.split()[1]) for salt in salts]
        assert sent_after == sorted(sent_after)
        assert sent_after[0] == stopped


@pytest.mark.parametrize(("cycle", "per_step"), [(1, 4), (2, 8), (8, 4), (3, 2)])
def test_epochs_whose_last_step_is_short(monkeypatch, cycle, per_step):
    """Train epochs of seven generations, which accumulation steps do not divide."""
    server = SimulatedServer(monkeypatch, random.Random(0))
    staleness = max(1, -(-cycle // per_step))
    trainer = SimpleNamespace(
        args=SimpleNamespace(gradient_accumulation_steps=per_step),
        state=SimpleNamespace(global_step=0),
        max_staleness=staleness,
        _cycle=lambda: cycle,
    )
    ahead = max(1, (staleness * per_step // cycle + 1) // 2)
    for _ in range(3):
        trainer._in_step, sent, end = 0, 0, 7 * cycle
        for micro in range(end):
            generation, first = divmod(micro, cycle)
            if first == 0:
                while sent <= min(generation + ahead, 6):
                    server.stream.send([{}, {}], trainer.state.global_step)
                    sent += 1
                server.work()
                groups = server.stream.take(
                    2, partial(stream.StreamedGeneration._remaining_calls, trainer)
                )
                assert all(trainer.state.global_step - group.step <= staleness for group in groups)
            trainer._in_step += 1
            if trainer._in_step == per_step or micro == end - 1:
                trainer.state.global_step, trainer._in_step = trainer.state.global_step + 1, 0
