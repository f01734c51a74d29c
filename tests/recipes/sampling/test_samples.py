"""Test the selection of samples and prompts, pass@k, and files of batches."""

import importlib.metadata
import json
import math
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from launch.core.errors import UserError
from launch.core.json_files import plain
from launch.schema import Data
from recipes.data.data_load import load
from recipes.rank.ranks import single_gpu_env
from recipes.rewards.verifier import Verdict
from recipes.sample import SCORED, SELECTED, SampleConfig, prompts, write_results
from recipes.sampling import sample_keys
from recipes.sampling.batches import Log, Store, run_batch
from recipes.sampling.generation import TOO_LONG, Sample
from recipes.sampling.sample_keys import samples_key, verdicts_key
from recipes.sampling.samples import choose_prompts, select

ERRORS = ("rank", "errors")  # has only messages


def rules(threshold=0.0, **changes):
    changes = {"finished_only": False, "deduplicate": False, "per_prompt": None, **changes}
    return SampleConfig("out", threshold=threshold, **changes)


def samples(*of_prompts):
    """Return samples from a list [(text, score, finished), ...] for each prompt."""
    return [
        {"prompt_index": p, "sample_index": n, "text": text, "score": score, "finished": finished}
        for p, drawn in enumerate(of_prompts)
        for n, (text, score, finished) in enumerate(drawn)
    ]


def judged(*of_prompts, num_tokens=1):
    return [s | {"num_tokens": num_tokens, "error": None} for s in samples(*of_prompts)]


def places(selected):
    return [(s["prompt_index"], s["sample_index"]) for s in selected]


def test_top_fraction_and_empty_texts():
    drawn = samples([("a", 0.5, True), ("b", 1.0, True), ("b", 1.0, True)], [("a", 0.0, True)])
    for fraction, chosen in ((1.0, 4), (0.4, 2), (0.01, 1)):  # rounded up
        best = select(drawn, rules(top_fraction=fraction))
        assert len(best) == chosen
        assert places(best)[0] == ((0, 0) if fraction == 1.0 else (0, 1))
    empty = samples([("", 1.0, False), ("", 1.0, True), (" ", 1.0, False)])
    assert places(select(empty, rules())) == [(0, 1), (0, 2)]


def test_select_best_of_each_prompt_first():
    drawn = samples(*[[("a", 1.0, True), ("b", 1.0, True)]] * 6)
    halves = places(select(drawn, rules(top_fraction=0.5)))
    assert halves == [(p, 0) for p in range(6)]


@pytest.mark.parametrize(("changes", "chosen"), [
    ({}, [0, 1, 2, 3, 4]),
    ({"threshold": 0.5}, [0, 1, 2, 4]),
    ({"finished_only": True}, [0, 1, 3, 4]),
    ({"deduplicate": True}, [1, 2, 3]),  # among equal texts, the best and then the first
    ({"per_prompt": 2}, [1, 2]),
    ({"deduplicate": True, "finished_only": True, "per_prompt": 1}, [1]),
])  # fmt: skip
def test_each_rule(changes, chosen):
    drawn = [("a", 0.5, True), ("a ", 1.0, True), ("b", 1.0, False), ("c", 0.0, True)]
    pool = samples([*drawn, ("a", 0.5, True)])
    assert [n for _, n in places(select(pool, rules(**changes)))] == chosen


def test_only_full_scores_pass(tmp_path):
    """Count correct samples like an evaluation, although threshold=0 selects all samples."""
    drawn = judged([("a", 0.0, True), ("b", 0.5, True)], [("c", 1.0, True), ("d", 0.9, True)])
    rows = [{"prompt": "1+1="}, {"prompt": "1+2="}]
    result = write_results(tmp_path, SampleConfig(str(tmp_path), threshold=0.0), rows, drawn)
    assert (result["num_selected"], result["pass_rate"]) == (4, 0.25)
    assert result["pass_at_k"] == {"1": 0.25, "2": 0.5}
    assert result["by_level"]["0"]["pass_rate"] == 0.25


def test_prompts_of_a_cycle():
    rows = [{"prompt": str(n), "level": n % 3} for n in range(60)]
    levels = lambda *choice: [row["level"] for row in choose_prompts(rows, *choice)]  # noqa: E731
    assert levels(10, {0: 0.0, 1: 1.0, 2: 0.0}, 0) == [1] * 10
    mixed = levels(20, {0: 0.15, 1: 0.15, 2: 0.7}, 0)
    assert [mixed.count(level) for level in range(3)] == [3, 3, 14]
    assert len(levels(None, None, 0)) == 60
    shares = levels(None, {0: 0.15, 1: 0.15, 2: 0.7}, 0)
    assert [shares.count(n) for n in range(3)] == [4, 4, 20], "shares apply without num_prompts too"
    assert levels(100, {2: 1.0}, 0) == [2] * 20, "all rows of the level"
    assert choose_prompts(rows, 5, None, 0) == choose_prompts(rows[::-1], 5, None, 0)
    assert choose_prompts(rows, 5, None, 0) != choose_prompts(rows, 5, None, 1), "another cycle"


