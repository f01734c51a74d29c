"""Run phases in order, each in a subdirectory of the pipeline's directory.

A later phase can start from the model of an earlier one. A stopped pipeline resumes at its
unfinished phase. A changed pipeline reuses the phases before the change
(launch/study/phase_reuse.py). method=raft is a pipeline too.

If an optional phase cannot run here or fails, the others run nevertheless.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launch.config.compose import compose
from launch.config.identity import composition, composition_hash, identity, identity_of
from launch.config.request import Request
from launch.core import json_files
from launch.core.errors import EXIT_DONE, EXIT_HOST, EXIT_INTERRUPTED, HostError, UserError
from launch.execution import record
from launch.execution.execute import STATUS, check_host, execute, signals
from launch.inputs.paths import real_folder
from launch.machine import detect, placement
from launch.plan import plan_page, rundir, sealed, show
from launch.plan.check_files import check_files
from launch.plan.planning import make_plan, prepare, with_choices
from launch.plan.predictions import phase_name
from launch.plan.views import pipeline_json, reused_phases, shared_warnings
from launch.rules.phases import check_phases
from launch.rules.values import check_value
from launch.schema import Config, Data, Phase
from launch.schema.checked import NAME
from launch.schema.data import Curriculum
from launch.schema.enums import Find, Format, Init, Mode
from launch.schema.plan import Plan
from launch.search import fit
from launch.study import cycles, lineage, phase_curves, phase_reuse
from launch.study.cycles import CyclePhase

AtEnd = Callable[[Config, Path], None]


def run(config: Config, request: Request, at_end: AtEnd = lambda config, run_dir: None) -> int:
    """Plan every phase, then run them in order; return the exit code.

    `at_end` is called with the run directory unless the pipeline was interrupted.
    """
    run_dir, resumed = rundir.choose(config, starts=config.mode == Mode.run)
    pipeline = Pipeline(config, request, detect.host(sys.executable), run_dir)
    left = rundir.skipped_run_notes(config, run_dir)
    plans = pipeline.plans()
    if resumed and (changed := changed_phases(run_dir, plans)):
        changes = "; ".join(changed)
        if config.resume != "auto":
            raise UserError(
                f"resume={config.resume}: phases have changed since that run began: {changes}. "
                "Use resume=auto for a new run that reuses the phases before the change, or "
                "resume=never for a new run of all phases."
            )
        show.say(config, f"Not resuming {run_dir}: phases have changed since it began: {changes}.")
        run_dir, resumed = run_dir.parent / rundir.fresh_name(run_dir.parent), False
        pipeline.run_dir = run_dir
        plans = pipeline.plans()
    if config.resume == "auto" and not resumed:
        reuse = phase_reuse.find(config, run_dir.parent, plans, pipeline.plans)
        if reuse:
            show.say(config, phase_reuse.summary(reuse))
            plans = pipeline.plans(reuse.folders) if reuse.folders else plans
    if config.mode == Mode.plan:
        left = [*left, *pipeline.not_run_notes()]
        here = plans.keys() - reused_phases(run_dir, plans).keys()
        to_run = [plan for name, plan in plans.items() if name in here and not plan.is_left_out]
        left += shortage_notes(to_run)
        shown = pipeline_json(run_dir.parent.name, run_dir, plans)
        show.show(
            config,
            lambda: {**shown, "warnings": [*left, *shown["warnings"]]},
            lambda: plan_page.pipeline_page(run_dir, to_run, pipeline.host, config.verbose),
        )
        show.print_warnings(config, [*left, *shared_warnings(plans)])
        largest = max((p.config for p in to_run), key=placement.num_gpus, default=config)
        show.say_next_run(largest, pipeline.host, request)
        return EXIT_DONE
    images = {}
    for name, plan in plans.items():  # check all before the first phase starts
        if not plan.is_left_out and not _is_done(plan.run_dir):
            with pipeline.phase_errors(name):
                images[name] = check_host(plan, pipeline.host)
    pipeline.check_any_runs(plans)
    show.print_warnings(config, [*left, *pipeline.not_run_notes(), *shared_warnings(plans)])
    rundir.make(run_dir)
    with rundir.locked(run_dir), signals() as stopping:
        phase_reuse.link(run_dir, plans)
        if resumed:
            show.say(config, f"Resuming {run_dir}; resume=never starts a new run.")
        return pipeline.run(plans, images, stopping, at_end)


def changed_phases(run_dir: Path, plans: dict[str, Plan]) -> list[str]:
    """Return the differences between started phases of `run_dir` and `plans`.

    Comparing the pipeline's composition is not enough, because files of conf/ may have changed.
    """
    then = (json_files.read_json(run_dir / "record.json") or {}).get("phases") or {}
    now = {name: plan.run_dir.name for name, plan in plans.items()}
    # Early stopping may have skipped more cycles since the record was written.
    if not _folders(plans).items() <= then.items() <= now.items():
        return rundir.differences(then, now, "phases")
    changes, reused_dirs = [], reused_phases(run_dir, plans)
    for name, plan in plans.items():
        problem_of = phase_reuse.problem if name in reused_dirs else rundir.record_problem
        if why := problem_of(plan.run_dir):
            changes.append(f"{name}: {why}")
        elif record_before := json_files.read_json(plan.run_dir / "record.json"):
            old, new = identity(record_before["composition"]), identity_of(plan.config)
            changes += rundir.differences(old, new, name)
    return changes


def make_plans(
    config: Config, request: Request, host: detect.Host, run_dir: Path
) -> dict[str, Plan]:
    """Return the plan of every phase by name, in order. Raises UserError, HostError."""
    return Pipeline(config, request, host, run_dir).plans()


def shortage_notes(plans: list[Plan]) -> list[str]:
    """Return a warning for each phase that needs more memory than its GPUs have."""
    return [
        f"phase {phase_name(plan)}: {shortage} Plan this phase as a run for changes that "
        "make it fit; preflight=warn starts it anyway."
        for plan in plans
        if (shortage := fit.shortage(plan))
    ]


def _is_done(folder: Path) -> bool:
    return (json_files.read_json(folder / "record.json") or {}).get("status") == "done"


def _folders(plans: dict[str, Plan]) -> dict[str, str]:
    """Return the directory names of the phases that run."""
    return {name: plan.run_dir.name for name, plan in plans.items() if not plan.is_left_out}


def reject_single_run_keys(config: Config, why: str, **others: bool) -> None:
    """Raise UserError if a key is set that applies to a single run.

    `others` maps more such settings to whether they are set. `why` follows the key in the message.
    """
    keys = {
        "data.preview": bool(config.data.preview),
        "find": config.find != Find.none,
        f"method={config.method.name}": config.method.waits_for_user,
        "runtime=kubernetes": config.runtime.name == "kubernetes",
        **others,
    }
    for key, is_set in keys.items():
        if is_set:
            raise UserError(f"{key} applies to a single run, but {why}")


def input_data(run_dir: Path, plans: list[Plan]) -> dict[str, Any]:
    """Return hashes of all phases' data, rewards and adapters, except outputs of other phases.

    A pipeline resumes only with unchanged data.
    """
    paths = {p for plan in plans for p in record.data_paths(plan)}
    paths |= {p for plan in plans for p in record.adapter_files(plan.config)}
    outputs = {run_dir, *(plan.run_dir for plan in plans)}
    return record.contents(p for p in sorted(paths) if outputs.isdisjoint(Path(p).parents))


class Pipeline:
    """The phases of a composition in `run_dir`."""

    def __init__(self, config: Config, request: Request, host: detect.Host, run_dir: Path) -> None:
        self.config, self.request, self.host, self.run_dir = config, request, host, run_dir
        self.typed = request.without("experiment")  # the command line without experiment=
        self.experiment = [o for o in request if o not in self.typed]
        self.composed: dict[tuple[str, ...], Config] = {}  # a cache, because cycles repeat phases
        self.data: dict[str, Any] = {}  # hashes of the input files when the pipeline began
        self.results: dict[str, Any] = {}  # of the finished phases, for format=json
        self.optional = {phase.name for phase in config.phases if phase.optional}
        self.not_run: dict[str, str] = {}  # optional phases that cannot run here, and the reason
        check_value("name", config.name, NAME)  # later checks see only the names of phases
        check_phases(config.phases)

    def compose(self, phase: Phase) -> Config:
        """Return a copy of the phase's composition. Raises UserError.

        The command line overrides the phase, which overrides the experiment.
        """
        typed, groups = self.typed, []
        if isinstance(phase, CyclePhase):  # cycles.apply adds RAFT's arguments for the phase
            typed, groups = Request(cycles.without_method(self.typed)), phase.groups
        overrides = (*self.experiment, *phase.overrides, *typed, *groups)
        if overrides not in self.composed:
            alone = ("phases=[]", "hardware_report=false")
            config = compose([*overrides, *alone], typed=typed)
            why, on_slurm = "a pipeline has several.", config.runtime.name == "slurm"
            why += " Remove it, or start each phase as a run."
            in_job = on_slurm or config.runtime.name == "kubernetes"
            why += " Inside a job or a pod, use runtime=local." * in_job
            reject_single_run_keys(config, why, **{"runtime=slurm": on_slurm})
            self.composed[overrides] = config
        return copy.deepcopy(self.composed[overrides])

    @contextlib.contextmanager
    def phase_errors(self, phase: str, may_skip: bool = True) -> Iterator[None]:
        """Prefix errors with the phase's name; only note those of an optional phase."""
        try:
            yield
        except (UserError, HostError) as error:
            if may_skip and phase in self.optional:
                self.not_run[phase] = str(error)
            elif not phase:  # method=raft without phases
                raise
            else:
                raise type(error)(f"phase {phase}: {error}") from error

    def not_run_notes(self) -> list[str]:
        return [
            f"phase {phase} is not run: {why} The other phases run without it."
            for phase, why in self.not_run.items()
        ]

    def check_any_runs(self, plans: dict[str, Plan]) -> None:
        if plans.keys() <= self.not_run.keys():
            raise HostError("\n".join(self.not_run_notes()))

    def plans(self, reused_dirs: Mapping[str, Path] | None = None) -> dict[str, Plan]:
        """Return the plan of every phase by name, in order. Raises UserError, HostError.

        An optional phase that cannot run has no plan. `reused_dirs` maps more phases to directories
        of an earlier run than `run_dir` links to.
        """

        def compose_phase(phase: Phase) -> Config:
            """Return a phase's composition. For a RAFT, apply smoke=true and the rules."""
            with self.phase_errors(phase.name, may_skip=False):
                composed = self.compose(phase) if self.config.phases else self.config
                if not composed.method.has_cycles:
                    return composed
                return prepare(dataclasses.replace(composed, effective_batch=None))[0]

        phases = self.config.phases or [Phase(name="")]
        folders = {
            phase.name: real_folder(self.run_dir / f"{number}_{phase.name}")
            for number, phase in enumerate(cycles.expand(phases, compose_phase, {}), start=1)
        } | dict(reused_dirs or {})
        scores: dict[str, float] = {}
        for name, folder in folders.items():
            result = json_files.read_json(folder / "result.json") if _is_done(folder) else None
            if (score := lineage.heldout_score(result or {})[1]) is not None:
                scores[name] = score
        plans = {}
        for phase in cycles.expand(phases, compose_phase, scores):
            with self.phase_errors(phase.name):
                plans[phase.name] = self._plan(phase, folders)
        self.check_any_runs(plans)
        return plans

    def _plan(self, phase: Phase, folders: dict[str, Path]) -> Plan:
        cycle = phase if isinstance(phase, CyclePhase) else None
        folder, composed, keys = folders[phase.name], self.compose(phase), self.typed.keys
        composed.name = f"{folder.parent.parent.name}-{phase.name}"
        path = composed.model.path
        source = str(folders[phase.model_from] / "model") if phase.model_from else path
        if not self.config.smoke:
            composed.model.path = source
        if phase.data_from:
            composed.data = cycles.samples_data(folders[phase.data_from], composed)
        if phase.results_from:
            composed.method.args["results_from"] = str(folders[phase.results_from])
        if cycle:
            cycles.apply(composed, cycle)
            if cycle.pass_rates_from and composed.data.curriculum == Curriculum.adaptive:
                composed.data.pass_rates = str(folders[cycle.pass_rates_from] / "result.json")
            keys = [*keys, *cycles.part_keys(cycle.part, keys)]
        prepared, warnings = prepare(composed, keys)
        if cycle and cycle.chosen and cycle.part == "train":
            warnings = [*warnings, *cycle.chosen.warnings(cycle.cycle)]
        # With smoke=true, prepare() has reduced the shape to match the earlier phase's model.
        prepared.model.path = source
        prepared = with_choices(prepared, self.host, folder)
        plan = make_plan(prepared, self.host, folder, warnings, self.request)
        inputs = copy.deepcopy(prepared)  # without the outputs of earlier phases
        if phase.model_from:
            inputs.model.path, inputs.model.init = None, Init.pretrained
        if phase.data_from:
            inputs.data = Data(kind="none")
        if cycle and cycle.pass_rates_from:
            inputs.data.pass_rates = None
        if phase.results_from:
            del inputs.method.args["results_from"]
        check_files(inputs, all_lines=self.config.mode == Mode.run)
        if not cycle or not cycle.chosen:
            return plan
        is_left_out = cycle.cycle > cycle.chosen.last
        return dataclasses.replace(plan, chosen=cycle.chosen, is_left_out=is_left_out)

    def run(
        self,
        plans: dict[str, Plan],
        images: Mapping[str, dict[str, Any] | None],
        stopping: list[int],
        at_end: AtEnd,
    ) -> int:
        """Run the phases that are not done, and return the exit code.

        `images` maps each phase to the result of check_host. If an optional phase has failed, its
        exit code is returned after the others have run.
        """
        config, exit_code = self.config, EXIT_DONE
        self.data = input_data(self.run_dir, list(plans.values()))
        self._write(plans, "running")
        try:
            for phase in plans:  # the plans may change while this loop runs, but not their names
                plan = plans[phase]
                if plan.is_left_out or phase in self.not_run:
                    continue
                if _is_done(plan.run_dir):
                    self.results[phase] = show.end_json(plan, EXIT_DONE)
                    show.say(config, f"{plan.name}: already done")
                    continue
                if stopping:
                    exit_code = EXIT_INTERRUPTED
                    status = f"interrupted before phase {phase}; the same command resumes"
                    show.say(config, f"{self.run_dir.parent.name}: {status}")
                    break
                model = plan.config.model.path or plan.config.model.name
                name = f"{plan.run_dir.name}: {plan.config.method.name}"
                show.say(config, f"\nphase {name} of {model}")
                code = EXIT_HOST  # of an optional phase that could not be started
                with self.phase_errors(phase):
                    code = execute(plan, self.host, images[phase], self.run_dir.name, stopping)
                if phase in self.not_run:
                    show.say(config, self.not_run[phase])
                self.results[phase] = show.end_json(plan, code)
                show.say_end(config, plan, code)
                exit_code = code or exit_code
                if code == EXIT_INTERRUPTED or (code and phase not in self.optional):
                    break
                if plan.chosen and plan.config.method.measures_model:  # RAFT may choose a cycle now
                    plans = self.plans()
                    self._write(plans, "running")
        except (UserError, HostError) as error:  # from execute() or from planning again
            self._end(plans, error.exit_code, at_end)
            raise
        self._end(plans, exit_code, at_end)
        return exit_code

    def _end(self, plans: dict[str, Plan], exit_code: int, at_end: AtEnd) -> None:
        """Write the final record, and show the summary, or the results as JSON."""
        self._write(plans, STATUS.get(exit_code, "failed"), exit_code)
        if exit_code == EXIT_DONE:
            ran = [plan for plan in plans.values() if not plan.is_left_out]
            show.say(self.config, phase_curves.summary(self.run_dir, ran))
        if exit_code != EXIT_INTERRUPTED:
            at_end(self.config, self.run_dir)
        if self.config.format == Format.text:
            show.say_next(self.config, self.run_dir, self.request)
        if self.config.format == Format.json:
            content = {"run_dir": str(self.run_dir), "exit_code": exit_code, "phases": self.results}
            content |= {"not_run": self.not_run} if self.not_run else {}
            print(json.dumps(content, indent=1))

    def _write(self, plans: dict[str, Plan], status: str, exit_code: int | None = None) -> None:
        choices = [plan.chosen for plan in plans.values() if plan.chosen]
        folders = _folders(plans)
        content = {
            "schema": 1,
            "run_id": self.run_dir.name,
            "overrides": list(self.request),
            "composition": composition(self.config),
            "composition_hash": composition_hash(self.config),
            "data": self.data,
            "phases": folders,
            **({"not_run": self.not_run} if self.not_run else {}),
            # by the phase of method=raft, or `raft` without phases
            "chosen": {c.raft or "raft": c.record(folders) for c in choices if c.is_final},
            "status": status,
            "exit_code": exit_code,
        }
        json_files.write_json(self.run_dir / "record.json", sealed.seal(content))
