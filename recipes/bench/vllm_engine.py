"""Measure vLLM's throughput, offline and served, and its latencies, by lengths and settings.

vLLM's own programs do the measurement (vllm bench throughput, serve and latency). This program
starts them, sums the rates of concurrent engines, and continues if an engine does not start. Each
GPU has its own engine; with tensor_parallel_size=2, each pair of GPUs has one. `instances: 2` in a
setting puts two engines on each GPU. Prompts are random and have exactly the requested length, and
so do answers. With `dataset`, they have the lengths of ShareGPT's conversations. With random
weights, vLLM's dummy weights are used, which are as fast as real ones.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from launch.core.errors import UserError
from recipes.bench import vllm_programs as vllm
from recipes.bench.benchmark import Row, SeriesConfig, Table, measure, require_gpu
from recipes.bench.consensus import free_port, gather_results
from recipes.bench.processes import MarkedProgram, wait
from recipes.bench.vllm_programs import argv_of, gpus_of
from recipes.models.model_build import END, PAD, model_config
from recipes.rank.device import compute_dtype
from recipes.rank.files import move_directory
from recipes.rank.names import name_field
from recipes.rank.program import Interrupted, is_main_rank, main, rank, say
from recipes.rank.ranks import all_ranks, join, num_ranks

KINDS = ("offline", "served", "latency")
SUMMED = ("output_tokens_per_second", "total_tokens_per_second")
WORST = ("ttft_p99_ms", "itl_p99_ms")
WEIGHT_BYTES = {"fp8": 1, "awq": 0.5, "fp32": 4}  # bytes per parameter; all others: 2
LOOPBACK = "127.0.0.1"
Engine = dict[str, Any]


@dataclass
class EngineConfig(SeriesConfig):
    """Arguments.

    `kinds`: `offline` sends `num_prompts` requests together, after `num_warmups` untimed ones (0:
    vLLM's default). `served` sends requests over HTTP, with at most `concurrency` in progress and
    `rounds` times as many in total. `latency` times one batch of each of `batch_sizes`.

    `lengths`: lists [tokens in, tokens out]. `dataset`: a JSON file of conversations in ShareGPT's
    format, which replaces the lengths of `offline` and `served`.

    `settings`: dicts of vLLM's arguments, which override `base`; {} uses vLLM's defaults.
    Upper-case keys are environment variables, in which {run_dir} is the run directory. `instances`
    is the number of engines per GPU, `label` the name of the row. `timeout_s`: limit for each start
    and for each measurement.
    """

    kinds: list[str] = name_field(lambda: KINDS, ["offline", "served"])
    lengths: list[list[int]] = field(default_factory=list)
    dataset: str | None = None
    base: dict[str, Any] = field(default_factory=dict, metadata=vllm.KEY_RULES)
    settings: list[dict[str, Any]] = field(default_factory=lambda: [{}], metadata=vllm.KEY_RULES)
    num_prompts: int = 1000
    num_warmups: int = 64
    concurrency: list[int] = field(default_factory=lambda: [64])
    rounds: int = 8
    batch_sizes: list[int] = field(default_factory=lambda: [1])
    warmup: int = 2
    repetitions: int = 5
    timeout_s: float = 1000.0

    def __post_init__(self) -> None:
        names = [vllm.name_of(setting) for setting in self.settings]
        if len({*names}) < len(names):
            raise UserError(
                f"method.args.settings: labels must differ, but they are {', '.join(names)}."
            )


COLUMNS = (
    "kind input output concurrency setting num_gpus engines output_tokens_per_second "
    "total_tokens_per_second ttft_ms ttft_p99_ms itl_ms itl_p99_ms latency_s share_of_peak "
    "share_of_bandwidth"
)


def engine(config: DictConfig) -> dict[str, Any]:
    args = EngineConfig(**config.trainer_args)
    program = vllm.program(config)
    require_gpu(args)
    join()
    table = Table("vllm", COLUMNS, figure="output_tokens_per_second")
    rows = cases(args, config, table.notes)
    engines = Engines(args, config, program)
    try:
        return measure(config, args, table, rows, engines.measure, skip=engines.skip)
    finally:
        engines.close()


def cases(args: EngineConfig, config: DictConfig, notes: list[str]) -> list[Row]:
    """Return the cases ordered by setting, so that each server starts only once.

    A setting whose engines do not fit the node's number of GPUs is skipped, with a note.
    """
    world, local = num_ranks(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    concurrencies = {
        "offline": [args.num_prompts],
        "served": args.concurrency,
        "latency": args.batch_sizes,
    }
    lengths: dict[str, list[list[Any]]] = dict.fromkeys(KINDS, args.lengths)
    if args.dataset:  # `latency` cannot read one
        lengths |= dict.fromkeys(("offline", "served"), [[vllm.SHAREGPT] * 2])
    rows = []
    for setting in args.settings:
        engine, name = {**args.base, **setting}, vllm.name_of(setting)
        needed = gpus_of(engine)
        if local % needed:
            notes.append(
                f"{name}: left out, because an engine uses {needed} GPUs, but the run has {local} "
                "per node."
            )
            continue
        shared = {
            "model": config.model.name,
            "setting": name,
            # Needed to match published rows.
            "quantization": engine.get("quantization", "none"),
            "tensor_parallel": int(engine.get("tensor_parallel_size", 1)),
            "num_gpus": world,
            "engines": world // needed * int(engine.get("instances") or 1),
        }
        rows += [
            {**shared, "kind": kind, "input": tokens_in, "output": tokens_out, "concurrency": n}
            for kind in args.kinds
            for tokens_in, tokens_out in lengths[kind]
            for n in concurrencies[kind]
        ]
    if any(row["engines"] > 1 for row in rows):
        notes.append(
            "With several engines, rates are summed, medians are averaged, and the worst p99 is "
            "shown. Servers are measured at the same time. Each offline engine starts as soon as "
            "it is loaded, and rates are summed as if all ran at the same time."
        )
    return rows


def model_source(config: DictConfig) -> tuple[str, Engine]:
    """Return the model that vLLM loads (a directory or a hub id), and vLLM's options for it.

    For random weights, write a directory with a configuration and a tokenizer. vLLM then fills in
    dummy weights.
    """
    model = config.model
    if model.path:
        return model.path, {}
    if model.init != "random":
        return model.hub_id, {"revision": model.revision}
    target = Path(config.run_dir) / "model_dummy"
    if is_main_rank() and not target.exists():
        staged = target.with_name(f".{target.name}.staging")
        shape = model_config(model)
        shape.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model.architecture]]
        shape.dtype = compute_dtype(config)
        shape.save_pretrained(staged)
        word_tokenizer(model.vocab_size).save_pretrained(staged)
        move_directory(staged, target)
    all_ranks(True)  # wait for the main rank
    return str(target), {"load_format": "dummy"}


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one word per id, so that prompts have the exact length."""
    words = [PAD, END, *(f"w{number}" for number in range(2, vocab_size))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)


class Engines:
    """This rank's engines. A rank has none if another rank's engine uses its GPU.

    The servers of a setting run until all of its served cases are measured.
    """

    def __init__(self, args: EngineConfig, config: DictConfig, program: list[str]) -> None:
        self.args, self.config, self.program = args, config, program
        self.source, options = model_source(config)
        self.options = {**options, "dtype": str(compute_dtype(config)).removeprefix("torch.")}
        self.profile = ["--profile"] if config.profile == "torch" else []
        if self.profile:
            self.options["profiler_config"] = vllm.profiler(config.run_dir)
        self.settings: dict[str, Engine] = {
            vllm.name_of(setting): {**args.base, **setting} for setting in args.settings
        }
        self.folder, self.logs = Path(config.run_dir) / "vllm", Path(config.run_dir) / "logs"
        self.servers: list[tuple[MarkedProgram, int]] = []
        self.serving: str | None = None
        self.server_errors: dict[str, str] = {}  # setting -> why its servers did not start
        self.number = 0
        for folder in (self.folder, self.logs):
            folder.mkdir(exist_ok=True)

    def measure(self, case: Row) -> Row:
        """Measure a case on all ranks, and return its figures.

        If one rank fails, raise UserError on every rank. Raise Interrupted after a signal.
        """
        self.number += 1
        self.setting = self.settings[case["setting"]]
        # If an engine uses the GPUs of several ranks, the first of these ranks starts it.
        first = int(os.environ.get("LOCAL_RANK", "0")) % gpus_of(self.setting) == 0
        count = int(self.setting.get("instances") or 1) if first else 0
        try:
            if case["kind"] != "served":
                self.close()
            elif self.serving != case["setting"]:
                self.serve(case["setting"], count)
            by_rank = gather_results(lambda: self.run(case, count))
        except (UserError, Interrupted):
            self.close()
            raise
        figures = combine_engines([*itertools.chain(*by_rank)])
        return {**figures, **shares(figures, case, self.setting, self.config)}

    def serve(self, name: str, count: int) -> None:
        """Start a setting's servers. If one does not start, raise UserError on every rank."""
        self.close()
        self.serving = name

        def start() -> None:
            for instance in range(count):
                port = free_port()
                server = {"host": LOOPBACK, "port": port, "disable_uvicorn_access_log": True}
                options = argv_of({**server, "seed": self.args.seed, **self.engine})
                process = self.start(["serve", self.source, *options], f"server{instance}")
                self.servers.append((process, port))
            processes = [process for process, _ in self.servers]
            self.wait(processes, lambda: all(vllm.is_healthy(port) for _, port in self.servers))

        try:
            gather_results(start)
        except UserError as error:
            self.server_errors[name] = str(error)
            raise

    def skip(self, case: Row, rows: list[Row]) -> str | None:
        """Return the error of the case's servers if they have failed to start, otherwise None."""
        return self.server_errors.get(case["setting"]) if case["kind"] == "served" else None

    def run(self, case: Row, count: int) -> list[Row]:
        """Run vLLM's programs in parallel, one per engine, and return each program's metrics."""
        programs: dict[Path, MarkedProgram] = {}
        for instance in range(count):
            file = self.folder / f"{self.number}-rank{rank()}-{instance}.json"
            file.unlink(missing_ok=True)  # left by an interrupted run
            options = argv_of({"model": self.source, "seed": self.args.seed})
            argv = ["bench", *self.benchmark(case, instance, file), *options, *self.profile]
            programs[file] = self.start(argv, f"{case['kind']}{instance}")
        watched = [*programs.values(), *(process for process, _ in self.servers)]
        self.wait(watched, lambda: all(process.ended() for process in programs.values()))
        for process in programs.values():
            process.end()  # also ends child processes, which would occupy GPU memory
        return [vllm.figures(case, file, program.log) for file, program in programs.items()]

    def benchmark(self, case: Row, instance: int, file: Path) -> list[str]:
        """Return the name of the case's benchmark program, followed by its options."""
        args, number = self.args, case["concurrency"]
        # vLLM 0.31's throughput would replace --input-len by the data set's default of 1024.
        prompts = (
            f"--dataset-name random --random-input-len {case['input']} "
            f"--random-output-len {case['output']} --random-range-ratio 0"
        ).split()
        if case["input"] == vllm.SHAREGPT:
            prompts = ["--dataset-name", "sharegpt", "--dataset-path", str(args.dataset)]
        if case["kind"] == "served":
            words = (
                f"serve --host {LOOPBACK} --port {self.servers[instance][1]} "
                f"--ignore-eos --disable-tqdm --max-concurrency {number} "
                f"--num-prompts {number * args.rounds} --num-warmups {number} "
                "--percentile-metrics ttft,itl --metric-percentiles 99 --save-result"
            )
            result = {"result_dir": file.parent, "result_filename": file.name}
            return [*words.split(), *prompts, *argv_of(result)]
        if case["kind"] == "latency":
            prompts = []
            words = (
                f"latency --batch-size {number} --num-iters-warmup {args.warmup} "
                f"--num-iters {args.repetitions} --input-len {case['input']} "
                f"--output-len {case['output']}"
            )
        else:
            words = f"throughput --num-prompts {number}"
            words += f" --num-warmups {args.num_warmups}" if args.num_warmups else ""
        return [*words.split(), *prompts, *argv_of({"output_json": file, **self.engine})]

    @property
    def engine(self) -> Engine:
        return {**self.options, **self.setting}

    def start(self, argv: list[str], name: str) -> MarkedProgram:
        argv = [*self.program, *argv]
        first = int(os.environ.get("LOCAL_RANK", "0"))
        setting_env = {
            name: value.replace("{run_dir}", self.config.run_dir)
            for name, value in vllm.env_of(self.setting).items()
        }
        env = vllm.environment(setting_env, first, gpus_of(self.setting))
        say(f"{name}: {' '.join(argv)}")
        return MarkedProgram(argv, env, self.logs / f"vllm{self.number}-rank{rank()}-{name}.log")

    def wait(self, processes: Sequence[MarkedProgram], done: Callable[[], bool]) -> None:
        wait(processes, done, Path(self.config.run_dir) / "heartbeat", self.args.timeout_s)

    def close(self) -> None:
        for process, _ in self.servers:
            process.end()
        self.servers, self.serving = [], None


def shares(figures: Row, case: Row, setting: Engine, config: DictConfig) -> Row:
    """Return the shares of the GPUs' peak TFLOPS and bandwidth that the engines reach.

    `share_of_peak` counts two operations per parameter and token, without attention.
    `share_of_bandwidth` counts one read of the weights per token of a request, without the KV
    cache.
    """
    quantization, compute = str(setting.get("quantization") or ""), config.precision.compute
    kind = next((name for name in WEIGHT_BYTES if quantization.startswith(name)), compute)
    hardware, parameters, gpus = config.hardware, config.model.num_parameters, case["num_gpus"]
    peak = hardware.peak_tflops.get("fp8" if kind == "fp8" else compute)
    row = {}
    if peak:
        tflops = 2 * parameters * figures["total_tokens_per_second"] / 1e12
        row["share_of_peak"] = tflops / (peak * gpus)
    if figures.get("itl_ms") and hardware.peak_tflops:
        read = parameters * WEIGHT_BYTES.get(kind, 2) * case["engines"] / gpus
        row["share_of_bandwidth"] = read / (figures["itl_ms"] / 1e3) / 1e9 / hardware.bandwidth_gb_s
    return row


def combine_engines(figures: Sequence[Row]) -> Row:
    """Return the metrics of concurrent engines: the sum of rates, the worst p99, other means."""
    row = {}
    for key in figures[0]:
        values = [float(engine[key]) for engine in figures]
        combine = sum if key in SUMMED else max if key in WORST else statistics.fmean
        row[key] = combine(values)
    return row


if __name__ == "__main__":
    main(engine)
