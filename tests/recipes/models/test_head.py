"""Test the one-pass head against TRL's and against plain cross-entropy."""

import copy
import functools
import types

import pytest
import torch
from torch import nn
from torch.nn import functional
from trl.kernels import chunked_logprob as trl_kernels
from trl.trainer.utils import add_fused_lm_head

from recipes.models import head
from tests.helpers.small_models import small_model

# TRL's kernels process blocks of the vocabulary; the last block is partial.
TOKENS, WIDTH, VOCABULARY = (37, 16, 2500)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(head, "TOKENS", 10)  # four tiles, the last one smaller


def drawn(dtype=torch.float32):
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH) / 4
    targets = torch.randint(0, VOCABULARY, (TOKENS,))
    targets[::3] = (hidden @ weight.t()).argmax(1)[::3]  # some are right
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def plain(hidden, weight, targets):
    """Return (loss, entropies, correct) by definition, in fp32."""
    logits = hidden.float() @ weight.float().t()
    logs = logits.log_softmax(1)
    loss = functional.cross_entropy(logits, targets, reduction="sum")
    return loss, -(logs.exp() * logs).sum(), (logits.argmax(1) == targets).sum()


def test_sums_and_gradients_equal_cross_entropy():
    hidden, weight, targets = drawn()
    expected = plain(hidden, weight, targets)
    gradients = torch.autograd.grad(expected[0] * 3, (hidden, weight))
    loss, (entropy, correct) = head.NllHead.apply(hidden, weight, targets, True)
    torch.testing.assert_close(loss, expected[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(entropy, expected[1], rtol=1e-5, atol=0)
    assert correct == expected[2] >= TOKENS // 3
    actual = torch.autograd.grad(loss * 3, (hidden, weight))
    torch.testing.assert_close(actual, gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("frozen", "trained"), [("hidden", "weight"), ("weight", "hidden")])
def test_frozen_tensors_get_no_gradient(frozen, trained):
    tensors = dict(zip(("hidden", "weight", "targets"), drawn(), strict=True))
    (gradients,) = torch.autograd.grad(plain(**tensors)[0], tensors[trained])
    tensors[frozen].requires_grad_(False)
    head.NllHead.apply(*tensors.values(), True)[0].backward()
    assert tensors[frozen].grad is None
    torch.testing.assert_close(tensors[trained].grad, gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "within", "autocast"), [(torch.bfloat16, 2e-2, True), (torch.float16, 3e-3, False)]
)
def test_16_bit_results_are_close_to_fp32(dtype, within, autocast):
    hidden, weight, targets = drawn(torch.float32 if autocast else dtype)
    expected = plain(hidden, weight, targets)
    gradients = torch.autograd.grad(expected[0], (hidden, weight))
    with torch.autocast("cpu", dtype, enabled=autocast):
        loss, (entropy, _) = head.NllHead.apply(hidden, weight, targets, True)
    torch.testing.assert_close(loss, expected[0], rtol=within, atol=0)
    torch.testing.assert_close(entropy, expected[1], rtol=within, atol=0)
    actual_gradients = torch.autograd.grad(loss, (hidden, weight))
    for actual, gradient in zip(actual_gradients, gradients, strict=True):
        assert actual.dtype == gradient.dtype
        assert (actual - gradient).norm() < within * gradient.norm()


def test_folding_by_rows_changes_no_digit(monkeypatch):
    results = []
    for logits in (head.FOLDED, 3 * VOCABULARY):
        monkeypatch.setattr(head, "FOLDED", logits)
        hidden, weight, targets = drawn()
        loss, counted = head.NllHead.apply(hidden, weight, targets, True)
        results.append((loss, counted, *torch.autograd.grad(loss, (hidden, weight))))
        theirs = trl_kernels.ChunkedLogProbFunction.apply
        logs, entropy, *_ = theirs(hidden, weight, None, targets, 1.0, 1000, None, 1.0)
        total = logs.sum() + entropy.sum()
        results[-1] += (logs, entropy, *torch.autograd.grad(total, (hidden, weight)))
    for whole, by_rows in zip(*results, strict=True):
        assert torch.equal(whole, by_rows)


def test_loss_and_gradients_are_zero_without_targets():
    hidden, weight, _ = drawn()
    loss, counted = head.NllHead.apply(hidden[:0], weight, torch.zeros(0, dtype=torch.long), True)
    loss.backward()
    assert (loss.item(), counted.tolist()) == (0.0, [0.0, 0.0])
    assert weight.grad.count_nonzero() == hidden.grad.count_nonzero() == 0


@pytest.mark.parametrize(
    "compute", [head.sums, functools.partial(head.log_probs, temperature=1.0, entropy_grad=False)]
)
def test_a_compiled_model_returns_the_same(compute):
    ours = small_model()
    head.add(ours, compute)
    ids = torch.randint(0, 320, (2, 8))
    inputs = {"input_ids": ids, "targets": ids.flatten()[1:8], "target_positions": torch.arange(7)}
    actual, expected = torch.compile(ours, backend="eager")(**inputs), ours(**inputs)
    torch._dynamo.reset()
    for name in expected:
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name))


@pytest.mark.parametrize("tied", [False, True])
def test_sums_and_gradients_equal_those_of_trls_head(tied):
    ours = small_model(tie_word_embeddings=tied)
    theirs = copy.deepcopy(ours)
    head.add(ours)
    add_fused_lm_head(theirs, outputs=("log_probs", "entropy", "is_top1"))  # as SFTTrainer has it
    ids = torch.randint(0, 320, (3, 20))
    labels = ids.clone()
    labels[:, :5] = labels[1, 12:] = ignored = -100
    shifted = functional.pad(labels, (0, 1), value=ignored)[:, 1:].reshape(-1)
    places = (shifted != ignored).nonzero().flatten()
    actual = ours(input_ids=ids, targets=shifted[places], target_positions=places)
    expected = theirs(input_ids=ids, labels=labels, fused_lm_head=True)
    sums = torch.stack((-expected.log_probs.sum(), expected.entropy.sum(), expected.is_top1.sum()))
    torch.testing.assert_close(
        torch.stack((actual.loss, *actual.counted)), sums, rtol=1e-5, atol=1e-5
    )
    actual.loss.backward()
    (-expected.log_probs.sum()).backward()
    for (name, weight), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, other.grad, rtol=1e-5, atol=1e-5, msg=name)


def test_evaluation_stores_no_gradient_and_returns_logits_without_targets():
    whole = small_model()
    ids = torch.randint(0, 320, (1, 8))
    expected = whole(input_ids=ids).logits
    head.add(whole)
    torch.testing.assert_close(whole(input_ids=ids).logits, expected)
    with torch.no_grad():
        actual = whole(input_ids=ids, targets=ids[0, 1:], target_positions=torch.arange(7))
    torch.testing.assert_close(
        actual.loss, functional.cross_entropy(expected[0, :-1], ids[0, 1:], reduction="sum")
    )
    assert not actual.loss.requires_grad


def test_only_plain_matrix_products_are_supported():
    plain_head = small_model()
    assert head.fits(plain_head)
    with_bias = small_model()
    with_bias.lm_head = nn.Linear(32, 320)
    replaced = small_model()
    replaced.lm_head = type("Other", (nn.Linear,), {})(32, 320, bias=False)
    scaled = small_model()
    scaled.config.final_logit_softcapping = 30.0
    assert not any(map(head.fits, (with_bias, replaced, scaled)))
    headless = types.SimpleNamespace(config=plain_head.config, get_output_embeddings=lambda: None)
    assert not head.fits(headless)
