"""Compare our speed with that of programs a user could run instead: docs/results/speed.md.

    python tests/gpu/speed.py measure --out runs/speed --gpus 2         appends to speed.jsonl there
    python tests/gpu/speed.py measure --out runs/speed --only dpo fp8   measures some rows
    python tests/gpu/speed.py report [--write]                          the table; needs no GPU

Each side trains WARM_UP steps, then its row's `timed` steps, and is stopped. It logs every step.
With two GPUs, rows that need one GPU run in parallel. If a side fails or exceeds its row's
`seconds`, its result has the last lines of the output, and the other sides continue.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gpu import jobs
from tests.gpu.forced_lengths import install
from tests.gpu.jobs import MASK, ROOT, Job
from tests.gpu.speed_report import RESULTS, table, write
from tests.gpu.speed_rows import FRESH, ROWS, Row, chat_lengths

WARM_UP = 5
STEPS = WARM_UP + 15  # number of steps for which there are rows of chat-like lengths
LEAST_S = 45.0  # start no side if less time is left
# Our side plans a long run and is stopped early, because the planner does not compile short runs.
LONG = 1000
PROMPT = 200  # tokens per prompt
POLL_S = 0.05
LAST_LINES = 15
PACKAGES = ("torch", "transformers", "trl", "vllm", "unsloth")
MEASURED = RESULTS / "speed.jsonl"
PEERS = [sys.executable, str(ROOT / "tests/gpu/peers.py")]
# Several ranks of TRL shard fp32 weights, because DDP's do not fit 80 GB at 4B.
FSDP = (
    "--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP "
    "--fsdp_transformer_layer_cls_to_wrap Qwen3DecoderLayer --fsdp_reshard_after_forward true "
    "--fsdp_state_dict_type SHARDED_STATE_DICT --num_machines 1 --mixed_precision bf16"
).split()
# stop_timeout_s is short because nothing needs to be saved.
COMMON = [f"method.args.max_steps={LONG}", "runtime=local", "runtime.stop_timeout_s=1"]
KERNEL_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# Keys of metrics.jsonl. All except the last add up to a step.
SHARES = ("generation_s", "wait_s", "sync_s", "reward_s", "train_s", "server_s", "transfer_s")
Result = dict[str, Any]


@dataclass(frozen=True)
class Session:
    """Settings of one call that all sides share."""

    hardware: str
    gpu: str
    folder: Path  # for runs
    out: Path  # for results
    until: float  # monotonic seconds
    lock: threading.Lock
    sides: list[str] | None = None  # names of sides to run; None: all


def overrides(row: Row, side: str) -> list[str]:
    """Return the arguments of launch/run.py, without those that jobs.start adds."""
    words = [*COMMON, *row.sides[side].split()]
    if FRESH in words:
        words.remove(FRESH)
        words += [
            f"user_env.{name}={tempfile.mkdtemp(prefix='kernels-')}" for name in KERNEL_CACHES
        ]
    return words


def write_data(folder: Path) -> None:
    """Write rows of digits, each of which is one token. Chat-like rows suffice for one epoch."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs.write_data(folder)
    drawn = random.Random(0)
    rows = [{"text": jobs.digits(drawn, length - 1)} for length in chat_lengths(8 * STEPS)]
    (folder / "lengths.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [
        {"prompt": jobs.digits(drawn, PROMPT), "answer": jobs.digits(drawn, 4)} for _ in range(960)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))


