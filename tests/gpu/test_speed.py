"""Test tests/gpu/speed.py: commands, data, figures and the page."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import threading
import time
from importlib.metadata import distributions

import pytest

from launch.plan.check_files import check_files
from launch.plan.planning import prepare
from launch.schema.trainer_args import value
from recipes.models.model_build import END, train_tokenizer
from tests.conftest import composed
from tests.gpu import forced_lengths, peers, speed, speed_report
from tests.gpu.speed_rows import LONGEST, ROWS, chat_lengths

OURS = [(name, side) for name, row in ROWS.items() for side in row.sides if side.startswith("ours")]
PEERS = [
    (name, side) for name, row in ROWS.items() for side in row.sides if not side.startswith("ours")
]


def result(row, side, rate, **more):
    return {
        "row": row,
        "side": side,
        "gpu": "H100",
        "tokens_per_second": rate,
        "first_step_s": 9.0,
        "settings": {"command": "a b"},
        **more,
    }


@pytest.mark.parametrize(("name", "side"), OURS)
def test_each_command_of_ours_is_planned_for_an_h100(name, side):
    words = speed.overrides(ROWS[name], side)
    config, _ = prepare(composed("hardware=h100", "model.init=random", *words))
    assert (config.topology.num_gpus or 1) == speed.num_gpus(ROWS[name], side)


@pytest.mark.parametrize(("name", "side"), PEERS)
def test_each_peer_has_the_batch_of_ours(name, side):
    options = peers.parse([*ROWS[name].sides[side].split(), "--metrics=x"])
    ours = composed("hardware=h100", *ROWS[name].sides["ours"].split())
    rows = ours.effective_batch or value(ours, "per_device_train_batch_size")
    length = value(ours, "max_completion_length" if options.method == "grpo" else "max_length")
    assert (options.rows, options.length, options.model) == (rows, length, ours.model.name)
    assert options.method == ours.method.name


def test_chat_rows_have_the_expected_lengths(tmp_path):
    speed.write_data(tmp_path)
    texts = [
        json.loads(line)["text"] for line in (tmp_path / "lengths.jsonl").read_text().splitlines()
    ]
    tokenizer = train_tokenizer(texts, 512)
    assert [len(tokenizer(text + END)["input_ids"]) for text in texts] == chat_lengths(
        8 * speed.STEPS
    )


def test_vllm_finds_the_forced_lengths(tmp_path):
    forced_lengths.install(tmp_path)
    (plugin,) = (
        point for package in distributions(path=[str(tmp_path)]) for point in package.entry_points
    )
    assert (plugin.group, plugin.load()) == ("vllm.general_plugins", forced_lengths.register)
    lengths = forced_lengths.forced_lengths()
    assert max(lengths) == LONGEST
    assert statistics.mean(lengths) == pytest.approx(250, rel=0.05)


def test_speed_is_the_median_for_equal_steps_and_the_total_otherwise():
    lines = [
        {"time_s": float(n), "num_tokens": 100 * n, "memory_peak_gb": 1.0, "loss": 2.0}
        for n in range(1, speed.STEPS + 1)
    ]
    lines[-1]["time_s"] += 50
    assert speed.figures(lines)["tokens_per_second"] == 100
    assert speed.figures(lines)["timed_steps"] == speed.STEPS - speed.WARM_UP
    lines[-1]["num_tokens"] += 5000
    assert speed.figures(lines)["tokens_per_second"] == round((1500 + 5000) / (15 + 50))


def test_an_even_number_of_generating_steps_counts():
    seconds = [0] * speed.WARM_UP + [30, 10, 30, 10, 30]
    times = itertools.accumulate(seconds)
    lines = [
        {"time_s": at, "num_tokens": 400 * n, "memory_peak_gb": 1.0, "loss": 2.0, "train_s": s}
        for n, (at, s) in enumerate(zip(times, seconds, strict=True))
    ]
    figures = speed.figures(lines, generates=True)
    assert (figures["timed_steps"], figures["tokens_per_second"]) == (4, 20)
    assert figures["train_s"] == 20


def test_the_target_of_modes_is_for_the_fastest():
    rates = {"ours": 120, "ours_overlap": 200, "ours_stream": 250, "trl": 100}
    shown = speed_report.table([result("grpo_4b", side, rate) for side, rate in rates.items()])
    synchronous, overlap, stream = shown.splitlines()[2:5]
    assert synchronous.endswith("| 1.200x | 1.50x, **missed** |")
    assert overlap.endswith("| 2.000x |  |")
    assert stream.endswith("| 2.500x | 2.50x |")


def test_results_of_a_peer_and_of_a_failure(tmp_path, monkeypatch):
    tiny = "loop --tiny --no-compile --model tiny --rows 2 --length 16"
    row = dataclasses.replace(ROWS["best_bf16"], sides={"loop": tiny, "broken": f"{tiny} --data"})
    monkeypatch.setitem(speed.ROWS, "best_bf16", row)
    session = speed.Session(
        "hardware=cpu",
        "a CPU",
        tmp_path,
        tmp_path / "out",
        time.monotonic() + 300,
        threading.Lock(),
    )
    session.out.mkdir()
    speed.measure(["best_bf16"], session, [0])
    loop, broken = [
        json.loads(line) for line in (session.out / "speed.jsonl").read_text().splitlines()
    ]
    assert loop["timed_tokens"] == row.timed * 2 * 16
    assert loop["tokens_per_second"] > 0
    assert all(side["date"] and side["versions"]["torch"] for side in (loop, broken))
    assert broken["error"].startswith("exit code 2, 0 steps\n")
    assert "tokens_per_second" not in broken


def test_our_side_can_start_from_a_saved_model(tmp_path):
    speed.write_data(tmp_path)
    peers.save(
        peers.parse(
            [
                *"save --tiny --model=tiny".split(),
                f"--saved={tmp_path / 'model'}",
                f"--data={tmp_path / 'prompts.jsonl'}",
            ]
        )
    )
    overrides = [
        "method=grpo",
        "model=tiny",
        "topology=split",
        "topology.num_gpus=2",
        "~method.rewards.reasoning_gym",
    ]
    overrides += [
        "+method.rewards.accuracy=1.0",
        "data=jsonl",
        f"data.path={tmp_path / 'prompts.jsonl'}",
        f"model.path={tmp_path / 'model'}",
    ]
    config, _ = prepare(composed("hardware=h100", *overrides))
    check_files(config, all_lines=True)
    assert (tmp_path / "model/tokenizer.json").exists()


def test_the_table_shows_ratios_failures_and_missing_rows():
    results = [
        *(
            result("sft_4b", side, rate)
            for side, rate in (("ours", 100), ("trl", 80), ("ours", 120))
        ),
        *(result("two_gpus", side, rate) for side, rate in (("ours_fsdp", 180), ("ours_one", 100))),
        *(
            result("first_step", side, None, first_step_s=s)
            for side, s in (("ours", 40.0), ("ours_eager", 30.0))
        ),
        result("dpo", "ours", 50),
        {
            key: value
            for key, value in result("dpo", "trl", 0, error="exit code 1, 0 steps\nwhy").items()
            if key != "tokens_per_second"
        },
    ]
    shown = speed_report.table(results).splitlines()
    by_work = {
        name: next(line for line in shown if line.startswith(f"| {row.work} |"))
        for name, row in ROWS.items()
        if name in ("sft_4b", "two_gpus", "first_step", "dpo")
    }
    assert by_work["sft_4b"].endswith("| 120 | TRL's defaults | 80 | 1.500x | 1.45x |")
    assert by_work["two_gpus"].endswith(
        "| 180 | twice our one GPU (fsdp) | 200 | 0.900x | 0.95x, **missed** |"
    )
    assert by_work["first_step"].endswith("| 40.0 s | ours, eager | 30.0 s | +10.0 s | +15 s |")
    assert by_work["dpo"].endswith("| 50 | TRL's defaults | failed | not measured | 1.95x |")
    assert "Failed: dpo trl (exit code 1, 0 steps)." in shown
    assert ROWS["fp8"].work in shown[-1]


def test_the_page_shows_all_results():
    """`python tests/gpu/speed.py report --write` updates it."""
    page = (speed_report.RESULTS / "speed.md").read_text()
    results = [json.loads(line) for line in speed.MEASURED.read_text().splitlines()]
    assert speed_report.replaced(page, "speed", speed_report.table(results)) == page
