"""Test the messages for users' mistakes: one message with a remedy, exit code 2, no traceback."""

from __future__ import annotations

import json
import shlex

import pytest

from launch import reproduce
from launch.core import json_files

# arguments | parts of the message
MISTAKES = r"""
experiment= | experiment=: add one of | debug_overfit | memorize eight rows. | tiny_raft
hardware=mi530x | hardware=mi530x | no such hardware | Did you mean mi350x | Options: auto, cpu
model=Qwen/Qwen3-4B | model=Qwen/Qwen3-4B | Did you mean qwen3_4b | model.hub_id=Qwen/Qwen3-4B
'experiment=[quickstart,learning]' | experiment=[quickstart,learning]: no such experiment | Options:
mi300x | mi300x: '=' is missing. Did you mean hardware=mi300x?
seeed=1 | seeed=1 | no key 'seeed' | Did you mean seed
fail_below=0.9 method=bench/gemm | fail_below=0.9: no top-level key 'fail_below' | Use: method.args.fail_below
topology.num_gpu=2 | num_gpu | Did you mean topology.num_gpus | Keys in topology
seed=abc | seed: Value 'abc' | Use: seed=<a whole number>.
mode=plna | 'plna' | run, plan | Did you mean plan
method.args.max_prompt_length=5 method=grpo | max_prompt_length=5 | trl.GRPOConfig | TRL removed it | max_completion_length
method.args.lerning_rate=1e-4 | lerning_rate | trl.SFTConfig | Did you mean learning_rate
method=grpo method.args.num_generations=null | method.args.num_generations=null: GRPO needs a group size
method.args.learning_rate=fast | learning_rate='fast' | accepts float
experiment=mi300x_grpo_gsm8k method=evaluate mode=plan | for method=grpo | max_steps=200 | method=evaluate model.path=
experiment=one_card_sft method=dpo | for method=sft | assistant_only_loss=True | Leave out experiment=one_card_sft
experiment=mi300x_grpo_gsm8k method=sft | for method=grpo | max_completion_length=1024 | Leave out experiment=
price=2 | Did you mean price_per_gpu_hour?
method=dpo method.args.loss_type=ipo | accepts list | Use: 'method.args.loss_type=[ipo]'
method=raft method.args.train.max_steps=0 mode=plan | method.args.max_steps=0 | at most 2147483647, or -1
method.args.output_dir=x | output_dir=x | run_root=
hardware=h200 method=bench/vllm 'method.args.settings=[{num_scheduler_steps: 8}]' mode=plan | method.args.settings: num_scheduler_steps was removed from vLLM. Use async_scheduling
hardware=h200 method=tune/inductor 'method.args.candidates=[freezing]' mode=plan | candidates: freezing turns weights
topology=tensor | topology=tensor: no such topology | Options:
hardware=mi210 precision=fp8 mode=plan | precision=fp8: mi210 (gfx90a) has no fp8 matrix units | Use: precision=bf16
method=grpo '++method.rewards={no_such_module.reward: 1}' | no_such_module | no module | PYTHONPATH=
hardware=mi50 adapter=qlora precision=nf4 mode=plan | precision=nf4 | adapter=lora precision=fp16 precision.weights=fp16
hardware=mi300x model=qwen3_8b method=grpo effective_batch=1024 mode=plan | effective_batch=1024 | topology.servers=auto effective_batch=1024
method=grpo '++method.rewards={json.laods: 1}' | json.laods | Did you mean loads
data=jsonl data.path=missing.jsonl | data.path=/ | /missing.jsonl: no such file
method=grpo '++method.rewards={broken.reward: 1}' | broken.py is not valid Python
'user_env.AUTH=${oc.env:MY_SECRET}' mode=plan | user_env.AUTH | runtime.pass_env=[AUTH]
'user_env.HIP_A=${oc.env:MY_SECRET}' mode=plan | user_env.HIP_A | runtime.pass_env=[HIP_A]
model.path=nowhere mode=plan | model.path=/ | /nowhere: no such directory.
model.path=runs/mine/latest mode=plan | /latest: no such directory. | model=<name>.
model.path=broken.py mode=plan | broken.py: a file, not a directory | python -m recipes.from_gguf
method=export model=qwen3_4b 'method.args.formats=[gguf]' method.args.gguf_converter=. mode=plan | method.args.gguf_converter=/ | : a directory, but one file is needed
tracking=mlflow | tracking=mlflow | not installed | tracking=tensorboard
run_root=/proc/x | run_root=/proc/x: no directory can be created in /proc | run_root=<another directory>
run_root=/proc/x mode=plan | run_root=/proc/x: no directory can be created in /proc
resume=nowhere | resume=nowhere | there is no record.json | auto, never or a run directory
'~' | ~: no key ''
'~topology' | ~topology: this key cannot be deleted | topology=<option> | fsdp
'~data.tasks' | ~data.tasks: this key cannot be deleted. Use: data.tasks=[{name: chain_sum, level: 0}]
'~method.rewards' | ~method.rewards: this key cannot be deleted. Use: method.rewards.<name>=<value>, or '~method.rewards.<name>' to delete one.
method=grpo '~method.rewards.reasoning_gm' | ~method.rewards.reasoning_gm:
'name='"'"'a' | name='a:  | key=value
'method.args={}' | method.args={}: no effect | '~method.args.<name>'
'phases={}' | phases: a list and a mapping cannot be merged. Use: phases=[{name: sft, overrides: ['method=sft']}]; keys of an
method=tune/vllm 'method.args.space.block_size={a: 1}' | method.args.space.block_size: a list and a mapping cannot be merged.
precision=4bit | precision=4bit: no such precision. Did you mean nf4?
--hardware mi300x mode=plan | unrecognized arguments: --hardware | Use: hardware=mi300x.
--dry-run hardware=mi300x | unrecognized arguments: --dry-run | Use: mode=plan.
dry_run=true | no key 'dry_run' | Use: mode=plan.
--lora-r=8 | lora_r=8: no key 'lora_r'. Use: adapter=lora adapter.rank=8.
hardware=mi300x method=export model=qwen3_4b 'method.args.formats=[gguf]' method.args.gguf_converter=broken.py mode=plan | the image rocm does not contain gguf | runtime=local
runtime.network=brige | runtime.network: Invalid value 'brige', expected one of [bridge, host, none]. Did you mean bridge?
data.tasks=chain_sum | data.tasks:  | Use: data.tasks=[{name: chain_sum, level: 0}]; keys of an entry: n
'data.tasks=[{name: a, level: x}]' | data.tasks[n].level: Value 'x' | <a whole number>
method.args.learning_rate=1,5e-5 | method.args.learning_rate=1,5e-5:  | -m for a sweep over all of them, or method.args.learning_rate=[...]
hardware=mi50 method=tune/vllm mode=plan | method=tune/vllm runs bench/vllm in its trials: method=bench/vllm: no rel
model.path=Qwen/Qwen3-4B mode=plan | no such directory. For a model on the Hub, | model.hub_id=Qwen/Qwen3-4B
model.path= | model.path=: the path is empty | null
'seed=${no_such}' | seed: Interpolation key 'no_such' not found
'data.tasks=[{nam: x}]' | data.tasks: Key 'nam' not in 'Task'. Did you mean name? | Keys of an entry: name, level
+targets.x=3 | targets.x:  | Use: '+targets={x: {<key>: <value>}}'; keys: value, source.
experiment=quickstart smoke=true hydra.job.chdir=true mode=plan | hydra.job.chdir=true: no effect
-m seed=0,1 hydra.run.dir=x mode=plan | hydra.run.dir=x: no effect
--foo/bar x mode=plan | foo/bar=x: no key 'foo'
--packing --bf16 | --packing --bf16. Overrides are key=value. See
--batch-size 4 method=evaluate | Use: method.args.batch_size=4.
name=a,b | name=a,b: several values, but a run needs one. Use: one value, or -m for a sweep over all of them.
data.system_prompt=a,b | Use: 'data.system_prompt="a,b"', or -m
data=jsonl data.path=broken.py,b mode=plan | Use: one value, or -m
-m data.path=~/a,~/b | not an override. Use key=value
method=grpo method.rewards=accuracy,format | or 'method.rewards={accuracy: 1.0, format: 1.0}' for all.
--foo | unrecognized arguments: --foo | --help
--resolve | --resolve | --cfg
"""


