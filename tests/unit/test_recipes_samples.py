"""Which samples are kept, which prompts a cycle gets, pass@k, and files of batches that are never taken for other work."""

import itertools
import json
import math

import pytest
from omegaconf import OmegaConf

from launch.plan import plain
from launch.schema import Data
from recipes.common.batches import Store, samples_key, write_rows
from recipes.common.data import load
from recipes.common.errors import UserError
from recipes.common.ranks import own_gpu
from recipes.common.samples import Selection, by_level, choose_prompts, level_weights, pass_curve, select
from recipes.sample import SCORED, SELECTED, SampleConfig, finish

ALL = Selection(threshold=0.0, finished_only=False, deduplicate=False, per_prompt=None, top_fraction=1.0)


def samples(*of_prompts):
    """`samples([(text, score, finished), ...], ...)`: a list for each prompt."""
    return [
        {"prompt_index": p, "sample_index": n, "text": text, "score": score, "finished": finished}
        for p, given in enumerate(of_prompts)
        for n, (text, score, finished) in enumerate(given)
    ]


def places(kept):
    return [(s["prompt_index"], s["sample_index"]) for s in kept]


def test_each_rule_alone():
    given = samples([("a", 0.5, True), ("b ", 1.0, True), ("b", 1.0, True), ("c", 1.0, False)], [("a", 0.0, True)])
    assert places(select(given, ALL)) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
    assert places(select(given, Selection(0.5, False, False, None, 1.0))) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert places(select(given, Selection(0.0, True, False, None, 1.0))) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert places(select(given, Selection(0.0, False, True, None, 1.0))) == [(0, 0), (0, 1), (0, 3), (1, 0)], "of equal texts the first"
    assert places(select(given, Selection(0.0, False, False, 2, 1.0))) == [(0, 1), (0, 2), (1, 0)], "the best two of a prompt"
    assert places(select(given, Selection(0.0, False, False, None, 0.4))) == [(0, 1), (0, 2)], "the best two of five"
    assert select(given, Selection(1.1, False, False, None, 1.0)) == []


def test_a_prompts_best_comes_before_any_prompts_second():
    given = samples(*[[("a", 1.0, True), ("b", 1.0, True)]] * 6)
    assert places(select(given, Selection(1.0, True, True, None, 0.5))) == [(p, 0) for p in range(6)]


def test_all_rules_together_against_the_definition():
    """Every way in which two prompts' three samples can score, end and repeat, under every combination of rules."""
    rules = [Selection(t, f, d, q, 1.0) for t, f, d, q in itertools.product((0.5, 1.0), (True, False), (True, False), (None, 1, 2))]
    kinds = [(text, score, finished) for text in "ab" for score in (0.0, 0.5, 1.0) for finished in (True, False)]
    for given in itertools.islice(itertools.product(kinds, repeat=3), 0, None, 11):
        made = samples(list(given), list(given[::-1]))
        for rule in rules:
            found = set(places(select(made, rule)))
            for prompt in (0, 1):
                mine = [s for s in made if s["prompt_index"] == prompt]
                able = [s for s in mine if s["score"] >= rule.threshold and (s["finished"] or not rule.finished_only)]
                better = lambda a, b: (-a["score"], a["sample_index"]) < (-b["score"], b["sample_index"])  # noqa: E731
                if rule.deduplicate:
                    able = [s for s in able if not any(o["text"] == s["text"] and better(o, s) for o in able)]
                able = [s for s in able if rule.per_prompt is None or sum(better(o, s) for o in able) < rule.per_prompt]
                assert {place for place in found if place[0] == prompt} == set(places(able))


def test_the_order_of_files_changes_nothing():
    given = samples([("a", 1.0, True), ("b", 0.5, True)], [("c", 1.0, True), ("d", 1.0, True)])
    for order in itertools.permutations(given):
        assert select(order, Selection(0.5, True, True, 2, 0.6)) == select(given, Selection(0.5, True, True, 2, 0.6))


def test_curve_and_levels():
    given = samples(*[[("a", float(n < right), True) for n in range(6)] for right in (6, 3, 0)])
    curve = pass_curve(given, 1.0)
    assert list(curve) == ["1", "2", "4", "6"]
    assert curve["1"] == pytest.approx(0.5)
    assert curve["6"] == pytest.approx(2 / 3)
    found = by_level(given, [{"level": 2}, {"level": 2}, {}], 1.0)
    assert found == {"0": {"pass_rate": 0.0, "num_prompts": 1}, "2": {"pass_rate": 0.75, "num_prompts": 2}}


@pytest.mark.parametrize(
    ("curriculum", "progress", "rates", "weights"),
    [
        ("progressive", 1 / 3, {}, [1, 0, 0]),
        ("progressive", 2 / 3, {}, [0, 1, 0]),
        ("progressive", 1.0, {}, [0, 0, 1]),
        ("progressive", 1 / 6, {}, [1, 0, 0]),
        ("mixed", 1 / 3, {}, [1, 0, 0]),
        ("mixed", 2 / 3, {}, [0.3, 0.7, 0]),
        ("mixed", 1.0, {}, [0.15, 0.15, 0.7]),
        ("adaptive", 1.0, {}, [1 / 3, 1 / 3, 1 / 3]),
        ("adaptive", 0.1, {"0": 1.0, "1": 0.5, "2": 0.0}, [0.05 / 0.35, 0.25 / 0.35, 0.05 / 0.35]),
        ("adaptive", 0.1, {"0": 0.5, "1": 0.9}, [0.25 / 0.59, 0.09 / 0.59, 0.25 / 0.59]),
    ],
)
def test_shares_of_levels(curriculum, progress, rates, weights):
    assert list(level_weights(["0", "1", "2"], curriculum, progress, rates).values()) == pytest.approx(weights)


