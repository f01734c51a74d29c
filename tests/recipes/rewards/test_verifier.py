"""Test verifiers: weights, chains, crashes and hangs of rewards, and isolation."""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from launch.core.errors import UserError
from recipes.rewards import verify_code, verify_isolated
from recipes.rewards.verifier import build_verifier
from recipes.rewards.verify_isolated import ENVIRONMENT, PASSED_ON, Isolated, Pool
from tests.conftest import ROOT


def of(rewards, columns=(), chain=(), pattern=None, run_dir=".", confined=True, rows=()):
    method = {"rewards": rewards, "reward_chain": list(chain)}
    method |= {"reward_pattern": pattern, "reward_confined": confined}
    config = OmegaConf.create({"method": method, "run_dir": str(run_dir)})
    return build_verifier(config, list(columns), rows)


def fails_for_bad(prompts, completions, **columns):
    if "bad" in completions:
        raise ValueError("it is bad")
    return [1.0] * len(completions)


def beyond_for_bad(prompts, completions, **columns):
    scores = {"bad": 1.5, "worse": -1.0, "rounded": 1 + 2e-16, "nothing": float("nan")}
    return [scores.get(text, 1.0) for text in completions]


def fails(prompts, completions, **columns):
    raise KeyError("no_such_column")


def adds(prompts, completions, **columns):
    return [1.0 + text for text in completions]


def reads_answers(prompts, completions, answers, **columns):
    return [1.0]


def says_one(prompts, completions, **columns):
    return [1.0]


def goes_wrong(prompts, completions, **columns):
    """Hang or crash, as the completion says."""
    ways = {"hangs": lambda: [None for _ in iter(int, 1)], "dies": os.abort}
    for completion in completions:
        ways.get(completion, lambda: None)()
    return [1 / len(completions)] * len(completions)


def reads_everything(prompts, completions, answer, **columns):
    assert prompts == ["p", "q"]
    assert set(columns) == {"levels"}
    return [
        float(a == b and level == [1])
        for a, b, level in zip(completions, answer, columns["levels"], strict=True)
    ]


