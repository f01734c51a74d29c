"""Test that packed and grouped completions have the losses and gradients of padded ones."""

import functools
import math
import random

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from trl import GRPOTrainer

from launch.core.errors import UserError
from recipes.measure.metrics import Metrics
from recipes.models import head, layers, packed_attention
from recipes.models.model_build import build_model
from recipes.training import train_loop
from tests.helpers.small_models import small_model
from tests.helpers.trainers import assert_same, built, configured, rows_of, trained
from tests.recipes.models.test_layers import EVERY_LAYER, LORA, compiled, dynamo, is_compiled, use  # noqa: F401

LONGEST = 24
ROWS = [{"prompt": f"{n} plus {10 ** (n % 7)} ", "answer": "1"} for n in range(16)]
OPTIONS = [
    *[f"method.args.max_completion_length={LONGEST}", "method.args.max_steps=2"],
    *["method.args.per_device_train_batch_size=4", "method.args.gradient_accumulation_steps=2"],
]
CASES = {
    "plain": [],
    "adapter": [*LORA, "method.args.beta=0.1", "method.args.temperature=0.8"],
    "reference": ["method.args.beta=0.1"],
    "twice": ["method.args.num_iterations=2", *EVERY_LAYER],
    "entropy":["method.args.entropy_coef=0.01", "method.args.max_steps=1",
        "method.args.mask_truncated_completions=true"],
}  # fmt: skip
UNTIMED = {"step_time", "epoch", "train_runtime"}
UNTIMED |= {"train_samples_per_second", "train_steps_per_second"}


def answers(trainer, seed=0):
    """Make `trainer` train on random completions, a third of which are truncated."""
    draw, end = random.Random(seed), trainer.processing_class.eos_token_id

    def answer(prompt_ids, *args, **kwargs):
        lengths = (draw.randint(1, LONGEST - 1) for _ in prompt_ids)
        drawn = [[draw.randrange(5, 300) for _ in range(length)] for length in lengths]
        return [[*ids, end] if draw.random() < 2 / 3 else ids for ids in drawn], None

    trainer._generate_single_turn = answer
    return trainer


def grpo(run_dir, base, *overrides, make=built):
    run_dir.mkdir(exist_ok=True)
    options = [*rows_of(run_dir, ROWS), f"model.path={base}", *OPTIONS, *overrides]
    config, trainer = make(run_dir, "grpo", *options)
    return config, answers(trainer)


def correct_sampling(trainer, mode, trls_pass):
    """Make `trainer` correct for other sampling probabilities, with TRL's pass if `trls_pass`."""
    draw, answer = random.Random(1), trainer._generate_single_turn

    def answer_with_log_probs(*args, **kwargs):
        completions, _ = answer(*args, **kwargs)
        log_prob = lambda: math.nan if draw.random() < 0.1 else -draw.uniform(4, 7)  # noqa: E731
        return completions, [[log_prob() for _ in ids] for ids in completions]

    trainer._generate_single_turn = answer_with_log_probs
    trainer.use_vllm, trainer.vllm_importance_sampling_mode = True, mode
    trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max = 0.3, 2.0
    if trls_pass:
        for name in ("_generate_and_score_completions", "_compute_loss"):
            setattr(trainer, name, getattr(GRPOTrainer, name).__get__(trainer))
    return trainer


REUSED = """
    method.args.num_iterations=2 method.args.steps_per_generation=2
    method.args.gradient_accumulation_steps=4
""".split()


@pytest.mark.parametrize(("mode", "overrides"), [
    ("token_truncate", []),
    ("sequence_mask", []),
    pytest.param("token_mask", REUSED, id="reused-within-a-step"),
])  # fmt: skip
def test_sampling_ratio_equals_trls(tmp_path, base, mode, overrides):
    results = []
    for trls_pass in (True, False):
        # Build each trainer immediately before training, since this sets the seed.
        _, trainer = grpo(tmp_path / str(trls_pass), base, "step.rows=packed", *overrides)
        correct_sampling(trainer, mode, trls_pass)
        without_gradient = []
        trainer.model.model.register_forward_pre_hook(
            lambda *_, seen=without_gradient: seen.append(not torch.is_grad_enabled())
        )
        results.append((trained(trainer), lines(trainer), any(without_gradient)))
    (expected, metrics, _), (actual, actual_metrics, _) = results
    assert [has_pass for *_, has_pass in results] == [True, False]
    assert_same(actual, expected)
    assert_lines(actual_metrics, metrics)
    assert 0.3 <= metrics[0]["sampling/importance_sampling_ratio/mean"] <= 2.0 or "mask" in mode
    assert metrics[0]["grad_norm"] > 0


