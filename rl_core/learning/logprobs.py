"""Hidden states x head weight -> logprob and entropy of each trained token, never all tokens x vocabulary at once.

M trained tokens, D hidden, V vocabulary, C rows of one chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20  # of one [C, V] fp32 block of logits


def fused_logprobs(
    hidden_MD: Tensor, weight_VD: Tensor, labels: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Logprobs of `labels` and entropies, both [M] fp32 in nats, of softmax(hidden @ weight.T / temperature). Both are
    differentiable in hidden and weight. Peak extra memory is about 3 blocks of 64 MiB and a gradient of the weight's size."""
    return FusedLogprobs.apply(hidden_MD, weight_VD, labels, temperature)


class FusedLogprobs(torch.autograd.Function):
    """With z = h W^T / t and p = softmax(z): logprob = z[label] - lse(z), entropy = -sum(p log p), and so
    d logprob / dz = onehot - p and d entropy / dz = -p (log p + entropy). The backward pass computes z again, unless one
    block holds it all."""

    @staticmethod
    def forward(ctx, hidden_MD, weight_VD, labels, temperature):
        rows = max(1, CHUNK_BYTES // (4 * weight_VD.shape[0]))
        logprobs = torch.empty(labels.shape, dtype=torch.float32, device=hidden_MD.device)
        entropy, lse = torch.empty_like(logprobs), torch.empty_like(logprobs)
        kept = None
        for i in range(0, len(labels), rows):
            part = slice(i, i + rows)
            z_CV = scaled_logits(hidden_MD[part], weight_VD, temperature)
            lse[part] = torch.logsumexp(z_CV, -1)
            logprobs[part] = z_CV.gather(-1, labels[part, None])[:, 0] - lse[part]
            logp_CV = z_CV.sub_(lse[part, None])
            entropy[part] = -torch.einsum("cv,cv->c", logp_CV.exp(), logp_CV)
            kept = logp_CV if len(labels) <= rows else None
        ctx.save_for_backward(hidden_MD, weight_VD, labels, lse, entropy, kept)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.set_materialize_grads(False)  # None, not zeros, for the entropy's gradient where no bonus is asked
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden_MD, weight_VD, labels, lse, entropy, kept = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(lse)
        grad_hidden = torch.empty_like(hidden_MD)
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32)
        for i in range(0, len(labels), ctx.rows):
            part = slice(i, i + ctx.rows)
            logp_CV = kept
            if kept is None:
                logp_CV = scaled_logits(hidden_MD[part], weight_VD, ctx.temperature).sub_(lse[part, None])
            grad_CV = logp_CV.exp()
            weight_C = -grad_logprobs[part, None]
            if grad_entropy is not None:
                weight_C = weight_C - grad_entropy[part, None] * (logp_CV + entropy[part, None])
            grad_CV *= weight_C
            grad_CV.scatter_add_(-1, labels[part, None], grad_logprobs[part, None])
            grad_CV /= ctx.temperature
            grad_CV = grad_CV.to(hidden_MD.dtype)
            grad_hidden[part] = grad_CV @ weight_VD
            grad_weight += grad_CV.T @ hidden_MD[part]
        return grad_hidden, grad_weight.to(weight_VD.dtype), None, None


def scaled_logits(hidden_CD: Tensor, weight_VD: Tensor, temperature: float) -> Tensor:
    return (hidden_CD @ weight_VD.T).float() / temperature
