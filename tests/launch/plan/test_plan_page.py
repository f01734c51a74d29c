"""Test the text of a plan: its length, times, units, next command, and what this machine has."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer

import pytest

from containers import images
from launch.checks.facts import gather
from launch.estimate.batch_counts import batch
from launch.machine import container_engine
from launch.plan import local_copies, plan_page, predictions
from launch.plan.container import image_reference
from launch.plan.planning import make_plan
from tests.conftest import ROOT, composed, host_with, leave_model

LINES = 40  # of a screen
DPO = ["hardware=w7900", "method=dpo", "model=qwen2_5_1_5b", "adapter=lora"]


@pytest.mark.parametrize(("number", "text"), [
    (18_581, "19,000"), (99.6, "100"), (9.96, "10"), (4, "4.0"), (0.267, "0.27"), (0.0031, "0.0031"),
    (0, "0"),
])  # fmt: skip
def test_two_digits(number, text):
    assert predictions.approximate(number) == text


@pytest.mark.parametrize(("gb", "digits", "text"), [
    (1138.4, 3, "1,138"), (999.7, 3, "1,000"), (659.9, 3, "660"), (0.528, 3, "0.528"),
    (141.2, 2, "141"), (8.04, 2, "8"), (0.27, 2, "0.27"),
])  # fmt: skip
def test_sizes_have_no_exponent(gb, digits, text):
    assert predictions.gigabytes(gb, digits) == text


@pytest.mark.parametrize(("seconds", "text"), [
    (0.5, "0.50 s"), (99, "99 s"), (800, "13 min"), (62_100, "17 h"), (1e6, "12 days"),
])  # fmt: skip
def test_durations(seconds, text):
    assert predictions.duration(seconds) == text


@pytest.mark.parametrize(("overrides", "epochs"), [
    ("data.num_train=40 method.args.max_steps=10", " (1 epoch)"),  # of 4 rows each
    ("data.num_train=40 method.args.max_steps=-1 method.args.num_train_epochs=3", " (3 epochs)"),
    ("data.num_train=1 method.args.max_steps=1000", " (4,000 epochs)"),
    ("data=gsm8k data.limit=40 method.args.max_steps=10", " (1 epoch)"),
    ("data=numina_math method.args.max_steps=10", ""),  # the number of rows is unknown
])  # fmt: skip
def test_epochs_of_a_plan(overrides, epochs):
    words = ["hardware=mi300x", "topology=single", "model=qwen3_0_6b", "speed=off"]
    size = [
        "method.args.per_device_train_batch_size=4",
        "method.args.gradient_accumulation_steps=1",
    ]
    config = composed(*words, *size, *overrides.split())
    time = predictions.run_time(make_plan(config, host_with(8), Path("/runs/x/1")))
    assert f" steps{epochs} x " in time, time


@pytest.mark.parametrize("overrides", [  # docs/start shows more
    ["hardware=mi350x", "method=grpo", "model=qwen3_4b"],
    ["experiment=quickstart", "hardware=cpu"],
    ["method=bench/gemm", "hardware=mi300x"],
    DPO,
])  # fmt: skip
def test_a_plan_fits_on_a_screen_and_has_the_next_command_once(launch, monkeypatch, overrides):
    for name in ("ACCELERATE_TORCH_DEVICE", "DS_ACCELERATOR", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.delenv(name, raising=False)  # of other tests; a plan would warn of them
    done = launch(*overrides, "mode=plan")
    lines = done.out.splitlines()
    assert (done.code, len(lines) <= LINES) == (0, True), done.out
    [command] = [line for line in lines if "launch/run.py" in line]
    rate = ["method.args.learning_rate=1e-05"] * (overrides == DPO)  # an adapter's
    assert shlex.split(command.partition(": ")[2])[2:] == overrides + rate
    is_here = "hardware=cpu" in overrides
    assert any("add smoke=true" in line for line in lines) == (not is_here)


@pytest.mark.parametrize(("overrides", "words"), [
    ("method=serve hardware=rx7900xtx model=qwen3_32b", ["mode=plan", "find=smallest_hardware"]),
    ("hardware=mi300x model=qwen3_32b topology=ddp", ["hardware=mi300x", "topology=fsdp"]),
    ("hardware=mi300x method=grpo model=llama3_1_70b adapter=lora",  # not the model's context
     ["topology.server_max_length=2048"]),
])  # fmt: skip
def test_the_next_command_of_a_run_that_does_not_fit(launch, overrides, words):
    """It neither repeats a command that would be refused, nor sets a key twice."""
    done = launch(*overrides.split(), "mode=plan")
    line = next(line for line in done.out.splitlines() if line.startswith("Next"))
    command = shlex.split(line.partition(": ")[2])[2:]
    keys = [word.partition("=")[0] for word in command]
    assert {*words} <= {*command}
    assert len({*keys}) == len(keys)


@pytest.mark.parametrize(("overrides", "memory_gb", "is_suggested"), [
    ("model.path={folder}", 64, False),  # a trial of 8 billion weights needs 131 GB
    ("model.path={folder}", 256, True),
    ("model.path={folder} adapter=lora", 64, True),
    ("model=qwen3_8b", 64, True),
])  # fmt: skip
def test_a_suggested_trial_fits_this_machine(tmp_path, overrides, memory_gb, is_suggested):
    leave_model(tmp_path)
    shape = {"num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32}
    shape |= {"intermediate_size": 12288, "vocab_size": 151936, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **shape}))
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {memory_gb * 10**6} kB\n")
    request = ["hardware=mi300x", *overrides.format(folder=tmp_path).split()]
    host = dataclasses.replace(host_with(0), sysroot=str(tmp_path))
    trial = plan_page.next_command(request, composed(*request), host)[-1]
    assert "smoke=true" in trial
    assert ("without model.path" in trial) == (not is_suggested)


@pytest.mark.parametrize("hardware", ["mi50", "mi300x"])
def test_an_image_that_is_not_checked_can_be_built(launch, monkeypatch, hardware):
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/engine")
    lines = launch(f"hardware={hardware}", "mode=plan").out.splitlines()
    image = composed(f"hardware={hardware}").container.name
    assert f"  build       python containers/build.py image={image}" in lines


@pytest.mark.parametrize(("overrides", "words"), [
    ("method=sft", "bf16 products, fp32 weights, "),
    ("method=sft precision.weights=bf16", ", bf16, "),
    ("method=grpo method.args.gradient_accumulation_steps=2",
     "14 prompts x 8 answers per step (112 sequences: 7 GPUs x 8 x 2 accumulated)"),
    ("method=grpo", "up to 512 tokens per answer (method.args.max_completion_length)"),
    ("adapter=lora adapter.rank=8", "adapter lora of rank 8, "),
    ("method.lr_scaling=linear method.lr_reference_batch=1 method.args.learning_rate=0.25",
     ", learning rate 8"),
    ("method=evaluate", "1 answer each, up to 512 tokens (method.args.max_new_tokens)"),
])  # fmt: skip
def test_types_and_lengths_of_the_method(overrides, words):
    config = composed("hardware=mi300x", "model=qwen3_4b", *overrides.split())
    assert words in plan_page._method(make_plan(config, host_with(8), Path("/runs/x/1")))


@pytest.mark.parametrize(("overrides", "words"), [
    ("method.args.save_total_limit=null", "every 100 steps ("),
    ("method.args.save_steps=0.1 method.args.max_steps=400", "every 40 steps "),
    ("method.args.max_steps=40", None),  # only at the end
    ("method.args.save_strategy=no", None),
])  # fmt: skip
def test_steps_between_checkpoints(launch, overrides, words):
    request = ["hardware=mi300x", "model=qwen3_4b", *overrides.split()]
    lines = launch(*request, "mode=plan").out.splitlines()
    saves = [line for line in lines if line.startswith("  saves ")]
    assert len(saves) == (words is not None)
    assert all(words in line for line in saves)


@pytest.mark.parametrize(("overrides", "free_gb", "warns"), [
    ("", 160, True),  # 3 checkpoints of 12 bytes per parameter are 145 GB, the model is 16 GB
    ("", 162, False),
    ("method.args.save_total_limit=1", 160, False),
    ("adapter=lora", 15, True),  # the merged model
    ("adapter=lora", 18, False),
    ("method.args.save_strategy=no", 17, False),
    ("method.args.save_strategy=no save_model=false", 0, False),
])  # fmt: skip
def test_checkpoints_that_the_disk_cannot_hold(tmp_path, overrides, free_gb, warns):
    words = ["hardware=mi300x", "model=qwen3_4b", "method=sft", "runtime=local", *overrides.split()]
    host = dataclasses.replace(host_with(8), disk_free=lambda _: free_gb * 10**9)
    plan = make_plan(composed(*words), host, tmp_path)
    assert any(line.startswith("run_root=") for line in plan.warnings) == warns


@pytest.mark.parametrize(("overrides", "gb", "download_gb"), [
    ("model=qwen3_4b", 160.9, 8.04),
    ("model=qwen3_4b save_model=false init=random", 144.8, 0),
    ("model=qwen3_8b adapter=qlora", 17.3, 16.4),  # merged in 16 bits
    ("model=tiny", None, 0),
])  # fmt: skip
def test_a_plan_and_the_doctor_count_the_same_disk_space(overrides, gb, download_gb):
    words = overrides.replace("init=", "model.init=").split()
    config = composed("hardware=mi300x", "method=sft", *words)
    facts = dict(predictions.facts(make_plan(config, host_with(8), Path("/runs/x/1"))))
    if gb is None:
        assert "disk" not in facts
        return
    total, run, *weights = map(
        float, re.findall(r"(?<![\w.])\d[\d.]*(?= GB| in | for)", facts["disk"])
    )
    doctors = gather(host_with(8), config.hardware, config).run_gb
    assert (run, total) == pytest.approx((gb, gb + download_gb), rel=0.005)
    assert doctors == pytest.approx(run, abs=0.6)
    assert len(weights) == (download_gb > 0)


def test_the_total_adds_the_download_and_the_saves():
    words = ["hardware=mi300x", "model=qwen3_4b", "method=sft", "method.args.max_steps=250"]
    priced = composed(*words, "price_per_gpu_hour=2")
    plan = make_plan(priced, host_with(8), Path("/runs/x/1"))
    # three checkpoints, the last at the end; the fp32 model, and 16-bit weights
    moved = 3 * 12 * 4.022 + (4 + 2) * 4.022
    hours = plan.speed.run_hours + moved / predictions.DISK_GB_S / 3600
    total = dict(predictions.facts(plan))["total"]
    assert (
        f"{predictions.duration(3600 * hours)}, cost {predictions.approximate(16 * hours)} "
        in total
    )
    free = make_plan(composed(*words), host_with(8), Path("/runs/x/1"))
    assert "total" not in dict(predictions.facts(free))


@pytest.mark.parametrize(("overrides", "saved", "kept"), [
    ("method.args.save_total_limit=null", 195, 195),  # of 19,488 steps
    ("", 195, 3),
    ("method.args.max_steps=20", 1, 1),
    ("method.args.max_steps=200 method.args.save_steps=0.3", 4, 3),
    ("method.args.save_strategy=epoch", 3, 3),
    ("method.args.save_strategy=epoch method.args.save_total_limit=1", 3, 2),
    ("method.args.save_strategy=epoch method.args.max_steps=20", 1, 1),
    ("method.args.save_strategy=no", 0, 0),
    ("method.args.packing=true", None, 3),  # the number of packed rows is unknown
    ("method.args.packing=true method.args.save_total_limit=null", None, 2),
])  # fmt: skip
def test_a_plan_counts_the_saves_of_a_run(overrides, saved, kept):
    words = ["hardware=mi300x", "model=qwen3_4b", "method=sft", "data=ultrachat"]
    words += ["save_model=false", "price_per_gpu_hour=2", *overrides.split()]
    plan = make_plan(composed(*words), host_with(8), Path("/runs/x/1"))
    facts, weights_gb, checkpoint_gb = dict(predictions.facts(plan)), 8.04, 12 * 4.022
    gb = {key: facts.get(key, "").replace(",", "") for key in ("disk", "total")}
    in_run = re.search(r"([\d.]+) in run_root", gb["disk"])
    assert (float(in_run[1]) if in_run else 0) == pytest.approx(kept * checkpoint_gb, rel=0.01)
    if saved is not None:
        moved = float(re.search(r"([\d.]+) GB to", gb["total"])[1])
        assert moved == pytest.approx(weights_gb + saved * checkpoint_gb, rel=0.01)


@pytest.mark.parametrize(("overrides", "is_offered"), [
    ("method.args.max_completion_length=8192", True),
    ("method.args.max_completion_length=8192 method.args.save_steps=2", False),
    ("", False),
])  # fmt: skip
def test_long_intervals_between_saves_have_a_shorter_one(overrides, is_offered):
    words = ["hardware=mi300x", "model=qwen3_8b", "method=grpo", *overrides.split()]
    plan = make_plan(composed(*words), host_with(8), Path("/runs/x/1"))
    offered = re.findall(r"method\.args\.save_steps=(\d+)", dict(predictions.facts(plan))["saves"])
    assert len(offered) == is_offered
    for steps in offered:
        assert 0.5 < int(steps) * plan.speed.step_s / predictions.MAX_LOST_S <= 1
        shorter = composed(*words, f"method.args.save_steps={steps}")
        again = make_plan(shorter, host_with(8), Path("/runs/x/1"))
        assert "save_steps" not in dict(predictions.facts(again))["saves"]


@pytest.mark.parametrize(("overrides", "is_ahead"), [("", True), ("topology.overlap=false", False)])
def test_generation_ahead_is_named(launch, overrides, is_ahead):
    words = ["hardware=mi300x", "method=grpo", "model=qwen3_4b", *overrides.split(), "mode=plan"]
    assert ("(topology.overlap)" in launch(*words).out) == is_ahead


@pytest.mark.parametrize(
    ("more", "is_added"), [("", True), ("method.args.learning_rate=1e-4", False)]
)
def test_the_next_command_has_the_rate_of_an_adapter(more, is_added):
    words = ["hardware=mi300x", "model=qwen3_4b", "adapter=lora", *more.split()]
    lines = plan_page.next_command(words, composed(*words), host_with(8))
    assert ("method.args.learning_rate=0.0002" in " ".join(lines)) == is_added
    assert ("changed" in " ".join(lines)) == is_added


def test_rows_of_a_file_are_counted(launch, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 11 + "\n" + '{"text": "b"}')
    overrides = [
        "hardware=mi300x",
        "model=qwen3_4b",
        "topology=single",
        "data=jsonl",
        "data.path=rows.jsonl",
    ]
    done = launch(*overrides, "mode=plan")
    size = batch(composed(*overrides)).sequences
    assert "jsonl rows.jsonl, 12 rows, nothing held out " in done.out
    held_out = launch(*overrides, "data.heldout_fraction=0.1", "mode=plan").out
    assert "jsonl rows.jsonl, about 10 rows, about 2 held out\n" in held_out
    steps = json.loads(launch(*overrides, "mode=plan", "format=json").out)["speed"]["steps"]
    assert steps == math.ceil(12 / size * 3)
    assert "in place of mode=plan, add data.preview=5:" in done.out
    own = launch(*overrides, "data.preview=2", "mode=plan").out
    assert "add data.preview=2:" in own
    [command] = [line for line in own.splitlines() if "launch/run.py" in line]
    assert "data.preview" not in command


@pytest.mark.parametrize(("overrides", "words"), [
    ("data=gsm8k method=grpo", "7,473 rows, 1,319 held out"),
    ("data=gsm8k method=evaluate", "1,319 held out, split test"),
    ("data=gsm8k data.revision=main method=evaluate", "openai/gsm8k@main, split test"),  # unknown
])  # fmt: skip
def test_rows_of_a_pinned_data_set(launch, overrides, words):
    done = launch("hardware=mi300x", "model=qwen3_4b", *overrides.split(), "mode=plan")
    assert words in next(line for line in done.out.splitlines() if line.startswith("  data"))


def test_a_pinned_evaluation_has_a_total():
    config = composed("hardware=mi300x", "model=qwen3_4b", "method=evaluate", "data=gsm8k")
    plan = make_plan(config, host_with(8), Path("/runs/x/1"))
    assert plan.speed.steps == math.ceil(1319 / 64 / 8)


@pytest.mark.parametrize(("hardware", "method", "source", "words"), [
    ("mi300x", "sft", "amd", "on other AMD GPUs (17 MI350X, 1 MI355X)"),
    ("rx7900xtx", "sft", "amd", "; none on RDNA)"), ("mi50", "sft", "amd", "; none on gfx906)"),
    ("mi350x", "sft", "AMD Instinct MI350X", "on this GPU"),
    ("h200", "sft", "NVIDIA H200 SXM", "on this GPU, most of which the planner was fitted to,"),
    ("h100", "dpo", "nvidia", "on other NVIDIA GPUs (11 H200)"),
    ("mi300x", "grpo", "nvidia", "2 H100), most of"),
    ("mi350x", "evaluate", None, ""),
])  # fmt: skip
def test_evidence_of_a_method_gives_a_range_of_time_and_cost(hardware, method, source, words):
    command = [f"hardware={hardware}", "model=qwen3_0_6b", "price_per_gpu_hour=2"]
    plan = make_plan(composed(*command, f"method={method}"), host_with(8), Path("/runs/x/1"))
    [(_, text)] = predictions.evidence([plan])
    assert words in text
    if source is None:
        assert " took " not in text
        return
    took = json.loads(predictions.PLAN_ERRORS.read_text())[source][method]
    for factor in (took["least"], took["most"]):
        assert predictions.duration(3600 * factor * plan.speed.run_hours) in text
        assert predictions.approximate(factor * plan.speed.cost) in text
    total = predictions.evidence([plan, plan])[0][1]
    assert predictions.approximate(2 * took["most"] * plan.speed.cost) in total


@pytest.mark.parametrize(("method", "unit"), [("grpo", "1,000 answers"), ("sft", "million tokens")])
def test_a_price_gives_the_cost_of_a_unit(method, unit):
    words = ["hardware=mi300x", "model=qwen3_4b", f"method={method}", "price_per_gpu_hour=2"]
    plan = make_plan(composed(*words), host_with(8), Path("/runs/x/1"))
    size = batch(plan.config)
    number = size.sequences / 1e3 if method == "grpo" else size.tokens / 1e6
    assert plan.speed.cost / plan.speed.steps / number == pytest.approx(plan.speed.unit_cost)
    time = dict(predictions.facts(plan))["time"]
    assert f"{predictions.approximate(plan.speed.unit_cost)} per {unit}" in time


def test_the_time_of_grpo_also_for_answers_half_as_long():
    words = ["hardware=mi300x", "model=qwen3_4b", "method=grpo", "price_per_gpu_hour=2"]
    length = "method.args.max_completion_length="
    plan, half = (
        make_plan(composed(*words, f"{length}{tokens}"), host_with(8), Path("/runs/x/1"))
        for tokens in (1024, 512)
    )
    time, cost = predictions.duration(3600 * half.speed.run_hours), half.speed.cost
    words_of_half = f"half as long: {time}, cost {predictions.approximate(cost)}"
    assert words_of_half in dict(predictions.facts(plan))["time"]


@pytest.mark.parametrize("overrides", [
    "method=grpo", "method=sft", "method=dpo adapter=lora", "hardware=mi50 method=sft model=tiny",
])  # fmt: skip
def test_parts_of_memory_sum_to_the_total(overrides):
    config = composed("hardware=mi300x", "model=qwen3_4b", *overrides.split())
    for line in predictions._memory(make_plan(config, host_with(8), Path("/runs/x/1"))):
        total = float(re.search(r"(\S+) of ", line)[1])
        parts = [float(part.split()[-1]) for part in line.rpartition(": ")[2].split(", ")]
        assert sum(parts) == pytest.approx(total, abs=1e-9)


def test_a_server_of_a_run_shows_a_request_with_its_system_prompt(launch, tmp_path):
    leave_model(tmp_path / "model")
    composition = {"method": {"kind": "trainer"}, "data": {"system_prompt": "Don't guess."}}
    (tmp_path / "record.json").write_text(json.dumps({"composition": composition}))
    serve = ["method=serve", "hardware=mi300x", "method.args.port=9000", "mode=plan"]
    done = launch(*serve, f"model.path={tmp_path}")
    [line] = [line for line in done.out.splitlines() if line.startswith("curl ")]
    words = shlex.split(line)
    assert ":9000/" in words[1]
    assert json.loads(words[-1])["messages"][0] == {"role": "system", "content": "Don't guess."}
    assert "curl " not in launch(*serve, "model=qwen3_4b").out


@pytest.mark.parametrize(("override", "is_offered"), [
    ("topology.num_gpus=8", True), ("topology.servers=1", False),  # an error without topology=split
])  # fmt: skip
def test_no_offer_makes_the_command_wrong(launch, override, is_offered):
    grpo = ["hardware=mi300x", "method=grpo", "model=qwen3_4b", "price_per_gpu_hour=2"]
    plan = json.loads(launch(*grpo, override, "mode=plan", "format=json").out)
    for offers in (plan["faster"], plan["cheaper"]):
        assert is_offered == any("topology=colocate" in offer["overrides"] for offer in offers)


def test_targets_have_the_unit_of_the_plan(launch):
    experiment = ["experiment=mi350x_qwen3_8b_lora", "mode=plan"]
    rate = json.loads(launch(*experiment, "format=json").out)["speed"]["tokens_per_second"]
    page = launch(*experiment).out
    per_gpu = predictions.approximate(rate / 8)
    assert f"tokens_per_second_per_gpu 16,312 (planned: {per_gpu})" in page
    assert f"{per_gpu} tokens/s per GPU" in page


class Engine(BaseHTTPRequestHandler):
    """Answer for images as docker's engine does."""

    def do_GET(self) -> None:
        answers = {f"/images/{self.server.image}/json": {"Size": 23400000000}}
        answers |= {"/info": {"DockerRootDir": str(ROOT)}}
        self.send_response(200 if self.path in answers else 404)
        self.end_headers()
        answer = answers.get(self.path, {"message": "no such image"})
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engine(tmp_path):
    with UnixStreamServer(str(tmp_path / "docker.sock"), Engine) as server:
        server.image = ""
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def test_whether_the_image_is_built(engine, tmp_path):
    config, address = (
        composed("hardware=mi300x", "runtime=docker"),
        f"unix://{tmp_path}/docker.sock",
    )
    asked, absent = (host_with(8, DOCKER_HOST=at) for at in (address, f"{address}.absent"))
    assert "not built yet; base 11.3 GB to download" in local_copies.image(config, asked)
    assert local_copies.build_command(config, asked) == "python containers/build.py image=rocm"
    container_engine.image_gb.cache_clear()
    engine.image = image_reference(config)
    assert local_copies.image(config, asked).endswith("on this machine, 23.4 GB")
    assert local_copies.build_command(config, asked) is None
    assert "not checked" in local_copies.image(config, absent)
    unpublished = composed("hardware=mi50", "runtime=docker")
    assert local_copies.image(unpublished, absent).endswith("; base size not published")
    assert local_copies.image(composed("hardware=mi300x", "runtime=local"), asked) is None