def start(
    row: Row, name: str, side: str, session: Session, gpus: list[int]
) -> subprocess.Popen[bytes]:
    """Start one side, with its output in <name>.log of the session's folder."""
    rows, saved = session.folder / f"{row.data}.jsonl", saved_model(row, session)
    more = {}
    if row.forced:
        install(plugin := session.folder / "plugin")
        path = [str(plugin), str(ROOT), os.environ.get("PYTHONPATH", "")]
        more = {"PYTHONPATH": os.pathsep.join(path).strip(os.pathsep)}
    if side.startswith("ours"):
        of_model = ["data=jsonl", f"data.path={rows}", f"model.path={saved}"] if saved else []
        words = [*overrides(row, side), *of_model]
        job = Job(name, len(gpus), words, "own" if saved else row.data)
        return jobs.start(job, session.hardware, session.folder, gpus, more)
    trainers = gpus[: max(1, len(gpus) - 1)]  # the last of several GPUs generates
    argv = [*launcher(len(trainers)), *row.sides[side].split(), f"--data={rows}"]
    argv += [f"--steps={WARM_UP + row.timed}"]
    argv += [f"--metrics={session.folder / name}.jsonl"]
    argv += [f"--saved={saved}"] if saved else []
    argv += [f"--server-gpu={gpu}" for gpu in gpus[len(trainers) :]]
    environment = {**os.environ, **more, MASK: ",".join(map(str, trainers))}
    # unsloth needs an older TRL and datasets.
    if side.startswith("unsloth") and (site := environment.get("UNSLOTH_SITE")):
        environment["PYTHONPATH"] = f"{site}:{environment.get('PYTHONPATH', '')}"
    with (session.folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(argv, env=environment, stdout=log, stderr=subprocess.STDOUT)


def launcher(ranks: int) -> list[str]:
    """Return the words that start tests/gpu/peers.py with this number of ranks."""
    if ranks == 1:
        return PEERS
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", *FSDP]
    return [*accelerate, f"--num_processes={ranks}", *PEERS[1:]]


def metrics(name: str, side: str, folder: Path) -> list[dict[str, Any]]:
    """Return the complete lines that a side has written so far."""
    files = [folder / f"{name}.jsonl"]
    if side.startswith("ours"):
        files = sorted((folder / "runs" / name).glob("[0-9]*/metrics.jsonl"))
    if not files or not files[-1].is_file():
        return []
    return [json.loads(line) for line in files[-1].read_text().split("\n")[:-1]]


def measure_side(row_name: str, side: str, session: Session, gpus: list[int]) -> Result:
    """Run one side until its steps are timed, it ends, or its time is up, and return its result."""
    row, name = ROWS[row_name], f"{row_name}-{side}"
    shutil.rmtree(session.folder / "runs" / name, ignore_errors=True)
    (session.folder / f"{name}.jsonl").unlink(missing_ok=True)
    num_steps = 1 if row.first_step else WARM_UP + row.timed
    gpus = gpus[: num_gpus(row, side)]
    began = time.monotonic()
    deadline = min(began + row.seconds, session.until)
    process = start(row, name, side, session, gpus)
    first_step_s: float | None = None
    lines: list[dict[str, Any]] = []
    while len(lines) < num_steps and time.monotonic() < deadline:
        ended = process.poll() is not None  # checked before reading, so that no line is missed
        lines = metrics(name, side, session.folder)
        if lines and first_step_s is None:
            first_step_s = round(time.monotonic() - began, 2)
        if ended:
            break
        time.sleep(POLL_S)
    code = process.poll()
    stop(process)
    result: Result = {"row": row_name, "side": side, "gpu": session.gpu, "gpus": len(gpus)}
    result |= {"date": f"{date.today()}", "versions": versions(side)}
    result["first_step_s"] = first_step_s
    result["settings"] = settings(row, name, side, session.folder)
    if len(lines) >= num_steps:
        result |= {} if row.first_step else figures(lines[:num_steps], row.data == "prompts")
        if "micro_batch" in lines[-1]:  # a peer's may have been halved
            result["micro_batch"] = lines[-1]["micro_batch"]
    else:
        why = f"exit code {code}"
        if code is None:
            why = f"less than {num_steps} steps in {time.monotonic() - began:.0f} s"
        output = (session.folder / f"{name}.log").read_text(errors="replace").splitlines()
        result["error"] = "\n".join([f"{why}, {len(lines)} steps", *output[-LAST_LINES:]])
        shutil.copy(session.folder / f"{name}.log", session.out)
    for checkpoints in (session.folder / "runs" / name).glob("[0-9]*/checkpoints"):
        shutil.rmtree(checkpoints, ignore_errors=True)  # saving may have been interrupted
    return result


def versions(side: str) -> dict[str, str]:
    """Return the versions of a side's packages. unsloth's own folder comes first."""
    site = os.environ.get("UNSLOTH_SITE") if side.startswith("unsloth") else None
    found = distributions(path=[*filter(None, [site]), *sys.path])
    installed = {package.name: package.version for package in reversed([*found])}
    return {name: installed[name] for name in PACKAGES if name in installed}


def num_gpus(row: Row, side: str) -> int:
    """Return the GPUs of a side: those of its row, or of its name (ours_one, ours_fsdp_2)."""
    last = side.rpartition("_")[2]
    return 1 if last == "one" else int(last) if last.isdigit() else row.gpus


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a side and wait, so that the next side has all of the GPU's memory."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def figures(lines: list[dict[str, Any]], generates: bool = False) -> Result:
    """Return the speed of the steps after the warm-up, and other figures of a side.

    A step's time is that between two lines, so it includes all work of the run. Tokens do not count
    padding. If steps differ in size or generate, tokens_per_second is total tokens over total time;
    otherwise it uses the median time. Generating steps may alternate between long and short, so an
    even number of them counts.
    """
    timed = list(itertools.pairwise(lines[WARM_UP - 1 :]))
    if generates:
        timed = timed[len(timed) % 2 :]
    seconds = [after["time_s"] - before["time_s"] for before, after in timed]
    tokens = [after["num_tokens"] - before["num_tokens"] for before, after in timed]
    same = len(set(tokens)) == 1 and not generates
    median = statistics.median(seconds)
    shares = {
        key: [line[key] for line in lines[-len(timed) :] if line.get(key) is not None]
        for key in SHARES
    }
    return {
        # Means, because they add up to a step.
        **{key: round(statistics.mean(values), 3) for key, values in shares.items() if values},
        "tokens_per_second": round(tokens[0] / median if same else sum(tokens) / sum(seconds)),
        "step_s": round(median, 4),
        "timed_steps": len(seconds),
        "timed_tokens": int(sum(tokens)),
        "peak_gb": round(max(line["memory_peak_gb"] for line in lines), 2),
        "loss": round(lines[-1]["loss"], 4),
    }


def settings(row: Row, name: str, side: str, folder: Path) -> Result:
    """Return the words of a side's command, and the settings that our planner chose."""
    command: Result = {"command": row.sides[side]}
    plans = sorted((folder / "runs" / name).glob("[0-9]*/plan.json"))
    choices = json.loads(plans[-1].read_text()).get("chosen") if plans else None
    chosen = {choice["key"]: choice["value"] for choice in choices or ()}
    return {**command, "chosen": chosen} if chosen else command


def saved_model(row: Row, session: Session) -> Path | None:
    """Return the directory of a row's saved weights, and write it at the first call."""
    if row.saved is None:
        return None
    folder = session.folder / "models" / row.saved
    if not folder.exists():
        argv = [*PEERS, "save", f"--model={row.saved}", f"--saved={folder}"]
        subprocess.run([*argv, f"--data={session.folder / row.data}.jsonl"], check=True)
    return folder


def measure_row(name: str, session: Session, gpus: list[int]) -> None:
    for side in [side for side in session.sides or ROWS[name].sides if side in ROWS[name].sides]:
        if session.until - time.monotonic() < LEAST_S:
            print(f"{name} {side}: not run, no time left", flush=True)
            continue
        saved_model(ROWS[name], session)  # written before the side's time starts
        result = measure_side(name, side, session, gpus)
        with session.lock, (session.out / "speed.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")
        shown = ("error", "tokens_per_second", "step_s", "first_step_s", "peak_gb", "loss")
        print(
            f"{name} {side} GPU {gpus}:",
            {key: result[key] for key in shown if key in result},
            flush=True,
        )


def measure(names: list[str], session: Session, gpus: list[int]) -> None:
    """Measure rows of several GPUs one by one, then those of one GPU side by side."""
    free: queue.Queue[int] = queue.Queue()
    for gpu in gpus:
        free.put(gpu)

    def on_a_free_one(name: str) -> None:
        gpu = free.get()
        try:
            measure_row(name, session, [gpu])
        finally:
            free.put(gpu)

    for name in (name for name in names if ROWS[name].gpus > 1):
        if ROWS[name].gpus <= len(gpus):
            measure_row(name, session, gpus)
        else:
            print(f"{name}: not run, it takes {ROWS[name].gpus} GPUs", flush=True)
    with ThreadPoolExecutor(len(gpus)) as pool:
        for done in [pool.submit(on_a_free_one, name) for name in names if ROWS[name].gpus == 1]:
            done.result()


def gpu_name() -> str:
    """Return the GPU's name from a new process, so that this one does not occupy GPU memory."""
    code = "import torch; print(torch.cuda.get_device_name())"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def hardware_of(gpu: str) -> str:
    name = next((name for name in ("h100", "h200") if name in gpu.lower()), None)
    if name is None:
        raise SystemExit(f"{gpu} is not known. Use --hardware NAME with a name of conf/hardware.")
    return name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["measure", "report"])
    parser.add_argument("--out", type=Path, default=Path("runs/speed"), help="folder for results")
    parser.add_argument("--only", nargs="*", help="only rows whose name contains one of the words")
    parser.add_argument("--sides", nargs="*", help="sides to run, in this order; default: all")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=570, help="time limit of the call")
    parser.add_argument("--hardware", help="name in conf/hardware; default: from the GPU's name")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs/speed", help="folder for data and runs"
    )
    parser.add_argument(
        "--write", action="store_true", help="with report: update speed.md instead of printing"
    )
    options = parser.parse_args()
    if options.what == "report":
        shown = table([json.loads(line) for line in MEASURED.read_text().splitlines()])
        if options.write:
            write("speed", "speed", shown)
        else:
            print(shown)
        return
    until, gpu = time.monotonic() + options.seconds, gpu_name()
    names = [
        name for name in ROWS if not options.only or any(word in name for word in options.only)
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    write_data(options.folder)
    hardware = f"hardware={options.hardware or hardware_of(gpu)}"
    session = Session(
        hardware, gpu, options.folder.resolve(), options.out, until, threading.Lock(), options.sides
    )
    measure(names, session, jobs.gpus_here(options.gpus))


if __name__ == "__main__":
    main()
