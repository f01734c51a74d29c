"""vLLM's engine: offline and served throughput, time to the first token, time between tokens, over lengths and engine settings.

Started by the launcher:

    1 GPU:    python launch/run.py hardware=mi350x method=bench/vllm topology=single model=qwen3_8b
    8 GPUs:   python launch/run.py hardware=mi350x method=bench/vllm model=qwen3_8b
    No hub:   python launch/run.py hardware=mi350x method=bench/vllm model=qwen3_8b model.init=random

vLLM's own programs measure (vllm bench throughput, serve and latency); this one starts them, sums what several engines do at once, and goes
on where an engine does not start. On several GPUs every GPU has an engine of its own, or every two under tensor_parallel_size=2, and so on;
`instances: 2` of a setting puts two on each GPU. Random prompts of exact lengths, and every answer as long as was asked for. Random weights
are vLLM's dummy ones: they cost the same time.
"""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from recipes.bench import vllm_arguments as arguments
from recipes.bench import vllm_processes as vllm
from recipes.bench.series import Column, Row, SeriesConfig, Table, measure
from recipes.bench.training import check_tuples
from recipes.bench.vllm_arguments import gpus_of
from recipes.common.device import compute_dtype
from recipes.common.errors import UserError
from recipes.common.files import move_directory
from recipes.common.model import END, PAD, model_config
from recipes.common.names import named
from recipes.common.program import Interrupted, is_main_rank, main, rank, say

KINDS = ("offline", "served", "latency")
SUMMED = ("output_tokens_per_second", "total_tokens_per_second")
WORST = ("ttft_p99_ms", "itl_p99_ms")
WEIGHT_BYTES = {"fp8": 1, "awq": 0.5, "fp32": 4}  # others: 2
LATENCY_VOCABULARY = 10000  # vllm bench latency draws token ids below it
Engine = dict[str, Any]


@dataclass
class EngineConfig(SeriesConfig):
    """`kinds`: offline (all requests at once), served (over HTTP, at most `concurrency` requests at once) and latency (one batch of
    `batch_sizes`). `lengths`: lists of tokens in, tokens out. `settings`: arguments of vLLM over `base`, {} for vLLM's own; upper-case keys
    are environment variables, `instances` puts several engines on a GPU, `label` names the row. `num_prompts`: requests of an engine
    offline, after `num_warmups` that are not timed (0: vLLM is not asked for any); served it is `rounds` times the concurrency.
    `timeout_s`: of one start and of one measurement. Raises UserError."""

    kinds: list[str] = named(lambda: KINDS, ["offline", "served"])
    lengths: list[list[int]] = field(default_factory=list)
    base: dict[str, Any] = field(default_factory=dict, metadata={"refused": arguments.REFUSED})
    settings: list[dict[str, Any]] = field(default_factory=lambda: [{}], metadata={"refused": arguments.REFUSED})
    num_prompts: int = 1000
    num_warmups: int = 64
    concurrency: list[int] = field(default_factory=lambda: [64])
    rounds: int = 8
    batch_sizes: list[int] = field(default_factory=lambda: [1])
    warmup: int = 2
    repetitions: int = 5
    timeout_s: float = 1000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_filled("kinds", "lengths", "settings", "concurrency", "batch_sizes")
        check_tuples("lengths", self.lengths, "tokens in", "tokens out")
        if self.timeout_s < 1:
            raise UserError(f"method.args.timeout_s={self.timeout_s}: at least 1.")
        arguments.check(self.base, "method.args.base")
        for setting in self.settings:
            arguments.check({**self.base, **setting}, "method.args.settings")
        names = [arguments.name_of(setting) for setting in self.settings]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise UserError(f"method.args.settings: two are named {twice!r}; give one of them another label.")


