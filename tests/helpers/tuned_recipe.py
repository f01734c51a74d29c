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
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(1, args["max_steps"] + 1):
            row = {
                "step": step,
                "time_s": 10.0 + 0.5 * step,
                "num_tokens": 100 * args["size"] * step,
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
