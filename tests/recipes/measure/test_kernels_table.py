"""Test kinds of kernels by name, and shares of time from traces checked by hand."""

from __future__ import annotations

import pytest

from recipes.measure.kernels_table import kind, shares, summary, text

# Kernel names by kind, as profiles print them: NVIDIA/Fuser#4873, huggingface/blog#1649 (NVIDIA),
# SemiAnalysisAI/InferenceX#1005 and ROCm/rocm-libraries#12213 (AMD), torch, and others quoted in
# public repositories.
NAMES = {
    "gemm": """
        nvjet_tst_192x192_64x3_2x1_v_bz_coopB_NTN
        ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_6...
        ck::moe_mxgemm
        Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_CMS_SN_LDS
        void ck_tile::kentry<2, ck_tile::MoeFlatmmKernel<ck_tile::GemmSpatiallyLocalTile
        void wvSplitK_hf_sml_
        triton_tem_fused_mm_1
        aten::addmm
    """,
    "attention": """
        void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel
        void flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits
        FmhaBwdOGradDotO
        bwd_preprocess
        attn_fwd-Sig-F__*fp32@16_64_F_F_0_1__P__0_2_16_16_True__CO__wave3_warp2_stg1
        void ck_tile::kentry<256, 1, ck_tile::FmhaBwdDQDKDVK...
        kernel_unified_attention_2d
        triton_tem_fused_flex_attention_0
        aten::_scaled_dot_product_flash_attention_for_cpu
    """,
    "communication": """
        ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)
        cross_device_reduce_2stage<bf16, 4>
        gloo:all_reduce
    """,
    "memory_bound": """
        void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>
        void at::native::vectorized_elementwise_kernel<4, at::native::compare_scalar_kernel<int>
        Memset (Device)
        Memcpy DtoH (Device -> Pinned)
        void reduce_1Block_kernel<float, 128, 7, cublasGemvT...
        Cijk_SB_GG_BiasS_HAS_ScaleAlphaVec_PostGSU8_VW2
        void ck_tile::kentry<1, ck_tile::Rmsnorm2dFwd<ck_tile::Rmsnorm2dFwdPipelineOnePass
        void ck_tile::kentry<2, ck_tile::MoeSortingKernel<ck_tile::MoeSortingProblemEx
        triton_poi_fused__to_copy_mul_silu_split_0.kd
        multi_tensor_apply_kernel<AdamFunctor<float, float>>
        void cub::DeviceScanKernel
        aten::native_layer_norm
    """,
    "other": "my_own_kernel",
}
GEMM, ATTENTION = "Cijk_x", "flash_fwd_kernel"
COMMUNICATION, NORM = "ncclDevKernel_Generic", "rms_norm_kernel"


@pytest.mark.parametrize("expected", NAMES)
def test_kernel_names_have_the_expected_kind(expected):
    names = [name.strip() for name in NAMES[expected].strip().splitlines()]
    assert {name: kind(name) for name in names} == dict.fromkeys(names, expected)


def of(*ran: tuple[float, float, str], end: float = 10.0) -> dict[str, float]:
    """Return the nonzero shares."""
    by_kind = shares(ran, 0.0, end)
    assert sum(by_kind.values()) - by_kind["communication_hidden"] == pytest.approx(1.0)
    return {name: pytest.approx(value) for name, value in by_kind.items() if value}


@pytest.mark.parametrize(("ran", "expected"), [
    # Communication is exposed while no kernel computes.
    ([(0, 4, GEMM), (2, 7, COMMUNICATION), (8, 9, NORM)], {
        "gemm": 0.4,
        "communication_hidden": 0.2,
        "communication_exposed": 0.3,
        "memory_bound": 0.1,
        "idle": 0.2,
    }),
    # Concurrent kernels count once.
    ([(0, 4, COMMUNICATION), (2, 6, COMMUNICATION)], {"communication_exposed": 0.6, "idle": 0.4}),
    ([(0, 6, NORM), (2, 4, GEMM), (3, 5, ATTENTION)], {
        "gemm": 0.2,
        "attention": 0.1,
        "memory_bound": 0.3,
        "idle": 0.4,
    }),
])  # fmt: skip
def test_each_instant_counts_for_one_share(ran, expected):
    assert of(*ran) == expected


def event(name: str, ts: float, dur: float, cat: str, tid: int = 1) -> dict:
    place = {"cat": cat, "pid": 1, "tid": tid, "args": {}}
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, **place}


def test_summary_of_a_gpu_trace():
    """Count in microseconds.

    Of the kernel that begins before the step only its part in it counts.
    """
    events = [
        event("ProfilerStep#4", 1000, 500, "user_annotation"),
        event("ProfilerStep#5", 1500, 500, "user_annotation"),
        event("aten::mm", 1010, 50, "cpu_op"),
        event(GEMM, 900, 200, "kernel"),
        event(GEMM, 1200, 300, "kernel"),
        event("Memcpy HtoD (Pinned -> Device)", 1600, 100, "gpu_memcpy"),
        event(NORM, 2100, 100, "kernel"),
        {"ph": "M", "name": "process_name", "args": {}},
    ]
    table = summary(events)
    assert (table["time_s"], table["steps"], table["device"]) == (0.001, 2, "gpu")
    used = {name: share for name, share in table["shares"].items() if share}
    assert used == {"gemm": 0.4, "memory_bound": 0.1, "idle": 0.5}
    longest, copy = table["kernels"]
    assert longest == {"name": GEMM, "kind": "gemm", "calls": 2, "time_s": 0.0004, "share": 0.4}
    assert (copy["kind"], copy["calls"], copy["share"]) == ("memory_bound", 1, 0.1)
    assert "gemm 40.0%" in text(table)


def test_operators_count_without_a_gpu():
    """A linear (0 to 100) calls addmm (20 to 80), and another thread computes a norm."""
    events = [
        event("ProfilerStep#1", 0, 200, "user_annotation"),
        event("aten::linear", 0, 100, "cpu_op"),
        event("aten::addmm", 20, 60, "cpu_op"),
        event("aten::native_layer_norm", 50, 100, "cpu_op", tid=2),
    ]
    table = summary(events)
    assert table["device"] == "cpu"
    used = {name: share for name, share in table["shares"].items() if share}
    # Of 200 in total, addmm took 60, linear itself 40, and the parallel norm 100.
    assert used == pytest.approx({"gemm": 0.5, "memory_bound": 0.5})
    times = {row["name"]: row["time_s"] * 1e6 for row in table["kernels"]}
    assert times == pytest.approx(
        {"aten::linear": 40, "aten::addmm": 60, "aten::native_layer_norm": 100}
    )
