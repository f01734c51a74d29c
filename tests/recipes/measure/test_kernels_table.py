"""Test kinds of kernels by name, and shares of time from traces checked by hand."""

from __future__ import annotations

import pytest

from recipes.measure.kernels_table import kind, shares, summary, text

# Kernel names by kind, below the profile that they were printed in.
NAMES = {
    "gemm": [
        # NVIDIA/Fuser#4873, nsys on an H100
        "nvjet_tst_192x192_64x3_2x1_v_bz_coopB_NTN",
        # vllm-project/vllm-omni#553, torch profiler on NVIDIA
        "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_6...",
        # SemiAnalysisAI/InferenceX#1005, torch profiler on MI355X
        "ck::moe_mxgemm",
        # quoted from profiles in public repositories, by a text search that does not say which
        "Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_CMS_SN_LDS",
        "void ck_tile::kentry<2, ck_tile::MoeFlatmmKernel<ck_tile::GemmSpatiallyLocalTile",
        "void wvSplitK_hf_sml_",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute",
        # torch._inductor: triton_tem_ and the operators it fuses
        "triton_tem_fused_mm_1",
        # torch's operators
        "aten::addmm",
    ],
    "attention": [
        # NVIDIA/Fuser#4873, nsys on an H100
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel",
        # huggingface/blog#1649, torch profiler on an A100
        "void flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits",
        # ROCm/rocm-libraries#12213, rocprofv3 on MI300X
        "FmhaBwdOGradDotO",
        "bwd_preprocess",
        # ROCm/TheRock#2229
        "attn_fwd-Sig-F__*fp32@16_64_F_F_0_1__P__0_2_16_16_True__CO__wave3_warp2_stg1",
        # quoted from profiles in public repositories, by a text search that does not say which
        "void ck_tile::kentry<256, 1, ck_tile::FmhaBwdDQDKDVK...",
        "_ZN5aiter30fmha_fwd_hd128_bf16_rtna_groupE.kd",
        "kernel_unified_attention_2d",
        # torch._inductor: triton_tem_ and the operators it fuses
        "triton_tem_fused_flex_attention_0",
        # torch's operators
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ],
    "communication": [
        # NVIDIA/Fuser#4873, nsys on an H100
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)",
        # SemiAnalysisAI/InferenceX#1005, torch profiler on MI355X
        "cross_device_reduce_2stage<bf16, 4>",
        # torch's process group gloo
        "gloo:all_reduce",
    ],
    "memory_bound": [
        # sgl-project/sglang#22353, torch profiler on NVIDIA
        "void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::compare_scalar_kernel<int>",
        # huggingface/blog#1649, torch profiler on an A100
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp",
        "void at::native::index_elementwise_kernel<128, 4, at::native",
        "Memset (Device)",
        # vllm-project/vllm-omni#553, torch profiler on NVIDIA
        "Memcpy DtoH (Device -> Pinned)",
        "void reduce_1Block_kernel<float, 128, 7, cublasGemvT...",
        # quoted from profiles in public repositories, by a text search that does not say which
        "Cijk_SB_GG_BiasS_HAS_ScaleAlphaVec_PostGSU8_VW2",
        "void ck_tile::kentry<1, ck_tile::Rmsnorm2dFwd<ck_tile::Rmsnorm2dFwdPipelineOnePass",
        "void ck_tile::kentry<2, ck_tile::MoeSortingKernel<ck_tile::MoeSortingProblemEx",
        "triton_poi_fused__to_copy_mul_silu_split_0.kd",
        "_rmsnorm_kernel.kd",
        "multi_tensor_apply_kernel<…AdamFunctor<float, float, …>>",
        # CUB
        "void cub::DeviceScanKernel",
        # torch's operators
        "aten::native_layer_norm",
    ],
    "other": [
        # a name that says nothing
        "my_own_kernel"
    ],
}
GEMM, ATTENTION = "Cijk_x", "flash_fwd_kernel"
COMMUNICATION, NORM = "ncclDevKernel_Generic", "rms_norm_kernel"


@pytest.mark.parametrize("expected", NAMES)
def test_kind(expected):
    names = NAMES[expected]
    assert {name: kind(name) for name in names} == dict.fromkeys(names, expected)


def of(*ran: tuple[float, float, str], end: float = 10.0) -> dict[str, float]:
    """Return the shares that are not 0."""
    by_kind = shares(ran, 0.0, end)
    assert sum(by_kind.values()) - by_kind["communication_hidden"] == pytest.approx(1.0)
    return {name: pytest.approx(value) for name, value in by_kind.items() if value}


@pytest.mark.parametrize(("ran", "expected"), [
    ([], {"idle": 1.0}),
    # Communication is exposed where nothing computes.
    ([(0, 4, GEMM), (2, 7, COMMUNICATION), (8, 9, NORM)], {
        "gemm": 0.4,
        "communication_hidden": 0.2,
        "communication_exposed": 0.3,
        "memory_bound": 0.1,
        "idle": 0.2,
    }),
    # What runs side by side counts once.
    ([(0, 4, COMMUNICATION), (2, 6, COMMUNICATION)], {"communication_exposed": 0.6, "idle": 0.4}),
    ([(0, 6, NORM), (2, 4, GEMM), (3, 5, ATTENTION)], {
        "gemm": 0.2,
        "attention": 0.1,
        "memory_bound": 0.3,
        "idle": 0.4,
    }),
])  # fmt: skip
def test_every_instant_belongs_to_one_share(ran, expected):
    assert of(*ran) == expected


def event(name: str, ts: float, dur: float, cat: str, tid: int = 1) -> dict:
    place = {"cat": cat, "pid": 1, "tid": tid, "args": {}}
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, **place}


def test_summary_of_a_gpu():
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
    lines = text(table)
    assert "2 steps, 0.001 s; GEMM 40.0%" in lines
    assert "  40.0%       2      0.400  gemm           Cijk_x" in lines


def test_operators_in_place_of_kernels():
    """Have a linear (0 to 100) call addmm (20 to 80) while another thread computes a norm."""
    events = [
        event("ProfilerStep#1", 0, 200, "user_annotation"),
        event("aten::linear", 0, 100, "cpu_op"),
        event("aten::addmm", 20, 60, "cpu_op"),
        event("aten::native_layer_norm", 50, 100, "cpu_op", tid=2),
    ]
    table = summary(events)
    assert table["device"] == "cpu"
    used = {name: share for name, share in table["shares"].items() if share}
    # 60 of 200 each: addmm alone, and 40 of linear; the norm's 100 ran beside them.
    assert used == pytest.approx({"gemm": 0.5, "memory_bound": 0.5})
    times = {row["name"]: row["time_s"] * 1e6 for row in table["kernels"]}
    assert times == pytest.approx(
        {"aten::linear": 40, "aten::addmm": 60, "aten::native_layer_norm": 100}
    )
    calls = {row["name"]: row["calls"] for row in table["kernels"]}
    assert calls == dict.fromkeys(("aten::linear", "aten::addmm", "aten::native_layer_norm"), 1)