def sampled_levels(tmp_path, curriculum, levels=(0, 1, 2), rates=None, cycle=2):
    """Return the number of prompts of each level that a cycle of method=sample samples."""
    path, result = tmp_path / "rows.jsonl", tmp_path / "result.json"
    drawn = [{"prompt": str(n), "level": levels[n % len(levels)]} for n in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in drawn))
    by_level = {str(level): {"pass_rate": rate} for level, rate in (rates or {}).items()}
    result.write_text(json.dumps({"by_level": by_level}))
    data = {"path": str(path), "curriculum": curriculum}
    data["pass_rates"] = str(result) if rates else None
    data = OmegaConf.merge(plain(Data(name="jsonl", kind="jsonl")), data)
    args = SampleConfig(str(tmp_path), num_prompts=10, cycle=cycle, num_cycles=3)
    chosen = [row["level"] for row in prompts(OmegaConf.create({"data": data}), args)]
    return [chosen.count(level) for level in (0, 1, 2)]


def test_curriculum_chooses_levels(tmp_path):
    mixed = [sampled_levels(tmp_path, "mixed", cycle=cycle) for cycle in (1, 2, 3)]
    assert mixed == [[10, 0, 0], [3, 7, 0], [2, 1, 7]]
    adaptive = sampled_levels(tmp_path, "adaptive", rates={0: 1.0, 1: 0.5, 2: 0.0})
    assert adaptive == [2, 7, 1], "shares 0.05, 0.25 and 0.05"
    for levels, message in (((1,), "data.curriculum=mixed"), (("easy", "hard"), "easy")):
        with pytest.raises(UserError, match=message):
            sampled_levels(tmp_path, "mixed", levels=levels)


def test_batches_of_another_run_are_copied(tmp_path):
    old = Store(tmp_path / "old/samples/abc")
    new = Store(tmp_path / "new/samples/abc", old.folder)
    old.put(3, [{"text": "é\u2028"}])
    assert new.get(2) is None
    assert new.get(3) == old.get(3) == [{"text": "é\u2028"}]
    files = [store.folder / "000003.jsonl" for store in (old, new)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert old.seed_of(3) == new.seed_of(3) != new.seed_of(4)
    assert Store(tmp_path / "other").seed_of(3) != new.seed_of(3)
    with pytest.raises(ValueError, match="JSON"):  # files are complete or absent
        new.put(4, [{"score": 1.0}, {"score": math.nan}])
    assert not new.has(4)
    for damage in ("[1]\n", '{"text": "a"}\n{"te', "\0" * 9):
        (old.folder / "000005.jsonl").write_text(damage)
        assert (new.has(5), new.get(5)) == (False, None)


def test_scored_samples_make_preference_pairs(tmp_path):
    rows = [{"prompt": "1+1=", "level": 0}, {"prompt": "1+2=", "level": 0}]
    drawn = judged([("2", 1.0, True), ("3", 0.0, True)], [("4", 0.0, False)])
    write_results(tmp_path, SampleConfig(str(tmp_path)), rows, drawn)
    scored, selected = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in (SCORED, SELECTED)
    )
    assert [row["completion"] for row in selected] == ["2"]
    figures = [(row["completion"], row["score"], row["finished"]) for row in scored]
    assert figures == [("2", 1.0, True), ("3", 0.0, True), ("4", 0.0, False)]
    data = OmegaConf.merge(
        plain(Data(name="samples", kind="samples")), {"path": str(tmp_path / SCORED)}
    )
    pairs = load(data, "dpo").rows.to_list()
    assert pairs == [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}]


def test_prompts_that_fill_the_context_score_zero(tmp_path):
    sampled, verdicts = Store(tmp_path / "samples/a"), Store(tmp_path / "verdicts/a")
    args = SampleConfig(str(tmp_path), samples_per_prompt=1, threshold=0.5)
    verifier = lambda prompts, texts, columns: [Verdict(1.0, {"length": 1.0}, None) for _ in texts]  # noqa: E731
    generator = lambda prompts, seed: [TOO_LONG, Sample("", 1, True)]  # noqa: E731
    log, rows = Log(tmp_path, "pass_rate"), [{"prompt": "long"}, {"prompt": "short"}]
    run_batch(rows, 0, args, generator, verifier, sampled, verdicts, log)
    assert [verdict["score"] for verdict in verdicts.get(0)] == [0.0, 1.0]
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["pass_rate"] == 0.5


