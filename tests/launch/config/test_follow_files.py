"""Test plans of models that conf/model does not have, from the config.json of their files."""

import dataclasses
import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from launch.config.compose import compose
from launch.config.follow_files import warnings
from launch.config.request import Request
from launch.core.errors import UserError
from launch.inputs import model_config, model_path
from launch.plan.planning import make_plan, prepare
from launch.rules.check import refusals
from launch.schema import shapes
from tests.conftest import ROOT, composed, host_with, leave_model, leave_record
from tests.launch.conftest import COMMIT

SMALL = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 300}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2}
# model_type -> keys of its config.json in addition to SMALL
TYPES = {
    **dict.fromkeys(shapes.ARCHITECTURES, {}),
    **dict.fromkeys(("phi3", "smollm3"), {"pad_token_id": 0}),
    "qwen3_moe": {**EXPERTS, "num_experts": 6, "moe_intermediate_size": 32},
    "mixtral": {**EXPERTS, "num_local_experts": 6},
    "gpt_oss": {**EXPERTS, "num_local_experts": 6},
}


def leave_config(folder, **content):
    leave_model(folder)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def follow(*overrides):
    return compose(["hardware=cpu", *map(str, overrides)])


@pytest.mark.parametrize("kind", TYPES)
def test_the_shape_of_a_directory_counts_as_transformers_does(tmp_path, kind):
    with torch.device("meta"):
        config = AutoConfig.for_model(kind, **SMALL, **TYPES[kind])
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    config.save_pretrained(tmp_path)
    planned = follow(f"model.path={tmp_path}").model
    assert (planned.name, planned.architecture) == (tmp_path.name, kind)
    assert planned.num_parameters == sum(p.numel() for p in model.parameters())
    assert shapes.is_known(planned)
    active = planned.num_parameters
    if "num_experts_per_tok" in TYPES[kind]:
        active -= 3 * 4 * 3 * 64 * planned.intermediate_size  # 4 of 6 experts in each layer
        assert planned.intermediate_size == (32 if kind == "qwen3_moe" else 96)
    assert shapes.active_parameters(planned) == active


def test_a_preset_of_another_shape_takes_no_effect(tmp_path):
    leave_config(tmp_path, model_type="llama", **SMALL)
    request = ["hardware=cpu", "model=qwen3_8b", f"model.path={tmp_path}"]
    config = compose(request)
    assert (config.model.num_layers, config.model.hub_id) == (3, None)
    [line] = warnings(config, request)
    assert line.startswith("model=qwen3_8b takes no effect")
    assert [*warnings(follow(f"model.path={tmp_path}"), ["hardware=cpu"])] == []
    same = follow("model=tiny", f"model.path={leave_config(tmp_path / 'tiny', **tiny())}")
    assert same.model.name == "tiny"
    with pytest.raises(UserError, match=r"^model.num_layers=5: .*config.json has 3"):
        follow(f"model.path={tmp_path}", "model.num_layers=5")


@pytest.mark.parametrize("model", [[], ["model=tiny"], ["model=qwen3_8b"], ["model=auto"]])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])  # of another shape, and of tiny's
def test_random_weights_of_a_directory_are_rejected(tmp_path, kind, model):
    content = tiny() if kind == "qwen3" else {"model_type": kind, **SMALL}
    path = f"model.path={leave_config(tmp_path, **content)}"
    with pytest.raises(UserError, match=r"^model.init=random takes no effect with model.path="):
        follow(*model, path, "model.init=random")
    assert follow(*model, "model.init=pretrained", path).model.path == str(tmp_path)


def tiny():
    preset = model_path.file("tiny")
    return {model_config.NAMES[key][0]: preset[key] for key in model_config.NAMES if key in preset}


