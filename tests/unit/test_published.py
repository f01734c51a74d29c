"""Published figures: the files, the arithmetic that their notes state, and how ours are set beside them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.bench import published
from recipes.bench.published import PublishedError, Reference
from recipes.common.errors import UserError

REPOSITORY = Path(__file__).parents[2]
HARDWARE = {path.stem for path in (REPOSITORY / "conf/hardware").glob("*.yaml")}
REPORT = "AMD MI350X Training Benchmark Results"


def rows(benchmark: str, hardware: str, where: str = "", figure: str | None = None) -> list[Reference]:
    return [
        row
        for row in published.load(benchmark).rows
        if hardware in row.hardware and row.where.startswith(where) and figure in (None, row.figure)
    ]


def said(benchmark: str, hardware: str, *phrases: str) -> None:
    """The notes that users get say so."""
    notes = " ".join(published.notes_of(benchmark, hardware))
    for phrase in phrases:
        assert phrase in notes


def peak(hardware: str, dtype: str) -> float:
    return float(yaml.safe_load((REPOSITORY / f"conf/hardware/{hardware}.yaml").read_text())["peak_tflops"][dtype])


def percent(share: float) -> str:
    return f"{share:.0%}"


# The files


def test_every_file_is_a_known_benchmark_and_loads():
    assert {path.stem for path in published.FOLDER.glob("*.yaml")} == set(published.KEYS)
    for benchmark in published.KEYS:
        assert published.load(benchmark).rows


@pytest.mark.parametrize("benchmark", published.KEYS)
def test_every_row_has_a_dated_source_a_place_and_hardware(benchmark: str):
    for row in published.load(benchmark).rows:
        assert row.source.title
        assert row.where
        assert re.fullmatch(r"\d{4}-\d\d-\d\d|undated, read \d{4}-\d\d-\d\d", row.source.date)
        assert row.source.url is None or row.source.url.startswith("https://")
        assert row.value > 0
        assert row.unit
        assert set(row.hardware) <= HARDWARE | {"a100"}  # for the comparison of peaks alone
        assert all(isinstance(value, int | float) for value in row.also.values())


@pytest.mark.parametrize("benchmark", published.KEYS)
def test_every_compared_row_is_the_one_found_for_itself(benchmark: str):
    """No row hides another: a measured one is found by its own keys, the least of a source where nothing measured has them."""
    for row in published.load(benchmark).rows:
        for hardware in row.hardware:
            found = published.published(benchmark, hardware, row.match, row.figure)
            if row.kind == "measured":
                assert found is not None
                assert found.reference == row
            elif row.kind == "least":
                assert found is not None
            else:
                assert found is None or found.reference != row


def test_every_row_of_the_mi350x_reports_tables_is_there():
    tables = Counter(
        (benchmark, row.where) for benchmark in published.KEYS for row in published.load(benchmark).rows if row.source.title == REPORT
    )
    assert tables == {
        ("matmul", "Benchmark 1"): 2,
        ("matmul", "Benchmark 1, and its comparison"): 1,
        ("matmul", "Benchmark 1, comparison"): 2,
        ("gemm", "Benchmark 1b, FP16"): 7,
        ("gemm", "Benchmark 1b, BF16"): 7,
        ("gemm", "Benchmark 1b, library comparison"): 3,  # the comparison with SemiAnalysis: below
        ("mlp_loop", "Benchmark 2"): 1,
        ("transformer", "Benchmark 3, small to XL"): 4,
        ("transformer", "Benchmark 3, 1.5B to 13B"): 4,
        ("scaling", "Benchmark 4, 8-GPU results"): 2,
        ("scaling", "Benchmark 4, scaling"): 4,
        ("finetune", "Benchmark 5, full fine-tuning (FP8)"): 1,
        ("finetune", "Benchmark 5, full fine-tuning (BF16)"): 1,
        ("finetune", "Benchmark 5, LoRA fine-tuning (BF16)"): 1,
        ("finetune", "Benchmark 5, training progress (LoRA)"): 4,
    }


def test_every_figure_of_the_other_documents_is_there():
    def counted(benchmark: str, hardware: str, title: str) -> int:
        return sum(row.source.title.startswith(title) for row in rows(benchmark, hardware))

    assert [counted("gemm", gpu, "SemiAnalysis") for gpu in ("mi300x", "h100", "h200")] == [2, 2, 2]
    assert [counted("gemm", gpu, "ROCm Blogs") for gpu in ("mi300x", "mi325x")] == [3, 3]
    assert counted("finetune", "mi50", "ROCm LLM Fine-Tuning") == 1
    assert counted("attention", "mi50", "ROCm LLM Fine-Tuning") == 2
    assert counted("finetune", "strix_halo", "Hardware Notes") == 3
    assert counted("rl", "strix_halo", "Hardware Notes") == 4
    assert counted("precision", "strix_halo", "Hardware Notes") == 3
    assert counted("finetune", "h200", "Measured on H200") == 4
    assert counted("rl", "h200", "Measured on H200") == 1
    assert counted("collectives", "mi300x", "ROCm Blogs") == 26
    assert counted("vllm", "mi300x", "ROCm/vllm") == 8 + 32


# The arithmetic of the sources, where the notes have something to say of it


@pytest.mark.parametrize(("dtype", "average", "spread"), [("fp16", 982, 2), ("bf16", 1027, 2)])
def test_gemm_rates_follow_from_times_and_are_45_percent_of_peak(dtype: str, average: float, spread: float):
    of_dtype = [row for row in rows("gemm", "mi350x", "Benchmark 1b") if row.match["dtype"] == dtype and row.match["op"] == "matmul"]
    assert len(of_dtype) == 7
    for row in of_dtype:
        m, n, k = map(int, str(row.match["shape"]).split())
        assert 2 * m * n * k / row.also["ms"] / 1e9 == pytest.approx(row.value, abs=spread)
    mean = sum(row.value for row in of_dtype) / 7
    assert mean == pytest.approx(average, abs=0.5)
    said("gemm", "mi350x", percent(mean / peak("mi350x", dtype)))
    if dtype == "bf16":
        said("gemm", "mi350x", percent(max(row.value for row in of_dtype) / peak("mi350x", dtype)))


def test_linear_is_12_to_15_percent_faster_where_the_report_says_11_to_13():
    libraries = rows("gemm", "mi350x", "Benchmark 1b, library comparison")
    gains = []
    for row in libraries:
        matmul = row.also["matmul_tflops"]
        assert 100 * (matmul - row.value) / row.value == pytest.approx(row.also["difference_percent"], abs=0.05)
        gains.append(row.value / matmul - 1)
        same = published.published("gemm", "mi350x", {**row.match, "op": "matmul"}, "tflops")
        assert same is not None
        assert same.value == pytest.approx(matmul, rel=0.01)
    said("gemm", "mi350x", f"{100 * min(gains):.1f}-{100 * max(gains):.1f}% faster")


def test_the_reports_78_percent_is_of_the_mi300x():
    for row in rows("matmul", "mi350x"):
        assert row.value / peak("mi300x", "fp16") == pytest.approx(row.also["share_of_peak"], abs=0.01)
        said("matmul", "mi350x", percent(row.value / peak("mi350x", "fp16")))
        computed = 20 * 2 * int(row.match["size"]) ** 3 / 1e12
        assert computed / (row.also["total_s"] + 0.0005) <= row.value <= computed / (row.also["total_s"] - 0.0005)  # rounded times
    said("matmul", "mi350x", f"{20 * 2 * 4096**3 / 0.004 / 1e12:.0f} TFLOPS")


def test_mlp_loop_could_have_run_in_fp32():
    (row,) = rows("mlp_loop", "mi350x")
    weights = 4096 * 8192 + 8192 * 8192 + 8192 * 4096
    tflops = 6 * weights * row.value / 1e12
    said("mlp_loop", "mi350x", f"{tflops:.0f} TFLOPS", f"{weights / 1e6:.1f}M")
    said("mlp_loop", "mi350x", percent(tflops / peak("mi350x", "fp16")), percent(tflops / peak("mi350x", "fp32")))
    assert 100 * 256 / row.also["total_s"] == pytest.approx(256e3 / row.also["ms"])
    said("mlp_loop", "mi350x", f"{256e3 / row.also['ms']:,.0f} samples/s")


def test_transformer_columns_agree_and_leave_attention_out():
    of_peak, added = {}, {}
    for row in rows("transformer", "mi350x"):
        also, tokens = row.also, int(row.match["batch"]) * int(row.match["sequence"])
        assert 1e3 * tokens / also["ms"] == pytest.approx(row.value, rel=0.003)
        assert 6 * also["parameters"] * row.value / 1e12 == pytest.approx(also["tflops"], rel=0.005)
        of_peak[row.match["model"]] = also["tflops"] / peak("mi350x", "bf16")
        added[row.match["model"]] = 2 * also["layers"] * also["width"] * int(row.match["sequence"]) / also["parameters"]
    assert percent(added["small"]) == "8%"
    assert all(0.03 <= added[model] <= 0.055 for model in ("1.5b", "3b", "7b", "13b"))
    said("transformer", "mi350x", "8% to small and 3-5% from")
    assert {percent(of_peak[model]) for model in ("small", "medium", "large", "xl", "1.5b", "3b")} <= {"7%", "8%", "9%", "10%"}
    said("transformer", "mi350x", f"7B {percent(of_peak['7b'])}, 13B {percent(of_peak['13b'])}")


def test_transformer_parameters_fit_gpt2s_vocabulary_with_tied_embeddings():
    for row in rows("transformer", "mi350x"):
        layers, width, inner = (int(row.also[key]) for key in ("layers", "width", "feed_forward"))
        layer = 4 * width * width + 4 * width + 2 * width * inner + width + inner + 4 * width  # with biases and two norms
        count = layers * layer + (50257 + int(row.match["sequence"])) * width + 2 * width
        assert count == pytest.approx(row.also["parameters"], abs=0.5e6 if count < 1e9 else 5e6)  # as many digits as the report prints
    said("transformer", "mi350x", "50,257")


def test_transformer_memory_has_no_room_for_fp32_adam():
    least = min(row.also["memory_gb"] * 2**30 / row.also["parameters"] for row in rows("transformer", "mi350x"))
    assert least < 11 < 16  # even if its GB are GiB
    said("transformer", "mi350x", "at most 11 bytes")


def test_scaling_keeps_both_8_gpu_rows_and_their_efficiencies():
    named, series = rows("scaling", "mi350x", "Benchmark 4, 8-GPU"), rows("scaling", "mi350x", "Benchmark 4, scaling")
    one = series[0].value
    for row in series:
        assert row.value / one / int(row.match["num_gpus"]) == pytest.approx(row.also["efficiency"], abs=0.0005)
    for row in named + series:
        assert 6 * row.also.get("parameters", 5.24e9) * row.value / 1e12 == pytest.approx(row.also["tflops"], rel=0.002)
    first, second = named[0].value, series[-1].value
    assert (first, second) == (101124, 70763)
    assert percent(1 - second / first) == "30%"
    said(
        "scaling",
        "mi350x",
        "101,124 and 70,763 tokens/s, 30% apart",
        f"{percent(first / one / 8)} a GPU",
        f"the second {percent(second / one / 8)}",
    )
    single = rows("transformer", "mi350x", "Benchmark 3, 1.5B")[2]
    assert one / single.value == pytest.approx(1, abs=0.0032)
    assert named[0].also["memory_gb"] < single.also["memory_gb"]
    said("scaling", "mi350x", "within 0.3%", "92 GB", "107.9 GB", f"{percent(398 / peak('mi350x', 'bf16'))} of peak")


def test_scaling_finds_the_row_that_names_the_batch_first():
    ours = {"model": "7b", "num_gpus": 8, "strategy": "ddp", "tokens_per_second": 1.0}
    for batch, value in ((8, 101124), (4, 70763)):
        found = published.published("scaling", "mi350x", {**ours, "batch": batch}, "tokens_per_second")
        assert found is not None
        assert found.value == value
    assert published.published("scaling", "mi350x", {**ours, "batch": 8, "strategy": "fsdp"}, "tokens_per_second") is None


def test_finetune_totals_and_what_full_rows_would_mean():
    for row in rows("finetune", "mi350x", "Benchmark 5", "tokens_per_second_per_gpu"):
        assert row.value * 8 == row.also["tokens_per_second"]
    model = yaml.safe_load((REPOSITORY / "conf/model/qwen3_8b.yaml").read_text())
    weights = model["num_parameters"] - model["vocab_size"] * model["hidden_size"]
    attention = 6 * model["num_layers"] * model["num_heads"] * model["head_dim"] * 8192  # causal, as recipes/common/flops.py counts it
    tflops = (6 * weights + attention) * 14471 / 1e12
    said("finetune", "mi350x", f"{tflops:.0f} TFLOPS a GPU ({percent(tflops / peak('mi350x', 'bf16'))} of peak)", f"{tflops * 4 / 3:,.0f}")
    assert percent(tflops * 4 / 3 / 1027) == "99%"
    said("finetune", "mi350x", "99% of", f"{percent(16312 / 14471 - 1)} faster")


@pytest.mark.parametrize(
    ("change", "value"),
    [({}, 14471), ({"num_gpus": 1}, None), ({"batch": 1}, None), ({"setup": "plain"}, None), ({"setup": "plain_compiled"}, None)],
)
def test_finetune_is_compared_where_all_that_the_report_states_is_the_same(change: dict[str, Any], value: float | None):
    ours = {"model": "qwen3_8b", "precision": "bf16", "adapter": "none", "sequence": 8192, "batch": 14, "num_gpus": 8}
    row = {**ours, "setup": "plain_compiled_checkpointing", "tokens_per_second_per_gpu": 9000.0, **change}
    compared = published.compare([row], "finetune", "mi350x", "tokens_per_second_per_gpu")
    assert compared.rows[0]["published"] == value


def test_times_of_mi50_and_strix_halo():
    sdpa, flash = rows("attention", "mi50")  # so many per cent more calls in the same time
    assert [sdpa.value, sdpa.also["low"], sdpa.also["high"]] == [round(1 / rate, 2) for rate in (1.15, 1.2, 1.1)]
    assert flash.value == round(1 / 1.3, 2)
    (mi50,) = rows("finetune", "mi50")
    said("finetune", "mi50", f"{8 * 512 / mi50.value:.0f} tokens/s")
    small, medium, large = rows("finetune", "strix_halo")
    rate = 3 * 10_000 / (small.value * 3600)
    days = [3 * int(row.match["samples"]) / rate / 86400 for row in (medium, large)]
    said("finetune", "strix_halo", f"{rate:.2f} samples/s", f"{days[0]:.1f} and {days[1]:.1f} days")
    phases = {row.match["phase"]: row for row in rows("rl", "strix_halo")}
    said("rl", "strix_halo", f"{500 * 8 * phases['generation'].also['seconds_per_sample'] / 3600:.1f} hours of generation")
    ends = [
        sum(phases[name].also.get(end, phases[name].value) for name in ("generation", "verification", "training"))
        for end in ("low", "high")
    ]
    assert ends == [8.0, 9.5]


def test_bus_bandwidth_follows_from_time():
    """2 (n - 1) / n times bytes over time, as nccl-tests define it; their times have four digits."""
    for row in rows("collectives", "mi300x", "AllReduce RCCL Test"):
        size = int(row.match["bytes"])
        for time, bandwidth in ((row.also["us"], row.value), (row.also["out_of_place_us"], row.also["out_of_place_bus_gb_s"])):
            assert 2 * 7 / 8 * size / time / 1e3 == pytest.approx(bandwidth, rel=1e-3, abs=0.006)


# Ours beside theirs

GEMM: dict[str, Any] = {"shape": "8192 8192 8192", "dtype": "bf16", "op": "matmul", "values": "normal", "padding": 0, "error": None}


def test_a_rate_and_a_time_are_both_better_above_1():
    rate = published.compare([{**GEMM, "tflops": 552.0}], "gemm", "mi350x", "tflops", True, None).rows[0]
    assert rate["published"] == 1104
    assert rate["published_source"] == f"{REPORT}, 2026-01-08, Benchmark 1b, BF16"
    assert rate["ratio"] == 0.5
    time = published.compare([{**GEMM, "ms": 1.992}], "gemm", "mi350x", "ms", False, None).rows[0]
    assert (time["published"], time["ratio"]) == (0.996, 0.5)
    assert time["shape"] == GEMM["shape"]


def test_the_least_that_somebody_accepts_comes_after_what_somebody_measured():
    def found(hardware: str) -> dict[str, Any]:
        return published.compare([{**GEMM, "tflops": 600.0}], "gemm", hardware, "tflops").rows[0]

    assert found("mi300x")["published"] == 620
    assert found("mi355x")["published"] == 600
    assert found("mi355x")["published_source"].startswith("at least: AMD-AGI/Primus")


@pytest.mark.parametrize(
    "change", [{"values": "zeros"}, {"padding": 128}, {"dtype": "tf32"}, {"shape": "8192 8192 8191"}, {"op": "compiled"}]
)
def test_other_work_has_no_published_figure(change: dict[str, Any]):
    assert published.published("gemm", "mi350x", {**GEMM, **change}, "tflops") is None


def test_a_peak_and_an_estimate_are_not_compared():
    assert published.published("matmul", "h100", {"size": 8192, "dtype": "fp16"}, "tflops") is None
    assert published.published("checkpointing", "mi50", {"checkpointing": True}, "slowdown") is None


def test_hardware_without_rows_is_told_once():
    compared = published.compare([{**GEMM, "tflops": 1.0}, {**GEMM, "dtype": "fp16", "tflops": 1.0}], "gemm", "mi50", "tflops")
    assert [row["published"] for row in compared.rows] == [None, None]
    (note,) = compared.notes
    assert note.startswith("no published tflops of gemm for mi50; there are of mi350x (18), mi300x")
    assert published.compare([{"workers": 0, "rows_per_second": 1.0}], "dataloader", "mi50", "rows_per_second").notes == [
        "no published rows_per_second of dataloader for mi50."
    ]


def test_rows_that_nobody_published_name_those_that_somebody_did():
    (note,) = published.compare([{**GEMM, "shape": "1 1 1", "tflops": 1.0}], "gemm", "mi350x", "tflops").notes
    assert note.startswith("Nothing here was published for mi350x. Published rows: 8192 8192 8192 fp16 matmul, ")
    assert note.endswith("and 11 more.")


def test_the_gate_names_what_is_below_it():
    measured = [{**GEMM, "tflops": 1000.0}, {**GEMM, "dtype": "fp16", "tflops": 900.0}, {**GEMM, "dtype": "fp8", "tflops": 1.0}]
    assert published.compare(measured, "gemm", "mi350x", "tflops", True, 0.9).below == ["8192 8192 8192 fp16 matmul: 0.85 of 1053 TFLOPS"]
    assert published.compare(measured, "gemm", "mi350x", "tflops", True, 0.8).below == []


def test_a_row_that_failed_where_somebody_has_a_figure_is_below():
    (row,) = published.compare([{**GEMM, "error": "out of memory"}], "gemm", "mi350x", "tflops").rows
    assert (row["published"], row["ratio"]) == (1104, None)
    assert published.compare([{**GEMM, "error": "out of memory"}], "gemm", "mi350x", "tflops", True, 0.5).below == [
        "8192 8192 8192 bf16 matmul: out of memory, instead of 1104 TFLOPS"
    ]


def test_a_gate_that_nothing_can_be_held_against_is_refused():
    with pytest.raises(UserError, match=r"fail_below=0.9: no published tflops of gemm for mi50; there are of mi350x"):
        published.require("gemm", "mi50", "tflops", 0.9)
    published.require("gemm", "mi50", "tflops", None)
    with pytest.raises(UserError, match="of no row measured here"):
        published.compare([{**GEMM, "shape": "1 1 1", "tflops": 1.0}], "gemm", "mi350x", "tflops", True, 0.9)


# Wrong files

ROW = "{hardware: h200, match: {size: 1}, value: 1, source: a, where: x}"


@pytest.mark.parametrize(
    ("rows_", "message"),
    [
        ("[{hardware: h200, match: {size: 1}, valeu: 1, source: a, where: x}]", "row 1: valeu: unknown key. Did you mean value?"),
        ("[{hardware: h200, match: {size: 1}, value: 1, source: a}]", "row 1: where is missing"),
        (
            "[{hardware: h200, match: {sizes: 1}, value: 1, source: a, where: x}]",
            "match.sizes: no such key in the benchmark's rows. Did you mean size?",
        ),
        ("[{hardware: h200, match: {size: '1'}, value: 1, source: a, where: x}]", "match.size='1': the benchmark's rows carry int there"),
        ("[{hardware: h200, match: {size: 1}, value: 1, source: b, where: x}]", "source=b: not in sources. Known: a."),
        ("[{hardware: h200, match: {size: 1}, value: 1, source: a, where: x, kind: guess}]", "kind=guess: unknown"),
        ("[{hardware: h200, match: {size: 1}, value: fast, source: a, where: x}]", "value='fast': a number is expected"),
        ("[fast]", "row 1: keys and values are expected, not 'fast'"),
        (f"[{ROW}, {ROW}]", "two rows say the same"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, rows_: str, message: str):
    written(tmp_path, rows_)
    with pytest.raises(PublishedError, match=re.escape(message)):
        published.load("matmul", tmp_path)


def test_two_rows_that_match_equally_well_are_refused(tmp_path: Path):
    written(tmp_path, f"[{ROW}, {{hardware: h200, match: {{dtype: bf16}}, value: 2, source: a, where: y}}]")
    with pytest.raises(PublishedError, match="2 rows of h200 match .*: x; y"):
        published.published("matmul", "h200", {"size": 1, "dtype": "bf16"}, "tflops", tmp_path)


def written(folder: Path, rows_: str) -> None:
    (folder / "matmul.yaml").write_text(
        f"figure: tflops\nunit: TFLOPS\nsources: {{a: {{title: A, date: 2026-01-01, url: null}}}}\nrows: {rows_}\n"
    )
