"""Test vLLM's benchmark: settings, figures, failures, and the GPUs of each engine."""

from __future__ import annotations

import functools
import json

import pytest
from omegaconf import OmegaConf

from launch.core.errors import UserError
from recipes.bench import vllm_programs as programs
from recipes.bench.vllm_engine import (
    EngineConfig,
    Engines,
    cases,
    combine_engines,
    model_source,
    shares,
    word_tokenizer,
)
from tests.conftest import composed

# Excerpts of the output of vLLM 0.31 on a CPU: four requests of 16 tokens in and 8 out.
OFFLINE = {
    "elapsed_time": 8.3427210880036, "num_requests": 4, "total_num_tokens": 96,
    "requests_per_second": 0.4794598737996638, "tokens_per_second": 11.507036971191932,
}  # fmt: skip
SERVED = {
    "completed": 4, "failed": 0, "total_input_tokens": 64, "total_output_tokens": 32,
    "output_throughput": 233.71365823790438, "total_token_throughput": 701.1409747137131,
    "median_ttft_ms": 32.159842499822844, "p99_ttft_ms": 44.75940401527623,
    "median_itl_ms": 8.298159998957999, "p99_itl_ms": 16.398891800490674,
}  # fmt: skip
LATENCY = {"avg_latency": 0.5, "latencies": [0.5], "percentiles": {"50": 0.5}}
ROW = {"kind": "served", "input": 16, "output": 8, "concurrency": 2}
ROW |= {"setting": "vLLM's own", "num_gpus": 1, "engines": 1}


def args(**changes) -> EngineConfig:
    return EngineConfig("out", **{"lengths": [[1024, 128]], **changes})


@functools.cache
def config(*overrides: str):
    """Return a configuration in the form that a rank reads."""
    groups = ("hardware=mi300x", "method=bench/vllm", "model=qwen3_4b")
    typed = OmegaConf.structured(composed(*groups, *overrides))
    return OmegaConf.create(OmegaConf.to_container(typed, enum_to_str=True))


def test_settings_are_arguments():
    setting = {
        "max_num_seqs": 512,
        "enable_chunked_prefill": False,
        "enforce_eager": True,
        "dtype": None,
        "label": "mine",
        "instances": 2,
        "VLLM_ROCM_USE_AITER": 1,
    }
    expected = "--max-num-seqs 512 --no-enable-chunked-prefill --enforce-eager"
    assert programs.argv_of(setting) == expected.split()
    assert programs.env_of(setting) == {"VLLM_ROCM_USE_AITER": "1"}
    assert programs.name_of(setting) == "mine"
    assert programs.name_of({"max_num_seqs": 512, "dtype": "fp8"}) == "max_num_seqs=512 dtype=fp8"
    assert programs.gpus_of({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}) == 4
    assert len(args(**OmegaConf.to_container(config().method.args)).settings) == 18, "all differ"
    with pytest.raises(UserError, match="a, a"):
        args(settings=[{"label": "a"}, {"label": "a", "max_num_seqs": 1}])


@pytest.mark.parametrize(("world", "engines", "left_out"), [
    (2, {"vLLM's own": 2, "two": 4, "tp2": 1}, ["tp4"]),
    (8, {"vLLM's own": 8, "two": 16, "tp2": 4, "tp4": 2}, []),
])  # fmt: skip
def test_engines_on_the_gpus_of_a_run(monkeypatch, world, engines, left_out):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(world))
    settings = [
        {},
        {"label": "two", "instances": 2},
        {"label": "tp2", "tensor_parallel_size": 2},
        {"label": "tp4", "tensor_parallel_size": 4},
    ]
    notes: list[str] = []
    kinds = ["offline", "served", "latency"]
    rows = cases(args(settings=settings, concurrency=[1, 64], kinds=kinds), config(), notes)
    assert {row["setting"]: row["engines"] for row in rows} == engines
    assert [(row["kind"], row["concurrency"]) for row in rows[:4]] == [
        ("offline", 1000),
        ("served", 1),
        ("served", 64),
        ("latency", 1),
    ]
    assert {row["num_gpus"] for row in rows} == {world}
    assert [note.split(": ")[0] for note in notes if "left out" in note] == left_out


@pytest.fixture
def figures(tmp_path):
    """Return a function that writes vLLM's result to a file and reads the figures of a case."""

    def read(content: dict, **changes) -> dict[str, float]:
        (tmp_path / "a.json").write_text(json.dumps(content))
        (tmp_path / "a.log").write_text("Total num output tokens:  32\n")
        return programs.figures({**ROW, **changes}, tmp_path / "a.json", tmp_path / "a.log")

    return read


