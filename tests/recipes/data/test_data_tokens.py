"""Test that tokens and labels equal TRL's for all row formats and numbers of processes."""

import copy
import json
import signal

import pytest
from datasets import Dataset
from omegaconf import OmegaConf
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from launch.core.errors import UserError
from launch.core.json_files import plain
from launch.schema import Data
from recipes import dpo, sft
from recipes.data import data_tokens
from recipes.data.data_load import Loaded
from recipes.data.data_tokens import Progress, map_rows
from recipes.models.model_build import train_tokenizer
from recipes.preview import one_layer

NUMBERS = range(7)
# The template renders options and tools before the messages, and marks the answers.
TEMPLATE = (
    "{% if tools %}{{ tools[0]['name'] }}{% endif %}{{ mood or '' }}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ '<|user|>' + m['content'] }}{% endif %}{% endfor %}"
)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


TEXT = [{"text": f"{n} plus {n} is {10**n}" + "<|end|>" * (n % 2)} for n in NUMBERS]
# tokens span the boundary of prompt and completion
PROMPTS = [{"prompt": f"{n} plu", "completion": f"s {'plus ' * n}" if n else ""} for n in NUMBERS]
MESSAGES = [
    {"messages": [user(f"{n} plus"), assistant("plus"), user("and"), assistant(f"{10**n}")]}
    for n in NUMBERS
]
TURNS = [{"prompt": [user(f"{n} plus")], "completion": [assistant(f"{10**n}")]} for n in NUMBERS]
EXTRAS = [
    {"tools": json.dumps([{"name": f"plus{n}"}]), "chat_template_kwargs": {"mood": "plus " * n}}
    for n in NUMBERS
]
ANSWERS = (("chosen", "1"), ("rejected", "2 2"))
PAIRS = [
    {"prompt": f"{n} plu", "chosen": f"s {n}<|end|>", "rejected": f"s {'plus ' * n}"}
    for n in NUMBERS
]
PAIRED_TURNS = [
    {side: [user(f"{n} plus"), assistant(text)] for side, text in ANSWERS} for n in NUMBERS
]
TRAINERS = {
    "sft": (SFTConfig, SFTTrainer, sft.Trainer),
    "dpo": (DPOConfig, DPOTrainer, dpo.Trainer),
}


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = train_tokenizer(["1 plus 2 is plus 3"] * 3, 300)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def prepared(tmp_path, method, tokenizer, rows, streaming=False, **settings):
    """Return the rows of our trainer and of TRL's trainer."""
    arguments, theirs, ours = TRAINERS[method]
    settings = {"max_length": 64, "use_cpu": True, "bf16": False, "report_to": "none", **settings}
    args = arguments(output_dir=str(tmp_path), **settings)
    config = OmegaConf.create(
        {
            "run_dir": str(tmp_path),
            "data_cache": {"directory": str(tmp_path / "cache"), "key": "k"},
            "data": plain(Data(name="jsonl", kind="jsonl")),
            "model": {"name": "tiny", "max_positions": 1024},
            "method": {"name": method},
            "topology": {"strategy": "none"},
            "hardware": {"packed_attention": "sdpa"},
            "trainer_args": settings,
        }
    )
    table = Dataset.from_list(rows)
    table = table.to_iterable_dataset() if streaming else table
    names = ["model", *(["ref_model"] if method == "dpo" else [])]
    models = {name: one_layer(tokenizer) for name in names}
    shared = {"args": args, "processing_class": tokenizer, **models}
    own = theirs(train_dataset=table, **shared).train_dataset
    return ours(config=config, loaded=Loaded(table), **shared).train_dataset, own


@pytest.mark.parametrize(("rows", "settings"), [
    (TEXT, {}),
    (PROMPTS, {}),
    (PROMPTS, {"completion_only_loss": False}),
    (PROMPTS, {"max_length": 6}),
    (PROMPTS, {"max_length": 6, "truncation_mode": "keep_end"}),
    (PROMPTS, {"max_length": 8, "packing": True, "packing_strategy": "wrapped"}),
    (PROMPTS, {"max_length": 16, "packing": True}),
    (MESSAGES, {"assistant_only_loss": True}),
    ([row | (EXTRAS[n] if n % 2 else {"tools": None}) for n, row in enumerate(MESSAGES)], {}),
    ([row | extra for row, extra in zip(MESSAGES, EXTRAS, strict=True)],
     {"assistant_only_loss": True, "dataset_num_proc": 2}),
    (TURNS, {"assistant_only_loss": True}),
    ([row | extra for row, extra in zip(TURNS, EXTRAS, strict=True)], {}),
])  # fmt: skip
def test_sft_tokens_and_labels_equal_trls(tmp_path, tokenizer, rows, settings):
    ours, theirs = prepared(tmp_path, "sft", tokenizer, rows, **settings)
    columns = {"input_ids", "labels", "seq_lengths"}.intersection(theirs.column_names)
    assert ours.select_columns([*columns]).to_list() == theirs.select_columns([*columns]).to_list()