def test_the_compile_check_does_not_count_in_metrics(tmp_path, base, use):  # noqa: F811
    use("eager")
    config, trainer = grpo(tmp_path, base, "step.rows=packed", *EVERY_LAYER, make=compiled)
    correct_sampling(trainer, "token_truncate", trls_pass=False)
    trainer.compile_layers(config)
    trained(trainer)
    _, eager = grpo(tmp_path / "eager", base, "step.rows=packed")
    trained(correct_sampling(eager, "token_truncate", trls_pass=False))
    assert is_compiled(trainer)
    assert_lines(lines(trainer), lines(eager))


def lines(trainer):
    return [
        {name: value for name, value in line.items() if name not in UNTIMED}
        for line in trainer.state.log_history
    ]


@pytest.mark.parametrize("equal", ["some", "all"])
@pytest.mark.parametrize("options", [["method.args.loss_type=grpo"], REUSED])
def test_rows_without_advantage_need_no_gradient(tmp_path, base, equal, options):
    results, passes = [], []
    for skips in (False, True):
        _, trainer = grpo(tmp_path / str(skips), base, "step.rows=packed", *options)
        assert trainer._skips_idle
        trainer._skips_idle = skips
        correct_sampling(trainer, "token_truncate", trls_pass=False)
        reward = trainer.reward_funcs[0]

        def partly_equal(prompts, reward=reward, **columns):
            rewards = reward(prompts=prompts, **columns)
            first = prompts[0]
            return [
                0.0 if equal == "all" or prompt == first else value
                for prompt, value in zip(prompts, rewards, strict=True)
            ]

        trainer.reward_funcs[0] = partly_equal
        tokens = {True: 0, False: 0}

        def count(module, args, kwargs, tokens=tokens):
            tokens[torch.is_grad_enabled()] += kwargs["input_ids"].numel()

        trainer.model.model.register_forward_pre_hook(count, with_kwargs=True)
        results.append((trained(trainer), lines(trainer)))
        passes.append(tokens)
    (expected, metrics), (actual, actual_metrics) = results
    assert passes[1][True] < (0.5 if equal == "all" else 0.8) * passes[0][True]
    assert passes[0][False] == 0
    assert sum(passes[1].values()) == sum(passes[0].values())
    assert (expected[0][0]["grad_norm"] == 0) == (equal == "all")
    assert_same(actual, expected, within=1e-6)
    assert_lines(actual_metrics, metrics, within=1e-6)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return the folder of a model, from which TRL also loads the reference."""
    folder = tmp_path_factory.mktemp("base")
    _, trainer = built(folder / "run", "grpo", *rows_of(folder, ROWS), *OPTIONS)
    trainer.save_model(str(folder / "model"))
    trainer.processing_class.save_pretrained(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def trls(base, tmp_path_factory):
    """Return a function that trains with TRL's trainer: (gradients, metrics) of a case."""
    results = {}

    def of(case):
        if case not in results:
            _, trainer = grpo(tmp_path_factory.mktemp(case), base, "step.rows=padded", *CASES[case])
            assert trainer._rows == "padded"
            results[case] = trained(trainer), lines(trainer)
        return results[case]

    return of


def assert_lines(results, expected, within=1e-5):
    assert len(results) == len(expected)
    for line, other in zip(results, expected, strict=True):
        assert line == pytest.approx(other, rel=within, abs=within)


@pytest.mark.parametrize(
    ("case", "rows"),
    [*((case, "packed") for case in CASES), ("plain", "grouped"), ("twice", "grouped")],
)
def test_steps_equal_trls(tmp_path, base, trls, case, rows):
    gradients, metrics = trls(case)  # before building the other trainer, which sets the seed
    _, trainer = grpo(tmp_path, base, f"step.rows={rows}", *CASES[case])
    assert trainer._rows == rows
    assert_same(trained(trainer), gradients)
    assert_lines(lines(trainer), metrics)
    assert metrics[0]["grad_norm"] > 0.1
    if case == "twice":  # the old policy's log-probabilities are used
        assert metrics[1]["clip_ratio/region_mean"] > 0
    if case == "reference":
        assert metrics[1]["kl"] > 0


def test_compiled_layers_have_equal_results(tmp_path, base, trls, use):  # noqa: F811
    gradients, metrics = trls("twice")
    use("aot_eager")
    config, trainer = grpo(tmp_path, base, "step.rows=packed", *CASES["twice"], make=compiled)
    trainer.compile_layers(config)
    assert_same(trained(trainer), gradients)
    assert_lines(lines(trainer), metrics)
    assert is_compiled(trainer)


