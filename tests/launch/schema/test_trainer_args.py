"""Test the arguments that a composition implies."""

import pytest

from launch.schema.trainer_args import complete
from tests.conftest import composed

GRPO = ["hardware=mi300x", "method=grpo", "model=qwen3_4b"]


@pytest.mark.parametrize(("overrides", "mode"), [
    ([], "token_truncate"),
    (["method.args.vllm_importance_sampling_mode=token_mask"], "token_mask"),
])  # fmt: skip
def test_ratios_are_truncated_by_token(tmp_path, overrides, mode):
    config = composed(*GRPO, "topology.overlap=stream", *overrides)
    assert complete(config, tmp_path, (8000, 8001))["vllm_importance_sampling_mode"] == mode