def test_settings_of_the_tiny_model_are_not_those_of_another(tmp_path):
    leave_config(tmp_path, model_type="llama", **SMALL)
    rate = {name: follow(*o).method.args.get("learning_rate") for name, o in {
        "tiny": [], "files": [f"model.path={tmp_path}"], "qwen3_8b": ["model=qwen3_8b"],
    }.items()}  # fmt: skip
    assert rate["files"] == rate["qwen3_8b"] != rate["tiny"]


def test_an_unknown_type_is_a_generic_estimate(launch, tmp_path):
    leave_config(tmp_path, model_type="lfm2", **SMALL)
    done = launch("hardware=mi300x", f"model.path={tmp_path}", "mode=plan", "format=json")
    assert done.code == 0, done.err
    assert any("lfm2" in line and "25%" in line for line in json.loads(done.out)["warnings"])


def test_adapters_do_not_reach_experts(launch, tmp_path):
    leave_config(tmp_path, model_type="mixtral", **SMALL, **TYPES["mixtral"])
    arguments = ("hardware=mi300x", f"model.path={tmp_path}", "adapter=lora", "mode=plan")
    done = launch(*arguments, "format=json")
    assert any("experts" in line for line in json.loads(done.out)["warnings"])


def test_a_hub_model_needs_its_name_only(hub):
    hub("me/Gemma-3", model_type="gemma3", text_config={"model_type": "gemma3_text", **SMALL})
    config = follow("model.hub_id=me/Gemma-3")
    assert (config.model.name, config.model.architecture) == ("Gemma-3", "gemma3_text")
    assert (config.model.revision, config.model.tied_embeddings) == (COMMIT, True)
    assert refusals(config) == []
    for pinned in ([], [f"model.revision={COMMIT}"]):  # the preset's commit is not this model's
        assert follow("model=qwen3_32b", "model.hub_id=me/Gemma-3", *pinned).model == config.model
    hub("me/tiny", **tiny())
    same = follow("model=tiny", "model.hub_id=me/tiny", "model.init=pretrained")
    assert (same.model.name, same.model.revision) == ("tiny", COMMIT)


@pytest.mark.parametrize("overrides", [[], ["model=llama3_1_8b"], [f"model.revision={COMMIT}"]])
def test_the_hub_id_of_a_preset_selects_it(overrides):
    config = follow("model.hub_id=Qwen/Qwen3-32B", *overrides)
    assert (config.model.name, config.model.num_layers) == ("qwen3_32b", 64)
    commit = COMMIT if overrides == [f"model.revision={COMMIT}"] else None
    assert config.model.revision == (commit or model_path.file("qwen3_32b")["revision"])