def sees_a_gpu(prompts, completions, **columns):
    hidden = [os.environ.get(name) for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")]
    return [float("HF_TOKEN" in os.environ or hidden != ["-1", "-1"])] * len(completions)


GOOD = "<think>a</think><answer>7</answer>"
OWN = "tests.recipes.rewards.test_verifier"


def test_scores_are_weighted_and_chained():
    texts = [GOOD, "7", "<think>a</think><answer>8</answer>"]
    verifier = of({"format": 1.0, "regex": 3.0}, chain=["format", "regex"], pattern="[0-7]+")
    verdicts = verifier(["p"] * 3, texts, {})
    assert [v.scores for v in verdicts] == [
        {"format": 1, "regex": 1},
        {"format": 0, "regex": 0},
        {"format": 1, "regex": 0},
    ]
    assert [v.score for v in verdicts] == [1.0, 0.0, 0.25]
    assert [
        v.score for v in of({"format": 1.0, "regex": 3.0}, pattern="[0-7]+")(["p"] * 3, texts, {})
    ] == [1.0, 0.75, 0.25]


def alone(isolated, name, text, **row):
    """Return the score of one completion, or the reason why it has none."""
    columns = {key: [value] for key, value in row.items()}
    scores, error = isolated.attempt(name, [""], [text], columns)
    return error or scores[0]


def test_hangs_and_crashes_fail_only_their_completion():
    isolated = Isolated(["regex", "length"], time_s=0.5)
    hang = alone(isolated, "regex", "a" * 40 + "b", pattern="(a+)+")
    assert hang == "no score within 0.5 s of CPU time"
    assert alone(isolated, "regex", "aaa", pattern="(a+)+") == 1.0
    assert alone(isolated, "regex", "aaa", pattern="(").split(":")[0] in ("PatternError", "error")
    isolated.process.kill()
    isolated.process.wait()
    assert alone(isolated, "length", "") == "its process ended with exit code -9"
    assert alone(isolated, "length", "") == 1.0


def test_rewards_that_wait_are_limited_by_wall_clock():
    isolated = Isolated(["length"], wait_s=0.3)
    assert alone(isolated, "length", "") == 1.0
    isolated.process.send_signal(signal.SIGSTOP)
    assert alone(isolated, "length", "") == "no score within 0.3 s"
    assert alone(isolated, "length", "") == 1.0


def test_processes_score_at_the_same_time():
    """Each of two rows is scored only after both have started."""
    both = threading.Barrier(2, timeout=60)
    score = lambda *row: (both.wait() and None) or ([1.0], None)  # noqa: E731
    pool = Pool(["length"], 2)
    pool.workers = [SimpleNamespace(process=object(), attempt=score)] * 2
    assert pool.attempts("length", [([""], [""], {})] * 2) == [([1.0], None)] * 2


def test_scores_of_several_processes_keep_their_order(monkeypatch):
    monkeypatch.setattr(verify_isolated, "SOLO_S", 0.0)
    pool = Pool(["regex"], 2)
    for worker in pool.workers:
        worker.time_s = 0.5
    texts = ["a" * 40 + "b", "aaa", "b", "aa", "c"]
    attempts = pool.attempts("regex", [([""], [text], {"pattern": ["(a+)+"]}) for text in texts])
    assert attempts == [(None, "no score within 0.5 s of CPU time"),
                        *(([score], None) for score in (1.0, 0.0, 1.0, 0.0))]  # fmt: skip


def test_fast_scores_start_no_second_process():
    pool = Pool(["length"], 2)
    assert pool.attempts("length", []) == []
    assert pool.attempts("length", [([""], [""], {})] * 3) == [([1.0], None)] * 3
    assert pool.workers[1].process is None


@pytest.mark.parametrize(("cores", "ranks", "workers"), [
    (1, 1, 1), (2, 1, 1), (16, 1, 15), (192, 8, 16), (8, 8, 1),
])  # fmt: skip
def test_a_rank_uses_its_share_of_the_cores(monkeypatch, cores, ranks, workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert verify_isolated.num_workers() == workers


MISBEHAVES = """
import os, socket, subprocess, sys
from recipes.rewards import reward_functions, verify_worker

def silent(call):  # like rewards that treat any exception as a wrong answer
    def scorer(prompts, completions, **columns):
        try:
            call(completions[0])
        except Exception:
            return [0.5]
        return [1.0]
    return scorer

reward_functions.REWARDS.update(
    socket=silent(lambda text: socket.socket()),
    process=silent(lambda text: subprocess.run(["true"])),
    fork=silent(lambda text: os.fork()),
    write=silent(lambda text: open(text, "w")),
    remove=silent(lambda text: os.remove(text)),
    read=silent(lambda text: open(text).read()),
    parent=silent(lambda text: open(f"/proc/self/root/proc/{os.getppid()}/environ").read()),
    folder=silent(lambda text: os.open("/usr", os.O_RDONLY)),
    memory=lambda prompts, completions, **columns: [len(bytes(10**10))],
)
sys.argv = ["verify_worker", "5", "200000000"]
verify_worker.main()
"""


def worker(code, *questions):
    """Return the exit code of a worker that runs `code`, and its replies."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input="".join(json.dumps({"prompts": [""], **question}) + "\n" for question in questions),
        text=True,
        timeout=120,
        stdout=subprocess.PIPE,
    )
    ready, *replies = done.stdout.splitlines()
    assert ready == "ready"
    return done.returncode, [json.loads(reply) for reply in replies]


def test_blocked_calls_fail_only_their_completion(tmp_path):
    target = tmp_path / "a"
    target.write_text("kept")
    errors = {
        "socket": "rewards may not call socket.__new__",
        "process": "rewards may not call subprocess.Popen",
        "fork": "rewards may not call os.fork",
        "write": f"rewards may not call open {str(target)!r}",
        "remove": "rewards may not call os.remove",
        "read": None,
        "parent": f"rewards may not call open '/proc/self/root/proc/{os.getpid()}/environ'",
        "folder": "rewards may not call open '/usr'",
        "memory": "the reward exceeds its memory limit",
        "length": None,
    }
    _, replies = worker(
        MISBEHAVES, *({"name": n, "completions": [str(target)], "columns": {}} for n in errors)
    )
    assert [reply["error"] for reply in replies] == list(errors.values())
    assert [bool(reply["scores"]) for reply in replies] == [e is None for e in errors.values()]
    assert target.read_text() == "kept"


def test_rewards_do_not_see_the_environment_of_the_rank(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a secret")
    isolated = Isolated(["length"])
    with open(f"/proc/{isolated.wait_until_ready().pid}/environ", "rb") as file:
        names = {entry.partition(b"=")[0].decode() for entry in file.read().split(b"\0") if entry}
    assert "PATH" in names <= {*PASSED_ON, *ENVIRONMENT}


def test_importing_a_reward_cannot_read_the_environment_of_the_rank(tmp_path, monkeypatch):
    source = "import os\nopen(f'/proc/{os.getppid()}/task/{os.getppid()}/environ').read()\n"
    (tmp_path / "peeks.py").write_text(f"{source}def score(completions, **_): pass\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    with pytest.raises(UserError, match="PermissionError"):
        Isolated(["peeks.score"]).wait_until_ready()


def test_a_hanging_worker_ends_after_its_rank_was_killed():
    code = (
        "import sys; sys.argv = ['', '60', '1000000000']; "
        "from recipes.rewards import verify_worker as w; w.ORPHAN_S = 0.2; w.main()"
    )
    question = {"completions": ["a" * 40 + "b"], "columns": {"pattern": ["(a+)+"]}}
    assert worker(code, {"name": "regex", **question}) == (-signal.SIGALRM, [])


def test_a_worker_whose_rank_exits_during_the_imports_ends_silently():
    isolated, (reader, writer) = Isolated(["length"]), os.pipe()
    with pytest.MonkeyPatch.context() as patch, open(reader) as errors:
        patch.setattr(subprocess, "Popen", functools.partial(subprocess.Popen, stderr=writer))
        isolated.start()
        os.close(writer)
        for pipe in (isolated.process.stdout, isolated.process.stdin):
            pipe.close()
        assert errors.read() == ""  # up to the end of the process


def test_scores_outside_0_to_1_are_errors_and_the_first_is_printed(capsys):
    name = f"{OWN}.beyond_for_bad"
    verifier = of({name: 1.0}, confined=False)
    verdicts = verifier(["p"] * 4, ["good", "bad", "worse", "rounded"], {})
    assert [v.score for v in verdicts] == [1.0, 0.0, 0.0, 1.0]
    assert verdicts[1].error.startswith(f"{name}: ValueError: score 1.5 is outside 0 to 1")
    assert verifier.errors == 2
    verifier(["p"], ["bad"], {})
    assert capsys.readouterr().out.count("outside 0 to 1") == 1
    with pytest.raises(UserError, match=r"fails for every completion: .*score nan is outside"):
        of({name: 1.0}, confined=False)(["p"], ["nothing"], {})


@pytest.mark.parametrize(("way", "error"), [
    ("hangs", "no score within 0.5 s of CPU time"),
    ("dies", "its process ended with exit code -6"),
])  # fmt: skip
def test_user_functions_that_hang_or_crash_fail_one_completion(monkeypatch, way, error):
    monkeypatch.setattr(verify_isolated, "Isolated", functools.partial(Isolated, time_s=0.5))
    verifier = of({f"{OWN}.goes_wrong": 1.0})
    verdicts = verifier(["p"] * 2, ["good", way], {})
    assert [(v.score, v.error and v.error.partition(" (")[0]) for v in verdicts] == [
        (1.0, None),
        (0.0, f"{OWN}.goes_wrong: {error}"),
    ]
    assert verifier.errors == 1
    # The next batch is judged in one call.
    assert [v.score for v in verifier(["p"] * 3, ["good"] * 3, {})] == [1 / 3] * 3


def test_confined_functions_get_columns_but_no_gpu_or_secret(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a secret")
    verifier = of({f"{OWN}.reads_everything": 1.0, f"{OWN}.sees_a_gpu": 1.0})
    of_trl = {"log_metric": lambda name, value: None, "trainer_state": object()}
    columns = {"answer": ["7", "8"], "levels": [[1], [2]], **of_trl}
    scores = [verdict.scores for verdict in verifier(["p", "q"], ["7", "8"], columns)]
    assert [list(of.values()) for of in scores] == [[1.0, 0.0], [0.0, 0.0]]
    with pytest.raises(UserError, match=r"columns answer, levels .*bytes"):
        verifier(["p"], ["7"], {"answer": [b"7"], "levels": [[1]]})


@pytest.mark.parametrize(("rewards", "options", "message"), [
    ({"code_tests": 1.0}, {}, "reads column 'tests'"),
    ({"regex": 1.0}, {}, "reads column 'pattern'"),
    ({"regex": 1.0}, {"columns": ["pattern"], "pattern": "a"}, "reward_pattern=null"),
])  # fmt: skip
def test_rewards_need_their_columns(rewards, options, message):
    with pytest.raises(UserError, match=message):
        of(rewards, **options)


def line_of(text):
    """Return a pattern of the file and line as errors show them."""
    lines = Path(__file__).read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.strip().startswith(text))
    return rf"\({__file__}:{number}\)"


@pytest.mark.parametrize(("name", "confined", "message"), [
    ("fails", True, "KeyError: .no_such_column. " + line_of("raise KeyError(")
     + r"\. The columns are answer, level\. .*reward_confined=false"),
    ("adds", False, "TypeError: unsupported operand .* " + line_of("return [1.0 + ")),
    ("says_one", False, "1 scores for 2"),
    ("reads_answers", False, "required positional argument: 'answers'.* are answer, level"),
])  # fmt: skip
def test_user_functions_that_never_work_end_the_run(name, confined, message):
    columns = {"answer": ["7", "8"], "level": [1, 2], "log_metric": "of TRL"}
    with pytest.raises(UserError, match=message):
        of({f"{OWN}.{name}": 1.0}, confined=confined)(["p"] * 2, ["a", "b"], columns)


def test_trl_gets_functions_and_the_share_of_errors():
    verifier = of({f"{OWN}.fails_for_bad": 1.0, "format": 0.5})
    functions, weights = verifier.rewards()
    assert ([f.__name__ for f in functions], weights) == (["fails_for_bad", "format"], [1.0, 0.5])
    logged = {}
    completions = [[{"role": "assistant", "content": GOOD}], "bad"]
    columns = {"log_metric": logged.__setitem__, "trainer_state": object(), "answer": ["7", "7"]}
    assert [f(prompts=["p"] * 2, completions=completions, **columns) for f in functions] == [
        [1.0, 0.0],
        [1.0, 0.0],
    ]
    assert (logged, verifier.errors) == ({"verifier_error_share": 0.5}, 1)


def test_code_and_language_are_extracted():
    text = "First:\n```python\nx = 1\n```\nBetter:\n```c++\nint main() {}\n```\n"
    assert verify_code.extract_code(text) == ("cpp", "int main() {}\n")
    assert verify_code.extract_code("<think>so</think><answer>x = 2</answer>") == (
        "python",
        "x = 2",
    )
    languages = [
        verify_code.extract_code(f"```{name}\nx\n```")[0] for name in ("C++", "py", "rust", "")
    ]
    assert languages == ["cpp", "python", "rust", "python"]
    tests = [{"call": "f(1)", "expected": None, "check": None}, "assert f(1)"]
    assert verify_code.parse_tests(json.dumps(tests)) == [
        {"call": "f(1)", "expected": None},
        {"check": "assert f(1)"},
    ]


@pytest.mark.parametrize(
    "tests", ["no json", "[]", [{"call": "f()"}], [{"stdin": 3, "stdout": "3"}]]
)
def test_malformed_tests_are_rejected_before_the_run(tmp_path, tests):
    with pytest.raises(UserError, match="column 'tests'"):
        of({"code_tests": 1.0}, columns=["tests"], run_dir=tmp_path, rows=[{"tests": tests}])