def engine(config: DictConfig) -> dict[str, Any]:
    args = EngineConfig(**config.trainer_args)
    program = vllm.program(config)
    if not args.use_cpu and not torch.cuda.is_available():
        raise UserError("torch sees no GPU here. Use: smoke=true, which runs the benchmark's code on a CPU.")
    if "latency" in args.kinds and config.model.vocab_size < LATENCY_VOCABULARY:
        raise UserError(
            f"method.args.kinds=latency with model={config.model.name}: vllm bench latency draws token ids up to {LATENCY_VOCABULARY}, "
            f"and its vocabulary has {config.model.vocab_size}. Use: kinds=[offline,served]."
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # A rank whose engine has failed waits for one that still measures.
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3 * args.timeout_s + 600))
    source, options = model_source(config)
    table = Table(
        "vllm",
        figure="output_tokens_per_second",
        columns=[
            Column("kind", "kind"),
            Column("input", "in"),
            Column("output", "out"),
            Column("concurrency", "at once"),
            Column("setting", "setting"),
            Column("num_gpus", "GPUs"),
            Column("engines", "engines"),
            Column("output_tokens_per_second", "out tok/s", 1),
            Column("total_tokens_per_second", "tok/s", 1),
            Column("ttft_ms", "TTFT ms", 1),
            Column("ttft_p99_ms", "p99", 1),
            Column("itl_ms", "ITL ms", 2),
            Column("itl_p99_ms", "p99", 2),
            Column("latency_s", "batch s", 2),
            Column("share_of_peak", "of peak", 2),
            Column("share_of_bandwidth", "of GB/s", 2),
        ],
    )
    series = cases(args, config, table.notes)
    engines = Engines(args, config, [*program], source, options)
    try:
        return measure(config, args, table, series, engines.measure)
    finally:
        engines.close()


def cases(args: EngineConfig, config: DictConfig, notes: list[str]) -> list[Row]:
    """Setting by setting, since a server is started for each. One that needs GPUs which the run has not is left out, with a note."""
    world, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    at_once = {"offline": [args.num_prompts], "served": args.concurrency, "latency": args.batch_sizes}
    found = []
    for setting in args.settings:
        engine, name = {**args.base, **setting}, arguments.name_of(setting)
        needed, quantization = gpus_of(engine), engine.get("quantization", "none")
        if local % needed:
            notes.append(f"Left out: {name}: an engine of {needed} GPUs, and this run has {local} on a node.")
            continue
        engines = world // needed * int(engine.get("instances", 1))
        for kind, (tokens_in, tokens_out) in itertools.product(args.kinds, args.lengths):
            for number in at_once[kind]:
                row = {"kind": kind, "input": tokens_in, "output": tokens_out, "concurrency": number, "setting": name}
                # By these two, which `setting` says in words, a published row is found.
                row |= {"quantization": quantization, "tensor_parallel": int(engine.get("tensor_parallel_size", 1))}
                found.append({"model": config.model.name, **row, "num_gpus": world, "engines": engines})
    if not found:
        raise UserError(f"method.args.settings: none fits {local} GPU(s). {' '.join(notes)}")
    if any(row["engines"] > 1 for row in found):
        notes.append(
            "Several engines: rates are summed, medians averaged, of p99 the worst is shown. Served, all begin together; offline each "
            "begins when it has loaded, and what does not overlap counts as if it did."
        )
    return found


def model_source(config: DictConfig) -> tuple[str, list[str]]:
    """What vLLM loads: a directory or the hub's; for random weights a configuration and a tokenizer, written once, and dummy weights."""
    model = config.model
    if model.path:
        return model.path, []
    if model.init != "random":
        return model.hub_id, ["--revision", model.revision]
    target = Path(config.run_dir) / "model_dummy"
    if is_main_rank() and not target.exists():
        staged = target.with_name(f".{target.name}.staging")
        shape = model_config(model)
        shape.architectures, shape.dtype = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model.architecture]], compute_dtype(config)
        shape.save_pretrained(staged)
        whole_tokenizer(model.vocab_size).save_pretrained(staged)
        move_directory(staged, target)
    if dist.is_initialized():
        dist.barrier()
    return str(target), ["--load-format", "dummy"]


