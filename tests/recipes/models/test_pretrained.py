"""Test model directories whose files do not agree, and what is repaired when a model is loaded."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from transformers import GenerationConfig

from launch.core.errors import UserError
from recipes.models.model_build import CHAT_TEMPLATE, END, build_model, build_tokenizer
from tests.helpers.exports import write_model
from tests.recipes.rank.test_program import config

GREEDY = {"do_sample": False, "temperature": 0.6, "top_p": 0.9}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return the files of a whole model: name -> content."""
    folder = write_model(tmp_path_factory.mktemp("model"))
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def settings(tmp_path, files):
    """Return settings(file=changes): the configuration of a run whose model has changed files."""

    def write(**changes):
        folder = tmp_path / "model"
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        for name, values in changes.items():
            file = folder / f"{name}.json"
            merged = json.loads(file.read_text()) | values
            merged = {key: value for key, value in merged.items() if value is not ...}
            file.write_text(json.dumps(merged))
        content = config(tmp_path, path=str(folder), init="pretrained")
        return OmegaConf.merge(content, {"method": {"kind": "trainer", "name": "sft"}})

    return write


@pytest.mark.parametrize(("generation", "kept"), [
    (GREEDY, {"do_sample": False, "temperature": None, "top_p": None}),
    ({"early_stopping": True, "length_penalty": 2.0}, {"early_stopping": None}),
    ({**GREEDY, "do_sample": True}, {"do_sample": True, "temperature": 0.6, "top_p": 0.9}),
])  # fmt: skip
def test_a_generation_config_that_cannot_be_saved_is_repaired(settings, tmp_path, generation, kept):
    model = build_model(settings(generation_config=generation))
    model.save_pretrained(tmp_path / "saved")
    saved = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert {name: getattr(saved, name) for name in kept} == kept
    assert saved.eos_token_id == model.generation_config.eos_token_id is not None


# changed values of files | words of the message
@pytest.mark.parametrize(("changes", "words"), [
    ({"config": {"model_type": "bert"}}, "its weights do not match its config.json in"),
    ({"config": {"num_hidden_layers": 3, "layer_types": ...}}, "model.layers.2"),
    ({"config": {"intermediate_size": 64}}, "has shape [32, 48], not [32, 64]"),
    ({"config": {"vocab_size": 100}}, "but the model's embedding has only 100 rows"),
    ({"config": {"hidden_size": "32"}}, "'hidden_size' expected int"),
    ({"config": {"rope_parameters": {"rope_type": "new"}}}, "KeyError: 'new'"),
    ({"config": {"quantization_config": {"quant_method": "gptq", "bits": 4}}}, "Use: pip install"),
    ({"config": {"pad_token_id": 999}}, "Padding_idx"),
    ({"generation_config": {"num_return_sequences": 4}}, "num_return_sequences"),
    ({"generation_config": {"num_return_sequences": 4}, "tokenizer_config": {"eos_token": None},
      "config": {"eos_token_id": None}}, "num_return_sequences"),
    ({"tokenizer": {"added_tokens": ...}}, "KeyError: 'added_tokens'"),
    ({"tokenizer": {"model": {"type": "new"}}}, "cannot be loaded by transformers"),
], ids=range(12))  # fmt: skip
def test_files_that_do_not_agree_are_one_message(settings, changes, words):
    run = settings(**changes)
    with pytest.raises(UserError) as error:  # noqa: PT012 (either may reject the files)
        build_tokenizer(run, [])
        build_model(run)
    assert str(error.value).startswith(f"model.path={run.model.path}")
    assert words in str(error.value)


def test_tokens_without_an_embedding_are_rejected_only_if_they_are_used(settings, files):
    size = json.loads(files["config.json"])["vocab_size"]
    tokens = json.loads(files["tokenizer.json"])["added_tokens"]
    run = settings(
        tokenizer={"added_tokens": [*tokens, {**tokens[0], "id": size, "content": "<extra>"}]}
    )
    assert len(build_tokenizer(run, [])) == size + 1
    run.trainer_args = {"pad_token": "<extra>"}
    with pytest.raises(UserError, match="'<extra>' with id"):
        build_tokenizer(run, [])
    run.trainer_args = {}
    run.model.chat_template = f"{run.run_dir}/template.jinja"
    Path(run.model.chat_template).write_text(CHAT_TEMPLATE.replace(END, "<extra>"))
    with pytest.raises(UserError, match="'<extra>' with id"):
        build_tokenizer(run, [])


def test_the_end_token_comes_from_another_file_or_an_argument(settings, files):
    end = json.loads(files["generation_config.json"])["eos_token_id"]
    run = settings(
        tokenizer_config={"eos_token": None}, generation_config={"eos_token_id": [end, 9999]}
    )
    assert build_tokenizer(run, []).eos_token == END
    (Path(run.model.path) / "generation_config.json").unlink()
    with pytest.raises(UserError, match=r"no eos_token.*method\.args\.eos_token="):
        build_tokenizer(run, [])
    run.trainer_args = {"eos_token": END}
    assert build_tokenizer(run, []).eos_token == END
    run.trainer_args, run.method.kind = {}, "evaluator"  # stops at the maximum length
    assert build_tokenizer(run, []).eos_token is None