@pytest.mark.parametrize(
    "line",
    [*MISTAKES.strip().splitlines(), f"seed={'9' * 5000} | 999...: "],
    ids=lambda line: line[:40],
)
def test_mistake(launch, tmp_path, monkeypatch, line):
    arguments, *words = line.split(" | ")
    (tmp_path / "broken.py").write_text("def (")
    monkeypatch.setenv("MY_SECRET", "sentinel-value")
    done = launch(*shlex.split(arguments))
    assert done.code == 2
    assert "Traceback" not in done.err
    assert [part for part in words if part not in done.err] == []


def test_a_directory_in_place_of_a_data_file(launch, tmp_path):
    (tmp_path / "d").mkdir()
    for number in range(2):
        (tmp_path / f"d/{number}.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    parts = "[{path: d/0.jsonl, weight: 0.5}, {path: d, weight: 0.5}]"
    problem = f"{tmp_path}/d: a directory, but one file is needed. Use: 0.jsonl or 1.jsonl.\n"
    for overrides, key in (
        (["data=jsonl", "data.path=d"], "data.path"),
        (["data=jsonl", "data.path=d/0.jsonl", "data.heldout_path=d"], "data.heldout_path"),
        (["data=mix", f"data.sources={parts}"], "data.sources[1].path"),
    ):
        done = launch(*overrides, "mode=plan")
        assert done.code == 2, done.err
        assert f"{key}={problem}" in done.err


@pytest.mark.parametrize(("content", "method", "words"), [
    ('{"text": "a"}\nnot json\n', "sft", [":2:", "not a JSON object", "column 1", '{"text": "..."}']),
    ('{"text": "a"}\n\n{"txt": "b"}\n', "sft", [":3:", "has txt", "needs messages or text or"]),
    ('{"prompt": "a", "chosen": "b"}\n', "dpo", [":1:", "needs chosen+rejected"]),
    ('{"instruction": "a", "input": "", "output": "b"}\n', "sft",
     ["data.columns.prompt=instruction", "The field input would be left out."]),
    ('{"text": "a", "x": NaN}\n', "sft", [":1:", "NaN is not JSON"]),
    ("[1, 2]\n", "sft", [":1:", "list", "JSON object"]),
    ("\n\n", "sft", ["the file has no rows"]),
    ('{"text": "a", "x": ' + "9" * 5000 + "}\n", "sft", [":1:", "(Exceeds the limit"]),
    ('{"text": "a", "text": "b"}\n', "sft", [":1:", 'the key "text" appears twice']),
    ('{"a": ' + "[" * 100_000 + "\n", "sft", [":1:", "(maximum recursion depth"]),
    ('{"text": "a"}\n{"text": "b"\n', "sft", [":2:", "at column 13"]),  # the end of the line
    ('{"text": "a\r\n', "sft", [":1:", "at column 10"]),
], ids=range(12))  # fmt: skip
def test_data_file(launch, tmp_path, content, method, words):
    file = tmp_path / "train.jsonl"
    file.write_text(content)
    done = launch("data=jsonl", f"data.path={file}", f"method={method}", "mode=plan")
    assert done.code == 2
    assert [part for part in [str(file), *words] if part not in done.err] == []


def test_a_field_named_as_an_argument_of_trl(launch, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "answer": "b", "completions": []}\n')
    rewards = ["~method.rewards.reasoning_gym", "+method.rewards.accuracy=1"]
    done = launch("data=jsonl", "data.path=a.jsonl", "method=grpo", *rewards, "mode=plan")
    assert (done.code, "a.jsonl:1: has the field completions" in done.err) == (2, True), done.err


@pytest.mark.parametrize(("overrides", "key"), [
    ("data=jsonl data.path=train.jsonl +method.rewards.accuracy=1.0", "accuracy"),
    ("data=jsonl data.path=train.jsonl +method.rewards.regex=1.0", "regex"),
    ("data=jsonl data.path=train.jsonl +method.rewards.regex=1.0 method.reward_pattern=a", None),
    ("data=jsonl data.path=train.jsonl +method.rewards.format=1.0", None),
    ("data=mix 'data.sources=[{path: train.jsonl, weight: 1}]' +method.rewards.accuracy=1.0",
     "accuracy"),
    ("data=mix 'data.sources=[{path: train.jsonl, weight: 0.5}, {path: answers.jsonl, weight: 0.5}]'"
     " +method.rewards.accuracy=1.0", None),
    ("method=evaluate model.path=null data=jsonl data.path=train.jsonl data.heldout_path=answers.jsonl"
     " data.heldout_fraction=null +method.rewards.code_tests=1.0", "code_tests"),
])  # fmt: skip
def test_a_reward_needs_its_column(launch, tmp_path, overrides, key):
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 2)
    (tmp_path / "answers.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    method = ["method=grpo", "~method.rewards.reasoning_gym"] * ("method=" not in overrides)
    done = launch(*method, *shlex.split(overrides), "mode=plan", "hardware=cpu")
    assert done.code == (0 if key is None else 2), done.err
    assert key is None or f"method.rewards.{key}: reads the column" in done.err


@pytest.mark.parametrize(("parameters", "missing"), [
    ("prompts, completions, topic, **columns", None),
    ("completions, topic, weight=1.0", None),
    ("completions, *, log_metric, **_", None),
    ("completions, question, **_", "question"),  # data.columns calls it prompt
    ("prompts, prompt, completions", "prompt"),  # TRL passes prompts only
    ("completions, *, answer, **_", "answer"),
])  # fmt: skip
def test_the_users_reward_needs_columns_of_the_rows(launch, tmp_path, parameters, missing):
    (tmp_path / "mine.py").write_text(f"def score({parameters}): return [1.0 for _ in completions]")
    (tmp_path / "a.jsonl").write_text('{"question": "a", "topic": "b"}\n' * 2)
    data = ["data=jsonl", "data.path=a.jsonl", "data.columns.prompt=question"]
    reward = "method.rewards={mine.score: 1.0}"
    done = launch("method=grpo", *data, reward, "mode=plan", "hardware=cpu")
    assert done.code == (0 if missing is None else 2), done.err
    assert missing is None or f"its parameter {missing} is not a column of data.path" in done.err


def test_held_out_rows_for_selection_need_the_fields_of_training_rows(launch, tmp_path):
    for name, rows in (("train", '{"text": "a"}\n'), ("test", '{"prompt": "a", "answer": "b"}\n')):
        (tmp_path / f"{name}.jsonl").write_text(rows)
    base = "data=jsonl data.path=train.jsonl method.selection.metric=eval_loss mode=plan".split()
    done = launch(*base, "data.heldout_path=test.jsonl")
    assert done.code == 2
    assert "test.jsonl:1: has prompt, answer, but data.heldout_path of method=sft needs" in done.err
    assert launch(*base, "data.heldout_path=train.jsonl").code == 0


def test_an_evaluation_that_trains_its_tokenizer_needs_training_rows(launch, tmp_path):
    (tmp_path / "test.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    evaluation = "hardware=cpu method=evaluate data=jsonl data.path=test.jsonl mode=plan"
    overrides = [*evaluation.split(), "data.heldout_path=test.jsonl"]
    done = launch(*overrides)
    assert done.code == 2
    assert "messages or text or prompt+completion" in done.err
    assert "Use: model.path=<a trained model>." in done.err
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    assert launch(*overrides, "data.path=train.jsonl").code == 0


@pytest.mark.parametrize(("files", "message"), [
    ("", "no config.json"),
    ("config.json", "no *.safetensors"),
    ("config.json pytorch_model.bin", "only a pickle checkpoint (pytorch_model.bin)"),
    ("config.json model.safetensors tokenizer_config.json", "no tokenizer."),
    ("config.json tokenizer.json whole.safetensors cut.safetensors",
     "90 bytes, but its header requires 98."),
    ("config.json tokenizer.json page.safetensors", "but it has no header"),
    ("config.json tokenizer.json whole.safetensors model.safetensors.index.json",
     "cut-2.safetensors: missing"),
])  # fmt: skip
def test_model_directory(launch, tmp_path, files, message):
    model = tmp_path / "model"
    model.mkdir()
    header = b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"__metadata__":{}}'.ljust(74)
    whole = len(header).to_bytes(8, "little") + header + bytes(16)
    index = {"weight_map": {"a": "whole.safetensors", "b": "cut-2.safetensors"}}
    contents = {
        "model.safetensors.index.json": json.dumps(index).encode(),
        "whole.safetensors": whole,
        "model.safetensors": whole,
        "cut.safetensors": whole[:90],
        "page.safetensors": b"<html>not found</html>",
    }
    for name in files.split():
        (model / name).write_bytes(contents.get(name, b"{}"))
    done = launch(f"model.path={model}", "mode=plan")
    assert done.code == 2
    assert message in done.err


@pytest.mark.parametrize("content", ["[]", "[" * 100_000], ids=["list", "deep"])
def test_a_damaged_record_is_not_reported_as_missing(launch, tmp_path, capfd, content):
    json_files.write_text(tmp_path / "old/record.json", content)
    done = launch(f"resume={tmp_path / 'old'}", "hardware=cpu")
    assert done.code == 2
    assert f"resume={tmp_path / 'old'}: its record.json is damaged" in done.err
    assert reproduce.main([str(tmp_path / "old")]) == 2
    assert f"{tmp_path / 'old'}: its record.json is damaged" in capfd.readouterr().err


# content of a file | words of the message
IN_A_FILE = r"""
seeed: 1 | seeed | Did you mean seed
topology: {num_gpu: 1} | num_gpu | Did you mean topology.num_gpus
seed: abc | In 'experiment/mine': seed: Value 'abc' | Use: seed=<a whole number>.
runtime: {network: brige} | runtime.network: Invalid value 'brige' | Did you mean bridge?
data: {tasks: chain_sum} | data.tasks | Use: data.tasks=[{name: chain_sum, level
seed: { | while parsing
defaults: [{override /hardware: mi530x}] | hardware=mi530x | Did you mean mi350x
"""


@pytest.mark.parametrize("line", IN_A_FILE.strip().splitlines())
def test_mistakes_inside_an_experiment_file(launch, tmp_path, line):
    """Repeat the mistakes in a user's file, which has a path in place of a name."""
    content, *words = line.split(" | ")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(f"# @package _global_\n{content}\n")
    done = launch(f"experiment={tmp_path}/experiment/mine.yaml", "mode=plan")
    assert done.code == 2
    assert "Traceback" not in done.err
    assert [part for part in words if part not in done.err] == []


def test_an_experiment_file_is_one_that_hydra_finds(launch, tmp_path):
    folder = tmp_path / "experiment"
    folder.mkdir()
    for name in ("1", "mine", "other", "quickstart"):
        (folder / f"{name}.yaml").write_text("# @package _global_\nseed: 7\n")
    linked = folder / "linked.yaml"
    linked.symlink_to(folder / "mine.yaml")
    (folder / "short.yml").touch()
    for value in (linked, f"'{linked}'"):
        assert launch(f"experiment={value}", "mode=plan").code == 0
    for words, part in {
        f"experiment={folder}/short.yml": "rename the file",
        f"experiment={folder}/1.yaml": "rename the file",
        f"experiment={folder}/quickstart.yaml": "conf/experiment has a quickstart.yaml too",
        f"experiment={folder}/mine.yaml experiment={folder}/other.yaml": "only one file",
        f"experiment={folder}/missing.yaml": "no such file",
    }.items():
        done = launch(*words.split(), "mode=plan")
        assert (done.code, part in done.err) == (2, True), words


def test_a_missing_directory_of_rows(launch, tmp_path):
    done = launch("data=hub", f"data.hub_id={tmp_path}/rows", "mode=plan")
    assert (done.code, "no such directory" in done.err) == (2, True)