def whole_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A word for every id of the model, so that a random prompt has exactly the length asked for and every answer can be spelt."""
    words = [PAD, END, *(f"w{number}" for number in range(2, vocab_size))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)


class Engines:
    """The engines of this rank, none where another rank's has its GPU. A setting's servers stay up for all cases that are served."""

    def __init__(self, args: EngineConfig, config: DictConfig, program: list[str], source: str, options: list[str]) -> None:
        self.args, self.config, self.program = args, config, program
        self.source, self.options = source, [*options, "--dtype", str(compute_dtype(config)).removeprefix("torch.")]
        self.settings: dict[str, Engine] = {arguments.name_of(setting): {**args.base, **setting} for setting in args.settings}
        self.folder = Path(config.run_dir) / "vllm"
        self.logs = Path(config.run_dir) / "logs"
        self.heartbeat = Path(config.run_dir) / "heartbeat"
        self.servers: list[tuple[vllm.Process, int]] = []
        self.serving: str | None = None
        self.no_server: dict[str, str] = {}  # setting -> why its servers do not start
        self.number = 0
        for folder in (self.folder, self.logs):
            folder.mkdir(exist_ok=True)

    def measure(self, case: Row) -> Row:
        """Raises UserError on every rank where one of them has no figures, and Interrupted when a signal asked to stop."""
        self.number += 1
        self.setting = self.settings[case["setting"]]
        mine = self.instances()
        if case["kind"] == "served":
            self.share(lambda: self.serve(case["setting"], mine))
            found = self.share(lambda: self.ask(case, mine))
        else:
            self.close()
            found = self.share(lambda: self.run(case, mine))
        figures = combined([figures for of_rank in found for figures in of_rank])
        return {**figures, **shares(figures, case, self.setting, self.config)}

    def instances(self) -> int:
        """Engines that this rank starts: it is the first of the ranks whose GPUs an engine takes, or it waits."""
        first = int(os.environ.get("LOCAL_RANK", "0")) % gpus_of(self.setting) == 0
        return int(self.setting.get("instances", 1)) if first else 0

    def share(self, work: Any) -> list[list[Row]]:
        """What every rank's part of the work gives. Raises the same on all of them."""
        outcome: dict[str, Any] = {}
        try:
            outcome["found"] = work()
        except UserError as refused:
            outcome["error"] = str(refused)
        except vllm.Stopped:
            outcome["stopped"] = True
        outcomes = [outcome]
        if dist.is_initialized():
            outcomes = [{}] * dist.get_world_size()
            dist.all_gather_object(outcomes, outcome)
        if any("stopped" in other for other in outcomes):
            self.close()
            raise Interrupted
        error = next((other["error"] for other in outcomes if "error" in other), None)
        if error is not None:
            self.close()
            raise UserError(error)
        return [other["found"] for other in outcomes]

    def serve(self, name: str, mine: int) -> None:
        """Servers of this setting, up and well. Raises UserError where they do not come up; they are not tried twice."""
        if self.serving == name:
            return
        self.close()
        if name in self.no_server:
            raise UserError(f"not measured: {self.no_server[name]}")
        self.serving = name
        quiet = ["--host", "127.0.0.1", "--disable-uvicorn-access-log", "--seed", str(self.args.seed)]
        for instance in range(mine):
            port = vllm.free_port()
            argv = [*self.program, "serve", self.source, *quiet, "--port", str(port), *self.engine_options()]
            self.servers.append((self.start(argv, f"server{instance}"), port))
        try:
            ready = lambda: all(vllm.answers(port) for _, port in self.servers)  # noqa: E731
            vllm.wait([process for process, _ in self.servers], ready, self.args.timeout_s, self.heartbeat)
        except UserError as refused:
            self.no_server[name] = str(refused)
            raise

    def ask(self, case: Row, mine: int) -> list[Row]:
        """Clients of the servers, all at once."""
        number, clients, files = case["concurrency"], [], []
        for instance, (_, port) in enumerate(self.servers[:mine]):
            files.append(self.result(instance))
            argv = [*self.program, "bench", "serve", "--model", self.source, "--host", "127.0.0.1", "--port", str(port)]
            argv += [*random_prompts(case), "--ignore-eos", "--disable-tqdm", "--seed", str(self.args.seed)]
            argv += ["--max-concurrency", str(number), "--num-prompts", str(number * self.args.rounds), "--num-warmups", str(number)]
            argv += ["--percentile-metrics", "ttft,itl", "--metric-percentiles", "99", "--save-result"]
            argv += ["--result-dir", str(self.folder), "--result-filename", files[-1].name]
            clients.append(self.start(argv, f"client{instance}"))
        watched = [*clients, *(process for process, _ in self.servers)]
        self.finish(clients, watched)
        return [vllm.served_figures(vllm.read(file), (case["input"], case["output"])) for file in files]

    def run(self, case: Row, mine: int) -> list[Row]:
        """Programs that hold an engine of their own."""
        programs, files, lengths = [], [], (case["input"], case["output"])
        for instance in range(mine):
            files.append(self.result(instance))
            if case["kind"] == "offline":
                argv = ["throughput", "--num-prompts", str(case["concurrency"]), *random_prompts(case)]
                argv += ["--num-warmups", str(self.args.num_warmups)] if self.args.num_warmups else []
            else:
                argv = ["latency", "--batch-size", str(case["concurrency"]), "--num-iters-warmup", str(self.args.warmup)]
                argv += ["--num-iters", str(self.args.repetitions), "--input-len", str(lengths[0]), "--output-len", str(lengths[1])]
            argv = [*self.program, "bench", *argv, "--model", self.source, "--seed", str(self.args.seed)]
            argv += ["--output-json", str(files[-1]), *self.engine_options()]
            programs.append(self.start(argv, f"{case['kind']}{instance}"))
        self.finish(programs, programs)
        if case["kind"] == "offline":
            return [vllm.offline_figures(vllm.read(file), lengths) for file in files]
        return [vllm.latency_figures(vllm.read(file), case["concurrency"], lengths) for file in files]

    def finish(self, programs: Sequence[vllm.Process], watched: Sequence[vllm.Process]) -> None:
        ended = lambda: all(process.ended() for process in programs)  # noqa: E731
        vllm.wait(watched, ended, self.args.timeout_s, self.heartbeat)
        for process in programs:
            process.end()  # what an engine has started and left would keep its memory

    def engine_options(self) -> list[str]:
        own = arguments.argv_of(self.setting)
        return [*self.options, *own]

    def start(self, argv: list[str], what: str) -> vllm.Process:
        first = int(os.environ.get("LOCAL_RANK", "0"))
        env = vllm.environment(arguments.env_of(self.setting), first, gpus_of(self.setting))
        say(f"{what}: {' '.join(argv)}")
        return vllm.Process(argv, env, self.logs / f"vllm{self.number}-rank{rank()}-{what}.log")

    def result(self, instance: int) -> Path:
        """Where a program leaves its figures; those of an interrupted run are none of this one's."""
        path = self.folder / f"{self.number}-rank{rank()}-{instance}.json"
        path.unlink(missing_ok=True)
        return path

    def close(self) -> None:
        for process, _ in self.servers:
            process.end()
        self.servers, self.serving = [], None


