"""Messages of the tinker client: bytes that its protobuf (0.38.0) wrote, and bytes that no client writes."""

from __future__ import annotations

import numpy as np
import pytest

from rl_core.tinker import wire

# Bytes of forward_backward_request_to_proto(): two data, an image, ppo with a number and a text, forward_only.
REQUEST = bytes.fromhex(
    "0a09733a747261696e3a3010031a740a100a0e0a0c0500000006000000070000000a0e120c0a036162631203706e67180312300a0d7461726765745f746f6b656e"
    "73121f0a18060000000000000007000000000000002c010000000000001802220103121e0a077765696768747312130a0c000000000000c0bf0000003f18012201"
    "031a440a080a060a040100000012200a0d7461726765745f746f6b656e73120f0a080200000000000000180222010112160a0777656967687473120b0a04000080"
    "3f1801220101220370706f2a1d0a12636c69705f6c6f775f7468726573686f6c6411cdccccccccccec3f30013a080a017812031201743a1f0a12636c69705f6c6f"
    "775f7468726573686f6c64120909cdccccccccccec3f"
)
# Bytes that the client's deserialize_forward_backward_output() and deserialize_sample_response() read as
# logprobs [-1, -0.5], [-2] with {"loss:sum": 3.5, "n:sum": 0}; and as "stop" [5, 6], "length" [7], prompt [NaN, -1].
OUTPUT = (
    "0a0b41727261795265636f726412470a0b41727261795265636f726412360a086c6f6770726f6273122a0a0c000080bf000000bf000000c0121800000000000000"
    "0008000000000000000c00000000000000180118021a130a086c6f73733a73756d110000000000000c401a100a056e3a73756d110000000000000000"
)
SAMPLES = "0a14120805000000060000001a08cdccccbdcdcc4cbe0a0e08011204070000001a04000040c012080000c07f000080bf"


def test_the_clients_bytes_are_read():
    request = wire.read_forward_backward(REQUEST)
    assert (request.model_id, request.seq_id, request.loss_fn) == ("s:train:0", 3, "ppo")
    assert request.forward_only
    assert request.config == {"clip_low_threshold": 0.9, "x": "t"}
    first, second = map(wire.read_datum, request.data)
    text, image = first.chunks
    assert isinstance(text, np.ndarray)
    assert text.tolist() == [5, 6, 7]
    assert image == wire.ImageBytes(data=b"abc", expected_tokens=3)
    assert first.inputs["target_tokens"].tolist() == [6, 7, 300]
    assert first.inputs["weights"].tolist() == [0, -1.5, 0.5]
    assert second.inputs["target_tokens"].tolist() == [2]


def test_results_are_the_bytes_that_the_client_reads():
    logprobs = [np.array([-1, -0.5]), np.array([-2])]
    assert wire.forward_backward_output(logprobs, {"loss:sum": 3.5, "n:sum": 0}).hex() == OUTPUT
    sequences = [("stop", [5, 6], [-0.1, -0.2]), ("length", [7], [-3])]
    assert wire.sample_response(sequences, np.array([np.nan, -1])).hex() == SAMPLES


def test_no_cut_or_changed_message_raises_another_error():
    for size in range(len(REQUEST)):
        for body in (REQUEST[:size], REQUEST[:size] + b"\xff" + REQUEST[size + 1 :]):
            try:
                request = wire.read_forward_backward(body)
                for datum in request.data:
                    wire.read_datum(datum)
            except ValueError as error:
                assert len(str(error)) < 200


def tensor(*fields) -> bytes:
    return wire.message([(2, wire.message([(1, "weights"), (2, wire.message(fields))]))])


@pytest.mark.parametrize(
    "fields, match",
    [
        ([(1, b"\0" * 5), (3, 1)], "whole number"),
        ([(1, b"\0" * 8), (3, 3)], "dtype 3"),
        ([(2, b"\x0a\0"), (3, 1)], "sparse"),
    ],
)
def test_a_tensor_of_another_form_is_refused(fields, match):
    with pytest.raises(ValueError, match=match):
        wire.read_datum(memoryview(tensor(*fields)))


@pytest.mark.parametrize(
    "kind, value, match",
    [
        (wire.Sample, [], "dict"),
        (wire.Sample, {"topk_prompt_logprobs": 3}, "topk_prompt_logprobs is not supported"),
        (wire.Sample, {"record_stability_info": True}, "record_stability_info is not supported"),
        (wire.SaveWeights, {"model_id": "m", "path": "../x"}, "path"),
        (wire.AdamParams, {"learning_rate": float("nan")}, "finite"),
        (wire.AdamParams, {"eps": 0}, "greater than 0"),
        (wire.Sampling, {"temperature": 1e-50}, "temperature: must be 0, .* or at least 0.0001"),
        (wire.Sampling, {"top_p": 1e-50}, "top_p.*greater than or equal to"),
        (wire.Sampling, {"stop": ["x"] * 65}, "stop: at most 64"),
        (wire.Sampling, {"stop": "x" * 257}, "at most 256 char"),
        (wire.Lora, {"rank": 0}, "greater than or equal to 1"),
    ],
)
def test_json_of_another_form_is_refused_in_one_line(kind, value, match):
    with pytest.raises(ValueError, match=match) as error:
        wire.read_request(kind, value)
    assert "\n" not in str(error.value)