@pytest.mark.parametrize(("overrides", "image", "free_gb", "warns"), [
    ("", "", 56, True),  # 5 times the 11.3 GB of its base
    ("", "", 57, False),
    ("", "reference", 1, False),
    ("", "base_reference", 1, False),
    ("runtime=local", "", 1, False),
])  # fmt: skip
def test_images_that_the_disk_cannot_hold(engine, tmp_path, overrides, image, free_gb, warns):
    engine.image = getattr(images.load()["rocm"], image) if image else ""
    config = composed("hardware=mi300x", "runtime=docker", *overrides.split())
    host = host_with(8, DOCKER_HOST=f"unix://{tmp_path}/docker.sock")
    host = dataclasses.replace(host, disk_free=lambda _: free_gb * 10**9)
    plan = make_plan(config, host, tmp_path)
    assert any(line.startswith("image=rocm: ") for line in plan.warnings) == warns


def test_an_engine_of_another_machine_needs_no_build():
    config, host = composed("hardware=mi300x"), host_with(8, DOCKER_HOST="ssh://me@localhost")
    plan = make_plan(config, host, Path("/runs/x/1"))
    assert any(line.startswith("DOCKER_HOST=ssh://") for line in plan.warnings)
    assert local_copies.build_command(config, host) is None


@pytest.mark.parametrize("server", ["Docker/28.2.2 (linux)", "Libpod/4.3.1 (linux)", "other"])
def test_which_engine_runs_the_containers(engine, monkeypatch, tmp_path, server):
    monkeypatch.setattr(Engine, "version_string", lambda _: server)
    config, rootless = composed("hardware=mi300x", "runtime=docker"), os.getuid() != 0
    host = host_with(8, DOCKER_HOST=f"unix://{tmp_path}/docker.sock")
    host = dataclasses.replace(host, device_nodes={"/dev/kfd": 109}, home=str(tmp_path))
    line = local_copies.engine(config, host)
    names = {"Docker": "docker 28.2.2, rootless" if rootless else None, "other": None}
    name = names.get(server.partition("/")[0], "podman 4.3.1" + ", rootless" * rootless)
    assert (line and line.partition(":")[0]) == name
    if line and rootless:
        assert ("keep_original_groups" if "podman" in line else "setfacl") in line
    assert local_copies.engine(composed("hardware=mi300x", "runtime=local"), host) is None


