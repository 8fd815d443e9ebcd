"""Requests as the tinker client sends them."""

from __future__ import annotations

import numpy as np

from rl_core.tinker.wire import message


def datum(ids, **inputs) -> bytes:
    """Token ids and the inputs of the loss; whole numbers of target_tokens are int64."""
    text = message([(1, message([(1, np.asarray(ids, "<i4").tobytes())]))])
    fields = [(1, text)]
    for name, values in inputs.items():
        is_int = name == "target_tokens" and not any(isinstance(v, float) for v in values)
        dtype, kind = ("<i8", 2) if is_int else ("<f4", 1)
        tensor = message([(1, np.asarray(values, dtype).tobytes()), (3, kind)])
        fields.append((2, message([(1, name), (2, tensor)])))
    return message(fields)


def forward_backward(
    data, loss_fn="cross_entropy", model_id="m", seq_id=1, forward_only=False, **config
) -> bytes:
    fields = [(1, model_id), (2, seq_id), *((3, each) for each in data), (4, loss_fn)]
    fields.append((6, int(forward_only)))
    for name, value in config.items():
        fields.append((7, message([(1, name), (2, message([(1, float(value))]))])))
    return message(fields)


def row(ids, weights=None, **inputs) -> bytes:
    """The datum of a row of tokens: each predicts the next."""
    weights = [1.0] * (len(ids) - 1) if weights is None else weights
    return datum(ids[:-1], target_tokens=ids[1:], weights=weights, **inputs)