def test_figures_of_offline_served_and_latency(figures, tmp_path):
    assert figures(OFFLINE, kind="offline") == {
        "output_tokens_per_second": pytest.approx(32 / 8.3427, rel=1e-4),
        "total_tokens_per_second": pytest.approx(96 / 8.3427, rel=1e-4),
    }
    assert list(figures(SERVED).values()) == list(SERVED.values())[4:]
    latency = {"output_tokens_per_second": 32.0, "total_tokens_per_second": 96.0, "latency_s": 0.5}
    assert figures(LATENCY, kind="latency") == latency
    other = {**SERVED, "output_throughput": 100.0, "median_ttft_ms": 42.2, "p99_itl_ms": 20.0}
    row = combine_engines([figures(SERVED), figures(other)])
    assert row["output_tokens_per_second"] == pytest.approx(333.71, abs=0.01)
    assert (row["ttft_ms"], row["itl_p99_ms"]) == (pytest.approx(37.18, abs=0.01), 20.0)
    assert row["ttft_p99_ms"] == SERVED["p99_ttft_ms"]
    with pytest.raises(UserError, match="failed 3 of 4 requests"):
        figures({**SERVED, "failed": 3, "completed": 1})
    with pytest.raises(UserError, match="96 tokens.*4608"):
        figures(OFFLINE, kind="offline", input=1024, output=128)
    with pytest.raises(UserError, match=r"b\.json"):
        programs.figures(ROW, tmp_path / "b.json", tmp_path / "b.log")


def test_figures_of_sharegpts_conversations(figures, tmp_path):
    """Requests have their own lengths, so tokens are counted and not compared with lengths."""
    sharegpt = {"input": "sharegpt", "output": "sharegpt"}
    assert figures(SERVED, **sharegpt) == figures(SERVED)
    counted = figures(OFFLINE, kind="offline", **sharegpt)
    assert counted["output_tokens_per_second"] == pytest.approx(32 / OFFLINE["elapsed_time"])
    (tmp_path / "b.log").write_text("no count")
    row = {**ROW, "kind": "offline", **sharegpt}
    with pytest.raises(UserError, match=r"b\.log"):
        programs.figures(row, tmp_path / "a.json", tmp_path / "b.log")


@pytest.mark.parametrize(("kind", "words"), [
    ("offline", ["--dataset-name", "sharegpt", "--dataset-path", "a b.json"]),
    ("served", ["--dataset-name", "sharegpt", "--dataset-path", "a b.json"]),
    ("latency", ["--input-len", "1024"]),  # its program has random prompts only
])  # fmt: skip
def test_programs_get_the_data_set_and_the_profiler(tmp_path, kind, words):
    groups = OmegaConf.merge(config("profile=torch"), {"run_dir": str(tmp_path)})
    setting = {"PYTORCH_TUNABLEOP_FILENAME": "{run_dir}/tuned.csv"}
    engines = Engines(args(dataset="a b.json", settings=[setting]), groups, ["env"])
    (row, *_) = cases(args(dataset="a b.json", kinds=[kind]), groups, [])
    engines.setting, engines.servers = setting, [(None, 8000)]
    argv = engines.benchmark(row, 0, tmp_path / "1.json")
    first = argv.index(words[0])
    assert argv[first : first + len(words)] == words
    if kind != "served":  # the server has the engine's arguments
        profiler = json.loads(argv[argv.index("--profiler-config") + 1])
        assert profiler["torch_profiler_dir"] == f"{tmp_path}/profile"
    program = engines.start([], kind)
    program.popen.wait()
    assert f"PYTORCH_TUNABLEOP_FILENAME={tmp_path}/tuned.csv" in program.log.read_text()
    assert engines.profile == ["--profile"]


def test_shares_of_the_gpus_limits():
    """Compare with 4.02e9 parameters, which are 8.04 GB in bf16."""
    figures = {"total_tokens_per_second": 10000.0, "itl_ms": 3.0}
    in_bf16 = shares(figures, ROW, {}, config())
    assert in_bf16["share_of_peak"] == pytest.approx(2 * 4.022e9 * 1e4 / 1307.4e12, rel=1e-3)
    assert in_bf16["share_of_bandwidth"] == pytest.approx(8.045 / 0.003 / 5300, rel=1e-3)
    fp8 = shares(figures, ROW, {"quantization": "fp8"}, config())
    assert fp8["share_of_bandwidth"] == pytest.approx(in_bf16["share_of_bandwidth"] / 2)
    assert fp8["share_of_peak"] == pytest.approx(in_bf16["share_of_peak"] / 2, rel=1e-3)


def test_environment_of_an_engine(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "4,5,6,7")
    env = programs.environment({"VLLM_ROCM_USE_AITER": "1"}, 2, 2)
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & {*env}
    assert env["HIP_VISIBLE_DEVICES"] == "6,7"
    assert env["VLLM_ROCM_USE_AITER"] == "1"
    assert env["NO_PROXY"] == "example.org,127.0.0.1"


def test_random_weights_are_a_configuration_and_a_tokenizer(tmp_path):
    overrides = ("model.init=random", "model.vocab_size=512")
    random = OmegaConf.merge(config(*overrides), {"run_dir": str(tmp_path)})
    source, options = model_source(random)
    assert (source, options) == (str(tmp_path / "model_dummy"), {"load_format": "dummy"})
    tokenizer, ids = word_tokenizer(512), list(range(2, 512))
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids
    content = json.loads((tmp_path / "model_dummy/config.json").read_text())
    assert content["architectures"] == ["Qwen3ForCausalLM"]
    assert (content["num_hidden_layers"], content["dtype"]) == (36, "bfloat16")
    assert model_source(random) == (source, options), "a resumed run reuses the directory"
    assert model_source(config()) == ("Qwen/Qwen3-4B", {"revision": random.model.revision})
    assert model_source(config(f"model.path={tmp_path}")) == (str(tmp_path), {})