@pytest.mark.parametrize(("of_prompt", "num_tokens", "words"), [
    ([("a", 0.5, True), ("b", 0.0, False)], 1, ["0 reach threshold=1,", "best score is 0.5"]),
    ([("a", 1.0, False)], 1, ["1 reach threshold=1,", "1 reached the length limit"]),
    ([("", 0.0, False)], 0, ["0 reached the length limit", "1 have a prompt"]),
])  # fmt: skip
def test_nothing_selected_explains_the_limits(tmp_path, of_prompt, num_tokens, words):
    unusable = judged(of_prompt, num_tokens=num_tokens)
    with pytest.raises(UserError, match="is selected: ") as error:
        write_results(tmp_path, SampleConfig(str(tmp_path)), [{"prompt": "1+1="}], unusable)
    assert [word for word in words if word not in str(error.value)] == []
    assert not (tmp_path / SELECTED).exists()
    assert (tmp_path / SCORED).exists()


def test_samples_depend_on_the_chat_template_and_on_vllms_arguments(tmp_path, monkeypatch):
    template = tmp_path / "own.jinja"
    config = OmegaConf.create({
        "model": {"chat_template": None}, "data": {"chat_template": str(template)},
        "precision": {"compute": "fp32", "weights": "fp32"}, "hardware": {"attention": "sdpa"},
        "topology": {"server_max_length": None, "server_args": {}},
    })  # fmt: skip
    keys = []
    for text in ("{{ messages }}", "{{ messages[0] }}"):
        template.write_text(text)
        keys.append(samples_key(config, SampleConfig(str(tmp_path)), [{"prompt": "1"}], "model"))
    thinks = SampleConfig(str(tmp_path), chat_template_kwargs={"enable_thinking": False})
    keys.append(samples_key(config, thinks, [{"prompt": "1"}], "model"))
    assert keys[0] != keys[1] != keys.pop()
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "1")
    for engine, args in (("transformers", {}), ("vllm", {}), ("vllm", {"kv_cache_dtype": "fp8"})):
        config.topology.server_args = args
        arguments = SampleConfig(str(tmp_path), engine=engine)
        keys.append(samples_key(config, arguments, [{"prompt": "1"}], "model")["engine"])
    assert keys[2:] == [None, [None, {}], [None, {"kv_cache_dtype": "fp8"}]]


def test_verdicts_depend_on_the_sandbox_image_and_own_rewards(tmp_path, monkeypatch):
    def key(reward, image=None):
        method = {"rewards": {reward: 1.0}, "reward_chain": [], "sandbox": {"time_s": 5.0}}
        return verdicts_key(OmegaConf.create({"method": method, "sandbox_image": image}), {})

    assert key("code_tests", "sha256:1") != key("code_tests", "sha256:2")
    assert key("length", "sha256:1") == key("length", "sha256:2"), "no code runs"
    monkeypatch.syspath_prepend(tmp_path)
    keys = []
    for value in ("1.0", "0.5"):
        code = f"def f(prompts, **columns):\n    return [{value}] * len(prompts)\n"
        (tmp_path / "a_reward_of_my_own.py").write_text(code)
        keys.append(key("a_reward_of_my_own.f")["code"])
    changed = [name for name, sha in keys[0].items() if keys[1][name] != sha]
    assert changed == ["a_reward_of_my_own.f"]


def test_verdicts_depend_on_all_code_of_rewards():
    """Check that the key includes all modules that the verifiers import."""
    key = verdicts_key(OmegaConf.create({"method": {"rewards": {"accuracy": 1.0}}}), {})
    recipes, seen = Path(sample_keys.__file__).parents[1], set()
    modules = [("rewards", "verifier"), ("rewards", "verify_worker"), ("data", "tasks")]
    while modules:
        folder, name = modules.pop()
        seen.add((folder, name))
        text = (recipes / folder / f"{name}.py").read_text()
        imported = re.findall(r"from recipes\.(\w+)(?:\.| import )(\w+)", text)
        modules += [module for module in imported if module not in seen and module != ERRORS]
    assert {f"{name}.py" for _, name in seen} <= set(key["code"])
    assert ("data", "cups") in seen


def test_vllm_sees_only_the_gpu_of_its_rank():
    variables = single_gpu_env({"LOCAL_RANK": "2", "HIP_VISIBLE_DEVICES": "4,5,6,7"})
    assert variables == {"HIP_VISIBLE_DEVICES": "6", "LOCAL_RANK": "0"}
    assert single_gpu_env({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "3"}) == {"LOCAL_RANK": "0"}
    assert single_gpu_env({"LOCAL_RANK": "1"}) == {}
