"""The learner's decoder of Llama's layout equals the models' forward in transformers."""

from __future__ import annotations

import math

import pytest
import torch
from kit import assert_same
from test_learner import make_learner, ragged_samples
from test_lora import make_lora_learner, with_random_adapters

from rl_core.models.kernels import llama_cpu
from rl_core.models.kernels.llama_cpu import OneDNNLinear, RMSNorm, Rotary


@pytest.fixture(params=[0, math.inf], ids=["onednn", "mkl"])
def products(request, monkeypatch):
    """Products of all sizes by oneDNN, on CPUs where any is, and of none."""
    monkeypatch.setattr(llama_cpu, "LARGE_PRODUCT", request.param)


def test_gradients_of_adapters_are_those_of_the_models_own_forward(tiny_model, products):
    learner = with_random_adapters(make_lora_learner(tiny_model))
    learner.policy.hf.requires_grad_(False)
    for name, parameter in learner.policy.hf.named_parameters():
        parameter.requires_grad_("lora_" in name)
    both = []
    for decoder in (learner.policy.decoder, None):
        learner.policy.use_decoder(decoder)
        learner.backward(learner.shard(ragged_samples())[0][0])
        both.append({name: p.grad.clone() for name, p in learner.trained_parameters()})
        learner.policy.zero_grad()
    assert_same(*both)


@pytest.mark.parametrize("flags", ["--learner.kernels compile", "--learner.activations recompute"])
def test_modules_that_are_compiled_or_computed_again_are_called(tiny_model, flags):
    assert make_learner(tiny_model, *flags.split()).policy.decoder is None


@pytest.mark.parametrize("is_trained", [True, False])
def test_gradients_of_onednn_products_are_those_of_a_linear_layer(is_trained):
    torch.manual_seed(0)
    layer = torch.nn.Linear(48, 32).requires_grad_(is_trained)
    x = torch.randn(40, 48, requires_grad=True)
    both = []
    for y in (layer(x), OneDNNLinear.apply(x, layer.weight, layer.bias)):
        x.grad = None
        layer.zero_grad()
        y.sum(1).cos().sum().backward()  # The gradient of y has a stride of 0.
        grads = [p.grad for p in (x, *layer.parameters()) if p.requires_grad]
        both.append([y.detach(), *grads])
    torch.testing.assert_close(both[1], both[0], rtol=1e-5, atol=1e-5)


def test_norms_and_rotary_positions_have_the_derivative_of_their_formula():
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, dtype=torch.float64, generator=draw) for n in ((5, 3, 8), 8))
    angles = torch.rand(5, 1, 4, dtype=torch.float64, generator=draw).repeat(1, 1, 2)
    inputs = x.requires_grad_(), w.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: RMSNorm.apply(x, w, 1e-6), inputs)
    turn = lambda x: Rotary.apply(x, angles.cos(), angles.sin())  # noqa: E731
    assert torch.autograd.gradcheck(turn, inputs[:1])
