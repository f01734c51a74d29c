"""Simulate a recipe in milliseconds, for tests of trials. Its arguments decide how it ends.

python -m tests.helpers.tuned_recipe --config FILE
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import yaml

# Lines of HIPBLASLT_LOG_MASK=32 (hipBLASLt's page on offline tuning): one product twice, another,
# and a line that is not a product.
PRODUCT = "hipblaslt-bench --api_method c -m {m} -n 512 -k 1024 --transA N --a_type bf16_r "
PRODUCT += "--algo_method index --solution_index {index}\n"
HIPBLASLT_LOG = PRODUCT.format(m=1024, index=7) * 2 + PRODUCT.format(m=64, index=9) + "tuned\n"


def main() -> None:
    config = yaml.safe_load(Path(sys.argv[-1]).read_text())
    args, folder = config["trainer_args"], Path(config["run_dir"])
    print(
        "started",
        config["data"]["kind"],
        os.environ.get("MINE"),
        os.environ.get("RANK"),
        flush=True,
    )
    if log := os.environ.get("HIPBLASLT_LOG_FILE"):
        Path(log.replace("%i", str(os.getpid()))).write_text(HIPBLASLT_LOG)
    gain = 2 if os.environ.get("HIPBLASLT_TUNING_OVERRIDE_FILE") else 1
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(1, args["max_steps"] + 1):
            row = {
                "step": step,
                "time_s": 10.0 + 0.5 * step,
                "num_tokens": 100 * args["size"] * step * gain,
                "memory_peak_gb": float(step),
            }
            file.write(json.dumps(row) + "\n")
            file.flush()
            time.sleep(args["sleep_s"])
    if args["says"]:
        (folder / "result.json").write_text(json.dumps({"status": "failed", "error": args["says"]}))
    if args["ends_with"] < 0:
        os.kill(os.getpid(), -args["ends_with"])
    sys.exit(args["ends_with"])


if __name__ == "__main__":
    main()