def test_whether_the_weights_are_cached(tmp_path):
    config = composed("hardware=mi300x", "model=qwen3_4b")
    host, pinned = host_with(8, HF_HOME=str(tmp_path)), "a" * 40

    def state(revision: str | None = pinned) -> str:
        model = dataclasses.replace(config.model, revision=revision)
        config_ = dataclasses.replace(config, model=model)
        return local_copies.weights(config_, host).partition(": ")[2]

    missing = "not in the cache, up to 8 GB to download"
    assert state() == missing
    folder = tmp_path / "hub/models--Qwen--Qwen3-4B"
    snapshot: Path = folder / "snapshots" / pinned
    snapshot.mkdir(parents=True)
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "1.safetensors").write_bytes(b"0" * 10**6)
    assert state() == missing
    (snapshot / "2.safetensors").write_bytes(b"0" * 10**6)
    assert state() == "in the cache, 0.002 GB"
    assert state(None) == missing
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(snapshot.name)
    assert state(None) == "in the cache, 0.002 GB"
    gated = composed("hardware=mi300x", "model=llama3_1_8b")
    assert local_copies.weights(gated, host).endswith("export HF_TOKEN")
    assert local_copies.weights(composed("hardware=mi300x"), host) is None  # random weights


def test_a_shared_gpu_is_named_once(launch):
    grpo = ["hardware=mi300x", "method=grpo", "topology=split", "topology.num_gpus=1", "mode=plan"]
    assert ": 1 GPU to generate and train " in launch(*grpo).out