class FakeHub(BaseHTTPRequestHandler):
    """Answer for config.json of me/mine, whose branch main is at COMMIT."""

    content = json.dumps({"model_type": "llama", **SMALL, "tie_word_embeddings": True}).encode()

    def do_GET(self):
        is_known = re.fullmatch(f"/me/mine/resolve/(main|{COMMIT})/config.json", self.path)
        self.send_response(200 if is_known else 404)
        for name, value in {
            "Content-Length": str(len(self.content) if is_known else 0),
            "ETag": '"1"',
            "X-Repo-Commit": COMMIT,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if is_known and self.command == "GET":
            self.wfile.write(self.content)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


def test_the_commit_of_a_branch_is_looked_up_online_and_remembered(tmp_path, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    constants = huggingface_hub.constants
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
    for name, value in {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HUB_CACHE": str(tmp_path),
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for is_online in (True, False):
        if not is_online:
            server.shutdown()
            server.server_close()
        model_config.hub_file.cache_clear()
        model = follow("model.hub_id=me/mine").model
        assert (model.revision, model.num_layers) == (COMMIT, 3)
    model_config.hub_file.cache_clear()


def test_a_directory_without_a_shape_is_not_planned_as_the_default_model(tmp_path):
    leave_config(tmp_path, model_type="qwen3", hidden_size="big", num_hidden_layers=3)
    request = ["hardware=mi300x", f"model.path={tmp_path}"]
    with pytest.raises(UserError, match=r"Add: model.hidden_size=<number> model.num_heads"):
        list(warnings(follow(*request), request))
    request.append("model=qwen3_8b")
    config = follow(*request)
    [line] = warnings(config, request)
    assert "it lacks hidden_size" in line
    assert config.model.num_layers == 36


def test_a_hub_model_that_cannot_be_read(hub):
    with pytest.raises(UserError, match=r"^model.hub_id=me/mine: .*Or use: model.path="):
        follow("model.hub_id=me/mine")
    hub("me/half", model_type="llama", num_hidden_layers=3)
    with pytest.raises(UserError, match=r"Add: model.hidden_size=<number> model.num_heads"):
        follow("model.hub_id=me/half")
    # A preset of the same shape plans it without a network.
    request = ["model=qwen3_8b", "model.hub_id=me/mine", f"model.revision={COMMIT}"]
    config = follow(*request)
    assert config.model.num_layers == 36
    [line] = warnings(config, request)
    assert "The plan assumes the shape of model=qwen3_8b" in line


def test_plans_of_files_and_presets_import_no_library(tmp_path):
    leave_config(tmp_path, model_type="llama", **SMALL)
    code = (
        "import sys; from launch.run import main; code = main(sys.argv[1:]); "
        "names = {'torch', 'transformers', 'huggingface_hub'} & {*sys.modules}; "
        "sys.exit(f'{code} {names}' if code or names else 0)"
    )
    for model in (f"model.path={tmp_path}", "model.hub_id=Qwen/Qwen3-30B-A3B"):
        arguments = [sys.executable, "-c", code, "hardware=mi300x", model, "mode=plan"]
        done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_an_evaluation_follows_the_run_that_left_its_model(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1", "answer": "2"}\n' * 7)
    command = f"""
        method=grpo hardware=mi300x data=jsonl data.path={rows} data.heldout_path={rows}
        data.streaming=true data.shuffle_buffer=5 method.args.max_steps=3
        data.columns={{prompt: question}} data.system_prompt='Answer: {{it}}' data.limit=5
        +method.rewards.format=0.5 model=qwen3_0_6b method.args.max_completion_length=300
    """
    words = [word.strip() for word in re.split(r"\s(?=[+\w.]+=)", command) if word.strip()]
    trained = compose(words)
    leave_record(tmp_path / "run", trained, "done")
    leave_model(tmp_path / "run/model")
    exported = composed("method=export", "hardware=cpu", f"model.path={tmp_path}/run")
    leave_record(tmp_path / "export", exported, "done")
    leave_model(tmp_path / "export/model")
    for folder in ("run", "run/model", "export"):
        request = Request(["method=evaluate", "hardware=mi300x", f"model.path={tmp_path}/{folder}"])
        config = compose(request)
        heldout = {"limit": None, "streaming": False, "shuffle_buffer": 1000}
        assert config.data == dataclasses.replace(trained.data, **heldout)
        assert prepare(config)[0].data == config.data
        assert config.method.rewards == {"accuracy": 1.0}
        assert config.method.args["max_new_tokens"] == 300
        plan = make_plan(config, host_with(8), tmp_path / "new", (), request)
        followed = [choice.key for choice in plan.config.followed]
        args = ["method.args.max_new_tokens", "method.args.chat_template_kwargs"]
        assert sorted(followed) == sorted(["data", "method.rewards", *args])
        base = compose(["method=evaluate", "hardware=mi300x", f"model.base_of={tmp_path}/{folder}"])
        assert base.model == trained.model
        assert (base.data, base.method.rewards) == (config.data, config.method.rewards)
        assert base.followed == config.followed
        assert plan.speed.steps == 1
    config = compose(request.plus("data.system_prompt=null", "data.columns.answer=a"))
    assert config.data.system_prompt is None
    assert config.data.columns == {"prompt": "question", "answer": "a"}
    for words, keys in {"data=reasoning": args, "experiment=quickstart": args[1:]}.items():
        config = compose(request.plus(words))
        assert config.data.kind == "reasoning"
        assert [choice.key for choice in config.followed] == keys
    longer = compose(request.plus("method.args.max_new_tokens=7"))
    assert longer.method.args["max_new_tokens"] == 7
    own = compose(request.plus("method.rewards={format: 1.0}"))
    assert own.method.rewards == {"format": 1.0}


def test_an_evaluation_follows_the_run_that_sampled_the_rows_of_training(tmp_path):
    rows = tmp_path / "questions.jsonl"
    rows.write_text('{"prompt": "1+1"}\n' * 7)
    sampled = composed(
        *f"method=sample hardware=cpu data=jsonl data.path={rows}".split(),
        *(
            "data.heldout_fraction=0.5",
            "~method.rewards.reasoning_gym",
            "+method.rewards.length=1.0",
        ),
        *("+method.rewards.format=0.5", "method.args.max_new_tokens=9"),
    )
    leave_record(tmp_path / "sample", sampled, "done")
    selected = tmp_path / "sample/selected.jsonl"
    selected.write_text('{"prompt": "1+1", "completion": "2"}\n')
    trained = composed("hardware=cpu", "data=jsonl", f"data.path={selected}")
    leave_record(tmp_path / "run", trained, "done")
    leave_model(tmp_path / "run/model")
    config = compose(["method=evaluate", "hardware=cpu", f"model.path={tmp_path}/run"])
    assert (config.data.path, config.data.heldout_fraction) == (str(rows), 0.5)
    assert config.method.rewards == {"length": 1.0, "format": 0.5}
    assert config.method.args["max_new_tokens"] == 9


def test_an_evaluation_needs_held_out_rows_of_the_run_or_other_data(tmp_path):
    chats = ROOT / "examples/chat.jsonl"
    leave_record(tmp_path, composed("hardware=cpu", "data=jsonl", f"data.path={chats}"), "done")
    leave_model(tmp_path / "model")
    words = ["hardware=cpu", "method=evaluate"]
    for model in ("model.path", "model.base_of"):
        with pytest.raises(
            UserError, match=f"the run of {model} .data=jsonl. has no held-out rows"
        ):
            compose([*words, f"{model}={tmp_path}"])
    request = Request([*words, f"model.path={tmp_path}"])
    own = "data.heldout_path=rows.jsonl"
    kinds = {"data=arithmetic": "reasoning", own: "jsonl", f"data=jsonl {own}": "jsonl"}
    kinds["method.args.lm_eval_tasks=[gsm8k]"] = "reasoning"
    for more, kind in kinds.items():
        assert compose(request.plus(*more.split())).data.kind == kind


def test_a_base_that_is_unknown_is_rejected(tmp_path):
    leave_record(tmp_path / "run", composed("hardware=cpu"), "done")
    adapter = tmp_path / "earlier/adapter"
    later = composed("hardware=cpu", "adapter=lora", f"adapter.path={adapter}")
    leave_record(tmp_path / "later", later, "done")
    for words, remedy in {
        f"model.base_of={tmp_path}": "Use: model.base_of=<run>",
        f"model.base_of={tmp_path}/run model.path=x": "Remove model.path",
        f"model.base_of={tmp_path}/later": f"Use: model.path={tmp_path}/earlier",
    }.items():
        with pytest.raises(UserError, match=re.escape(remedy)):
            follow("method=evaluate", *words.split())


@pytest.mark.parametrize("method", ["grpo", "evaluate"])
def test_rows_of_reasoning_gym_keep_its_reward(tmp_path, method):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1?", "entry": "{}", "answer": "2"}\n')
    words = [f"method={method}", "data=jsonl", f"data.path={rows}", f"data.heldout_path={rows}"]
    assert composed(*words, "hardware=cpu").method.rewards == {"reasoning_gym": 1.0}