def random_prompts(case: Row) -> list[str]:
    """Not --input-len: vLLM 0.31's throughput takes the data set's own 1024 in its place."""
    lengths = ["--random-input-len", str(case["input"]), "--random-output-len", str(case["output"])]
    return ["--dataset-name", "random", *lengths, "--random-range-ratio", "0"]


def shares(figures: Row, case: Row, setting: Engine, config: DictConfig) -> Row:
    """Of the GPUs' limits: `share_of_peak`, two operations for each parameter and token (attention left out); `share_of_bandwidth`, the
    weights read once for each step, which takes the time between two tokens (the cache left out)."""
    quantization, compute = str(setting.get("quantization") or ""), config.precision.compute
    kind = next((name for name in WEIGHT_BYTES if quantization.startswith(name)), compute)
    peak = config.hardware.peak_tflops.get("fp8" if kind == "fp8" else compute)
    parameters, found = config.model.num_parameters, {}
    if peak:
        found["share_of_peak"] = 2 * parameters * figures["total_tokens_per_second"] / 1e12 / (peak * case["num_gpus"])
    if figures.get("itl_ms") and config.hardware.peak_tflops:
        read = parameters * WEIGHT_BYTES.get(kind, 2) * case["engines"] / case["num_gpus"]
        found["share_of_bandwidth"] = read / (figures["itl_ms"] / 1e3) / 1e9 / config.hardware.bandwidth_gb_s
    return found


def combined(figures: Sequence[Row]) -> Row:
    """Of engines that ran at once: rates summed, the worst of p99, the mean of all else."""
    found = {}
    for key in figures[0]:
        values = [float(one[key]) for one in figures]
        found[key] = sum(values) if key in SUMMED else max(values) if key in WORST else sum(values) / len(values)
    return found


if __name__ == "__main__":
    main(engine)