def test_packed_rows_have_no_padding(tmp_path, base):
    _, trainer = grpo(tmp_path, base, "step.rows=packed", "method.args.pad_to_multiple_of=8")
    seen = []
    trainer.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])
    ids = torch.arange(10, 28).view(3, 6) * mask
    log_probs, entropies, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, mask, 3, compute_entropy=True
    )
    (kwargs,) = seen
    assert kwargs["input_ids"][0, :12].tolist() == ids[mask.bool()].tolist()
    assert kwargs["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, *range(4)]]
    assert kwargs["document_starts"].tolist() == [0, 4, 8, 12, 16]
    assert ((log_probs != 0) == mask[:, 3:].bool()).all()
    assert ((entropies != 0) == mask[:, 3:].bool()).all()


def test_batch_size_and_rows_without_targets(tmp_path, base):
    _, trainer = grpo(tmp_path, base, "step.rows=packed")
    compute, model = trainer._get_per_token_logps_and_entropies, trainer.model
    ids, mask = torch.randint(5, 300, (6, 9)), torch.ones(6, 9, dtype=torch.long)
    with torch.no_grad():
        complete, parts = (compute(model, ids, mask, 4, size) for size in (None, 4))
    torch.testing.assert_close(complete[0], parts[0], rtol=1e-5, atol=1e-5)
    assert complete[1:] == parts[1:] == (None, None)
    mask[:, 5:] = 0  # truncated completions are masked and have a loss of zero
    log_probs, _, _ = compute(model, ids, mask, 4)
    log_probs.sum().backward()
    assert log_probs.shape == (6, 4)
    assert not any(weight.grad.count_nonzero() for weight in model.parameters())


def test_generation_from_left_padded_prompts(tmp_path, base):
    ids = torch.randint(5, 300, (2, 9))
    mask = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    options = {"output_logits": True, "return_dict_in_generate": True}
    logits = []
    for rows, attends in (("packed", packed_attention.PADDED), ("padded", "sdpa")):
        config = configured(tmp_path, "grpo", f"model.path={base}", f"step.rows={rows}")
        model = build_model(config)
        generated = model.generate(
            ids, attention_mask=mask, max_new_tokens=8, do_sample=False, **options
        )
        logits.append(generated.logits)
        assert model.config._attn_implementation == attends
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


def graphs_over_lengths(run_dir, base, seed):
    """Return the number of graphs after one step and after 20 more lengths, and their sizes."""
    sizes, counter = [], CompileCounterWithBackend("eager")

    def backend(graph, inputs):
        # int(size) would specialize the graph
        sizes.append([size.node.hint for size in inputs if isinstance(size, torch.SymInt)])
        return counter(graph, inputs)

    with pytest.MonkeyPatch.context() as patch:
        compile_each = functools.partial(layers.compile_each, backend=backend)
        patch.setattr(layers, "compile_each", compile_each)
        options = ["step.rows=packed", "method.args.num_iterations=2", "method.args.max_steps=1"]
        config, trainer = grpo(run_dir, base, *options, make=compiled)
        trainer.compile_layers(config)
    answers(trainer, seed)
    trained(trainer)
    first, draw = counter.frame_count, random.Random(seed)
    for _ in range(20):
        mask = torch.zeros(4, 200, dtype=torch.long)
        for row in mask:
            row[100 - draw.randint(1, 100) : 100 + draw.randint(1, 100)] = 1
        ids = torch.full_like(mask, 7)
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 100)
    assert is_compiled(trainer)
    return first, counter.frame_count, sizes


def test_graphs_do_not_depend_on_lengths(tmp_path, base):
    first, last, sizes = graphs_over_lengths(tmp_path / "one", base, seed=1)
    assert first == last == 2  # with and without gradient
    torch._dynamo.reset()
    assert graphs_over_lengths(tmp_path / "other", base, seed=2)[2][:first] == sizes[:first]


@pytest.mark.parametrize(
    "options",
    [["method.args.cast_lm_head_to_fp32=true"], ["model.tied_embeddings=false", "adapter=lora"]],
)
def test_rows_of_special_heads(tmp_path, base, options):
    _, trainer = grpo(tmp_path, base, "step.rows=packed", *options)
    assert trainer._rows == ("padded" if "cast" in options[0] else "packed")


def test_sliding_window_cannot_be_packed():
    windowed = small_model("mistral", sliding_window=8)
    assert packed_attention.fits(small_model().config)
    assert not packed_attention.fits(windowed.config)
    assert head.fits(windowed)


def test_reject_too_few_rows_for_a_batch(tmp_path):
    config, trainer = built(
        tmp_path, "grpo", *rows_of(tmp_path, ROWS), "method.args.per_device_train_batch_size=256"
    )
    with pytest.raises(UserError, match="the data has only 16 rows"):
        train_loop.train(config, trainer, Metrics(config))


def test_the_reference_of_random_weights_is_the_model_at_the_start(tmp_path):
    trainer = built(tmp_path / "run", "grpo", "method.args.beta=0.1")[1]
    reference = trainer.ref_model.state_dict()
    assert all(torch.equal(reference[name], w) for name, w in trainer.model.state_dict().items())
