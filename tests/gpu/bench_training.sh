#!/usr/bin/env bash
# The benchmarks of training on NVIDIA H200s, for docs/results/h200.md. Seconds behind each line are estimates, with the start of the ranks.
#
#     bash tests/gpu/bench_training.sh one    # one GPU, about 15 minutes
#     bash tests/gpu/bench_training.sh four   # four GPUs, about 10 minutes
#
# Every run leaves its directory under runs/; one that failed does not keep the others from starting, and the script then ends with 1.
set -uo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-.venv/bin/python}"
failed=0
bench() { "$python" launch/run.py hardware=h200 "$@" || { echo "failed: $*" >&2; failed=1; }; }
finetune=(method=bench/finetune model=qwen3_8b model.init=random)
transformer=(method=bench/transformer precision.weights=bf16)

case "${1:-}" in
  one)
    "$python" tests/gpu/harness.py || failed=1                                       # 180; ends with 1 beyond 1%
    bench topology.num_gpus=1 method=bench/matmul 'method.args.dtypes=[fp16,bf16]'   #  25
    bench topology.num_gpus=1 method=bench/mlp_loop                                  #  20
    bench topology.num_gpus=1 method=bench/mlp_loop precision=fp32                   #  20
    bench topology.num_gpus=1 "${transformer[@]}"                                    #  70
    bench topology.num_gpus=1 "${transformer[@]}" method.args.attention=eager method.args.dropout=0.1   # 90
    bench topology.num_gpus=1 method=bench/transformer                               #  70; 13b does not fit in fp32: an error row
    bench topology=single "${finetune[@]}"                                           # 400: 19 s a step; fp8 needs torchao
    ;;
  four)
    bench topology.num_gpus=4 method=bench/scaling precision.weights=bf16            # 150
    bench topology.num_gpus=4 method=bench/scaling precision.weights=bf16 'method.args.models=[13b]'    # 180
    bench topology.num_gpus=4 "${finetune[@]}"                                       # 350
    ;;
  *) echo "usage: bash tests/gpu/bench_training.sh one|four" >&2; exit 2 ;;
esac
exit "$failed"
