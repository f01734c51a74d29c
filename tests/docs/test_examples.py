"""Test the files of examples/, which the commands of docs/start/ read."""

from __future__ import annotations

import json
import shlex
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from examples import rewards
from launch.config.request import Request
from launch.core.errors import UserError
from launch.machine import placement
from launch.plan.planning import prepare
from recipes.data.data_load import load
from recipes.rewards.verifier import Verifier, build_verifier
from tests.conftest import composed
from tests.helpers.data_rows import data_config

EXAMPLES = Path(__file__).parents[2] / "examples"
FITS = {
    "chat": ["sft"],
    "math": ["sft", "grpo"],
    "preferences": ["dpo"],
    "questions": ["sft", "grpo"],
}
COLUMNS = {
    ("questions", "sft"): {"prompt": "question", "completion": "answer"},
    ("questions", "grpo"): {"prompt": "question"},
}


@pytest.mark.parametrize(
    ("name", "method"), [(n, m) for n, methods in FITS.items() for m in methods]
)
def test_rows_load_for_their_methods(name, method):
    path = EXAMPLES / f"{name}.jsonl"
    columns = COLUMNS.get((name, method), {})
    rows = load(data_config("jsonl", path=str(path), columns=columns), method).rows
    assert len(rows) == len({str(row) for row in rows}) == len(path.read_text().splitlines())


def test_every_file_is_tested():
    assert {file.stem for file in EXAMPLES.glob("*.jsonl")} == set(FITS)


def test_rewards_judge_the_worked_answers():
    rows = [json.loads(line) for line in (EXAMPLES / "math.jsonl").open()]
    completions, answers = [row["completion"] for row in rows], [row["answer"] for row in rows]
    assert rewards.last_number(completions, answers) == [1.0] * len(rows)
    assert rewards.last_number(completions, answers[1:] + answers[:1]) == [0.0] * len(rows)
    assert rewards.brevity(completions) == [1.0] * len(rows)
    assert rewards.brevity(["x" * 400, ""]) == [0.5, 1.0]


def test_the_last_number_is_compared_as_a_number():
    answers = ["1,234", "87", "#### 5", "-2.5", "none", "3"]
    completions = ["so 1234.", "87.00", "It is 5", "1 or -2.50", "7", "no idea"]
    assert rewards.last_number(completions, answers) == [1.0, 1.0, 1.0, 1.0, None, 0.0]


@pytest.fixture
def judge_server(monkeypatch):
    """Serve the last word of a request as its grade. The word `fails` is answered with an error."""
    requests: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({"path": self.path, "key": self.headers["Authorization"], **body})
            word = body["messages"][0]["content"].split()[-1]
            self.send_response(503 if word == "fails" else 200)
            self.end_headers()
            reply = {"choices": [{"message": {"content": word}}]}
            self.wfile.write(json.dumps(reply).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1")
        monkeypatch.setenv("JUDGE_MODEL", "judge")
        monkeypatch.setenv("JUDGE_API_KEY", "key")
        yield requests
        server.shutdown()


def test_a_judge_scores_completions(judge_server, capsys):
    """A completion without a grade is excluded; a judge that fails for all ends a new run."""
    method = {"rewards": {"examples.judge.quality": 1.0}, "reward_chain": []}
    method |= {"reward_pattern": None, "reward_confined": False}
    config = OmegaConf.create({"method": method, "run_dir": "."})
    prompt = [{"role": "system", "content": "Reason."}, {"role": "user", "content": "Why?"}]

    def scores(verifier: Verifier, *words: str) -> list[dict[str, float]]:
        completions = [[{"role": "assistant", "content": word}] for word in words]
        return [v.scores for v in verifier([prompt] * len(words), completions, {})]

    verifier = build_verifier(config, [])
    graded = scores(verifier, "8", "fails", "well", "0")
    assert [list(each.values()) for each in graded] == [[0.8], [], [], [0.0]]
    assert verifier.errors == 0
    assert {request["path"] for request in judge_server} == {"/v1/chat/completions"}
    assert {(request["model"], request["key"]) for request in judge_server} == {
        ("judge", "Bearer key")
    }
    assert "Why?" in judge_server[0]["messages"][0]["content"]
    assert [list(each.values()) for each in scores(verifier, "11", "8/10")] == [[1.0], [0.8]]
    assert [list(each.values()) for each in scores(verifier, "fails", "well")] == [[0.0], [0.0]]
    assert verifier.errors == 2
    assert "HTTP Error 503" in capsys.readouterr().out
    with pytest.raises(UserError, match="fails for every completion: HTTPError: HTTP Error 503"):
        scores(build_verifier(config, []), "fails", "fails")


def test_the_dstack_task_uses_all_of_its_gpus():
    """Dstack 0.22.5 parses the file (parse_run_configuration)."""
    task = yaml.safe_load((EXAMPLES / "mi300x.dstack.yml").read_text())
    (command,) = task["commands"]
    config, _ = prepare(composed(*Request(shlex.split(command)[2:])))
    assert task["resources"]["gpu"] == f"MI300X:{placement.num_gpus(config)}"
    assert config.runtime.name == "local"
    assert Path(config.run_root).is_relative_to(task["volumes"][0].partition(":")[2])