def test_truncation_and_padding_of_the_tokenizer_are_off(tokenizer):
    cutting = copy.deepcopy(tokenizer)
    cutting.backend_tokenizer.enable_truncation(2)
    cutting.backend_tokenizer.enable_padding(length=99)
    batch = {"text": [row["text"] for row in TEXT]}
    tokens, whole = (
        data_tokens.Tokens(each, None, "text", False, False)(batch) for each in (cutting, tokenizer)
    )
    assert tokens == whole


@pytest.mark.parametrize(
    "rows",
    [PAIRS, PAIRED_TURNS, [row | extra for row, extra in zip(PAIRED_TURNS, EXTRAS, strict=True)]],
)
def test_pair_tokens_equal_trls(tmp_path, tokenizer, rows):
    ours, theirs = prepared(tmp_path, "dpo", tokenizer, rows)
    columns = ["prompt_ids", "chosen_ids", "rejected_ids"]
    assert ours.select_columns(columns).to_list() == theirs.select_columns(columns).to_list()


def test_templates_must_mark_answers(tokenizer):
    rows = [[user("1"), assistant("2")], [user("1 plus"), user("2")]]
    with pytest.raises(UserError, match="marks no token to learn"):
        data_tokens.Tokens(tokenizer, None, "text", False, True)({"messages": rows})


def test_turns_of_weight_0_are_not_learned(tokenizer):
    row = [user("1"), {**assistant("2"), "weight": 0}, user("3"), {**assistant("4"), "weight": 1}]
    batch, tokens = {"messages": [row]}, data_tokens.Tokens(tokenizer, None, "text", False, True)
    (labels,) = tokens(batch)["labels"]
    assert tokenizer.decode([n for n in labels if n != data_tokens.IGNORED]) == "4<|end|>"
    pair = {"prompt": [row[:1]], "chosen": [row[1:]], "rejected": [[assistant("5")]]}
    unmasked = data_tokens.Tokens(tokenizer, None, "text", True, False)
    merged = copy.deepcopy(tokenizer)
    merged.chat_template = "{% generation %}{{ messages[0].content }}{% endgeneration %}"
    for make, rows in (
        (unmasked, batch),
        (unmasked, {"prompt": [row[:1]], "completion": [row[1:]]}),
        (data_tokens.PairTokens(tokenizer), pair),
        (data_tokens.Tokens(merged, None, "text", False, True), batch),
    ):
        with pytest.raises(UserError, match="weight 0"):
            make(rows)
    in_prompt = {"prompt": [row[:3]], "completion": [row[3:]]}
    (labels,) = unmasked(in_prompt)["labels"]
    assert tokenizer.decode([n for n in labels if n != data_tokens.IGNORED]) == "4<|end|>"


@pytest.mark.parametrize(("method", "rows", "settings"), [
    ("sft", PROMPTS, {"max_length": 6}),
    ("sft", PROMPTS, {"max_length": 16, "packing": True}),
    ("sft", MESSAGES, {"assistant_only_loss": True}),
    ("dpo", PAIRED_TURNS, {}),
])  # fmt: skip
def test_tokens_of_a_stream_equal_those_of_a_table(tmp_path, tokenizer, method, rows, settings):
    settings = {**settings, "max_steps": 1}
    streamed, trls = prepared(tmp_path, method, tokenizer, rows, True, **settings)
    table, _ = prepared(tmp_path, method, tokenizer, rows, **settings)
    first, expected = next(iter(streamed)), next(iter(trls))
    names = {"input_ids", "labels", "prompt_ids", "chosen_ids", "rejected_ids"} & {*first}
    assert names
    for name in names:
        assert first[name] == table[0][name] == expected[name]


def test_several_processes_keep_the_order_of_rows(tmp_path):
    rows = Dataset.from_dict({"n": list(range(10)), "other": ["x"] * 10})

    def doubled(batch):
        return {"twice": [2 * n for n in batch["n"]]}

    (tmp_path / "key").mkdir()
    file, progress = tmp_path / "key/rows.arrow", Progress("doubling", tmp_path / "heartbeat")
    tokens = map_rows(rows, doubled, ("n",), file, progress, num_processes=3)
    assert tokens.to_list() == [{"other": "x", "twice": 2 * n} for n in range(10)]
    assert len(list((tmp_path / "key").glob("rows*.arrow"))) == 3


def test_errors_of_worker_processes_are_raised(tmp_path):
    """End processes that inherit a run's SIGTERM handler, which only records the signal."""

    def make(batch):
        if 9 in batch["n"]:
            raise UserError("nine")
        return batch

    rows, progress = Dataset.from_dict({"n": range(10)}), Progress("x", tmp_path / "heartbeat")
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with pytest.raises(UserError, match="nine"):
            map_rows(rows, make, (), None, progress, num_processes=2)
    finally:
        signal.signal(signal.SIGTERM, before)