def test_prompts_of_a_cycle():
    rows = [{"prompt": str(n), "level": n % 3} for n in range(60)]
    levels = lambda *given: [row["level"] for row in choose_prompts(rows, *given)]  # noqa: E731
    assert levels(10, "progressive", 2 / 3, {}, 0) == [1] * 10
    mixed = levels(20, "mixed", 1.0, {}, 0)
    assert [mixed.count(level) for level in range(3)] == [3, 3, 14]
    assert len(levels(None, "none", 1.0, {}, 0)) == 60
    assert [levels(None, "mixed", 1.0, {}, 0).count(level) for level in range(3)] == [4, 4, 20], "shares stay, where all are taken"
    assert levels(100, "progressive", 1.0, {}, 0) == [2] * 20, "all that the level has"
    assert choose_prompts(rows, 5, "none", 1.0, {}, 0) == choose_prompts(rows[::-1], 5, "none", 1.0, {}, 0)
    assert choose_prompts(rows, 5, "none", 1.0, {}, 0) != choose_prompts(rows, 5, "none", 1.0, {}, 1), "other prompts in another cycle"
    with pytest.raises(UserError, match="all rows are of one level"):
        choose_prompts(rows[::3], 5, "mixed", 1.0, {}, 0)
    with pytest.raises(UserError, match="curriculum=steep"):
        choose_prompts(rows, 5, "steep", 1.0, {}, 0)


def test_batches_of_another_run_become_ones_own(tmp_path):
    old, new = Store(tmp_path / "old/samples/abc"), Store(tmp_path / "new/samples/abc", tmp_path / "old/samples/abc")
    old.put(3, [{"text": "é\u2028"}])
    assert new.get(2) is None
    assert new.get(3) == old.get(3) == [{"text": "é\u2028"}]
    assert (tmp_path / "new/samples/abc/000003.jsonl").read_bytes() == (tmp_path / "old/samples/abc/000003.jsonl").read_bytes()
    assert old.seed_of(3) == new.seed_of(3) != new.seed_of(4)
    assert Store(tmp_path / "other").seed_of(3) != new.seed_of(3)


def test_a_file_is_whole_or_not_there(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_rows(tmp_path / "a.jsonl", [{"score": 1.0}, {"score": math.nan}])
    assert not (tmp_path / "a.jsonl").exists()
    write_rows(tmp_path / "a.jsonl", [{"score": 1.0}])
    assert json.loads((tmp_path / "a.jsonl").read_text()) == {"score": 1.0}


def test_every_sample_is_left_for_preference_pairs(tmp_path):
    rows = [{"prompt": "1+1=", "level": 0}, {"prompt": "1+2=", "level": 0}]
    given = [s | {"num_tokens": 1, "error": None} for s in samples([("2", 1.0, True), ("3", 0.0, True)], [("4", 0.0, False)])]
    finish(tmp_path, SampleConfig(str(tmp_path)), rows, given)
    written = {name: [json.loads(line) for line in (tmp_path / name).read_text().splitlines()] for name in (SCORED, SELECTED)}
    assert [row["completion"] for row in written[SELECTED]] == ["2"]
    assert [(row["completion"], row["score"], row["finished"]) for row in written[SCORED]] == [
        ("2", 1.0, True),
        ("3", 0.0, True),
        ("4", 0.0, False),
    ]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')  # no sample, beside them in a run
    pairs = load(OmegaConf.merge(plain(Data(name="samples", kind="samples")), {"path": str(tmp_path)}), "dpo").rows.to_list()
    assert pairs == [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}]


def test_a_chat_template_of_the_users_is_part_of_what_is_sampled(tmp_path):
    template = tmp_path / "own.jinja"
    config = OmegaConf.create({
        "model": {"chat_template": None}, "data": {"chat_template": str(template)},
        "precision": {"compute": "fp32", "weights": "fp32"}, "hardware": {"attention": "sdpa"},
    })  # fmt: skip
    keys = []
    for text in ("{{ messages }}", "{{ messages[0] }}"):
        template.write_text(text)
        keys.append(samples_key(config, SampleConfig(str(tmp_path)), [{"prompt": "1"}], "model"))
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"reuse": "/no/such/run"}, "reuse=/no/such/run: no such directory"),
        ({"num_cycles": 0}, "num_cycles=0: it must be at least 1"),
        ({"cycle": 3, "num_cycles": 2}, "cycle=3: it is one of"),
    ],
)
def test_arguments_that_would_be_ignored_or_fail_later_are_refused(given, words):
    with pytest.raises(UserError, match=words):
        SampleConfig("out", **given)


def test_a_batch_that_is_not_there_is_never_passed_over(tmp_path):
    with pytest.raises(UserError, match="batch 2 is done, and not in"):
        Store(tmp_path / "abc").finished(2)


def test_each_rank_shows_vllm_its_own_gpu():
    assert own_gpu({"LOCAL_RANK": "2", "HIP_VISIBLE_DEVICES": "4,5,6,7"}) == {"HIP_VISIBLE_DEVICES": "6", "LOCAL_RANK": "0"}
    assert own_gpu({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "3"}) == {"LOCAL_RANK": "0"}
    assert own_gpu({"LOCAL_RANK": "1"}) == {}
