"""Messages of the tinker client 0.38.0: protobuf of forward_backward and of results, JSON of all
other requests.

Reading raises ValueError for bytes that are not such a message. Protobuf: a message is a sequence
of fields, each a varint (number << 3 | wire type) and a value.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rl_core.types import JSON

PROTOBUF = "application/x-protobuf"
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # Wire types.
FLOAT32, INT64 = 1, 2  # DType.
DTYPES = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8")}
MAX_VARINT = 10  # Bytes.
MAX_STOPS, MAX_STOP_LENGTH = 64, 256  # Of a request for samples; characters.
Field_: TypeAlias = "tuple[int, int | memoryview]"


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """(value, index after it)"""
    value = 0
    for number in range(MAX_VARINT):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 127) << 7 * number
        if byte < 128:
            return value & (1 << 64) - 1, at
    raise ValueError("the body is not protobuf: it ends within a number")


def fields_of(data: bytes | memoryview) -> Iterator[Field_]:
    """(number, value) of each field of a message."""
    data, at = memoryview(data), 0
    while at < len(data):
        tag, at = read_varint(data, at)
        kind = tag & 7
        if kind == VARINT:
            value, at = read_varint(data, at)
        else:
            size = {FIXED64: 8, FIXED32: 4}.get(kind)
            if kind == BYTES:
                size, at = read_varint(data, at)
            if size is None or at + size > len(data):
                raise ValueError(f"the body is not protobuf: field {tag >> 3} is cut or unknown")
            value, at = data[at : at + size], at + size
        yield tag >> 3, value


def as_bytes(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("the body is not the protobuf that the endpoint reads")
    return value


def as_text(value: int | memoryview) -> str:
    return bytes(as_bytes(value)).decode()


def as_int(value: int | memoryview) -> int:
    """A signed integer."""
    if not isinstance(value, int):
        raise ValueError("the body is not the protobuf that the endpoint reads")
    return value - (1 << 64) if value >> 63 else value


def array(value: int | memoryview, dtype: np.dtype) -> np.ndarray:
    data = as_bytes(value)
    if len(data) % dtype.itemsize:
        raise ValueError(f"a tensor of {len(data)} bytes has no whole number of {dtype} values")
    return np.frombuffer(data, dtype)


def entry(value: int | memoryview) -> tuple[str, memoryview]:
    """(key, value) of an entry of a map from strings."""
    key, content = "", memoryview(b"")
    for number, item in fields_of(as_bytes(value)):
        if number == 1:
            key = as_text(item)
        elif number == 2:
            content = as_bytes(item)
    return key, content


@dataclass(kw_only=True, slots=True)
class ImageBytes:
    data: bytes
    expected_tokens: int | None = None


Chunk: TypeAlias = "np.ndarray | ImageBytes"  # Token ids, or an image.


@dataclass(kw_only=True, slots=True)
class Datum:
    """Example: chunks [[5, 6, 7]], inputs {"target_tokens": [6, 7, 8], "weights": [0, 1, 1]}:
    target i is predicted after the tokens up to and with i."""

    chunks: list[Chunk] = field(default_factory=list)
    inputs: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class ForwardBackward:
    model_id: str = ""
    seq_id: int = 0
    loss_fn: str = ""
    config: dict[str, float | str] = field(default_factory=dict)
    forward_only: bool = False
    data: list[memoryview] = field(default_factory=list)  # read_datum() reads each.


def read_forward_backward(body: bytes) -> ForwardBackward:
    request = ForwardBackward()
    for number, value in fields_of(body):
        if number == 1:
            request.model_id = as_text(value)
        elif number == 2:
            request.seq_id = as_int(value)
        elif number == 3:
            request.data.append(as_bytes(value))
        elif number == 4:
            request.loss_fn = as_text(value)
        elif number == 6:
            request.forward_only = bool(value)
        elif number == 7:  # Field 5 is the same for older servers, without texts.
            name, content = entry(value)
            for kind, setting in fields_of(content):
                if kind == 1:
                    [request.config[name]] = array(setting, np.dtype("<f8")).tolist()
                else:
                    request.config[name] = as_text(setting)
    return request


def read_datum(message: memoryview) -> Datum:
    datum = Datum()
    for number, value in fields_of(message):
        if number == 1:
            datum.chunks.append(read_chunk(as_bytes(value)))
        elif number == 2:
            name, content = entry(value)
            datum.inputs[name] = read_tensor(name, content)
    return datum


def read_chunk(message: memoryview) -> Chunk:
    for number, value in fields_of(message):
        parts = dict(fields_of(as_bytes(value)))
        if number == 1:
            return array(parts.get(1, memoryview(b"")), np.dtype("<i4"))
        if number == 2:
            num = as_int(parts[3]) if 3 in parts else None
            data = as_bytes(parts.get(1, memoryview(b"")))
            return ImageBytes(data=bytes(data), expected_tokens=num)
    raise ValueError("a chunk of the model input is neither text nor an image")


def read_tensor(name: str, message: memoryview) -> np.ndarray:
    """The values of a dense tensor. Its shape is not read: they are one for each token."""
    data, dtype = memoryview(b""), 0
    for number, value in fields_of(message):
        if number == 1:
            data = as_bytes(value)
        elif number == 2:
            raise ValueError(f"{name} is sparse; give one value for each token")
        elif number == 3:
            dtype = as_int(value)
    if dtype not in DTYPES:
        raise ValueError(f"{name} has dtype {dtype}; give float32 or int64")
    return array(data, DTYPES[dtype])


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def message(fields: Iterable[tuple[int, int | float | str | bytes]]) -> bytes:
    """A message of these (number, value) pairs, without those that are 0 or empty."""
    parts = []
    for number, value in fields:
        if isinstance(value, float):
            parts += [varint(number << 3 | FIXED64), struct.pack("<d", value)]
        elif isinstance(value, int):
            parts += [varint(number << 3 | VARINT), varint(value)] if value else []
        elif value:
            data = value.encode() if isinstance(value, str) else value
            parts += [varint(number << 3 | BYTES), varint(len(data)), data]
    return b"".join(parts)


def forward_backward_output(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """ForwardBackwardOutput with the logprobs of each datum."""
    ends = np.cumsum([0, *(len(values) for values in logprobs)], dtype="<i8") * 4
    data = b"".join(values.astype("<f4").tobytes() for values in logprobs)
    batched = message([(1, data), (2, ends.tobytes()), (3, FLOAT32)])
    fields = message([(1, "logprobs"), (2, batched)])
    record = message([(1, "ArrayRecord"), (2, fields), (3, len(logprobs))])
    entries = [(3, message([(1, name), (2, float(value))])) for name, value in metrics.items()]
    return message([(1, "ArrayRecord"), (2, record), *entries])


def sample_response(
    sequences: Iterable[tuple[str, Sequence[int], Sequence[float]]],
    prompt_logprobs: np.ndarray | None,
) -> bytes:
    """SampleResponse. `sequences`: (finish reason, tokens, logprobs) of each."""
    fields: list[tuple[int, int | float | str | bytes]] = []
    for reason, tokens, logprobs in sequences:
        values = [
            (1, int(reason == "length")),
            (2, np.asarray(tokens, "<i4").tobytes()),
            (3, np.asarray(logprobs, "<f4").tobytes()),
        ]
        fields.append((1, message(values)))
    if prompt_logprobs is not None:
        fields.append((2, prompt_logprobs.astype("<f4").tobytes()))
    return message(fields)


class ClientRequest(BaseModel):
    """Unknown fields are ignored: clients of later versions send more."""

    model_config = ConfigDict(allow_inf_nan=False, protected_namespaces=())


Id = Annotated[str, Field(max_length=200)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
Seq = Annotated[int, Field(ge=0, lt=1 << 62)]


class OfSession(ClientRequest):
    session_id: Id


class Lora(ClientRequest):
    rank: Annotated[int, Field(ge=1)]
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerChoice(ClientRequest):
    type: str = "adamw"


class CreateModel(OfSession):
    model_seq_id: Seq
    base_model: str
    lora_config: Lora | None = None
    optimizer_config: OptimizerChoice = OptimizerChoice()


class OfModel(ClientRequest):
    model_id: Id
    seq_id: Seq = 0


class AdamParams(ClientRequest):
    learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(OfModel):
    adam_params: AdamParams | None = None
    optimizer_params: OptimizerChoice | None = None


class SaveWeights(OfModel):
    path: Name
    overwrite: bool = False


class SaveForSampler(OfModel):
    path: Name | None = None
    sampling_session_seq_id: Seq | None = None


class LoadWeights(ClientRequest):
    path: Id
    optimizer: bool = False
    model_id: Id | None = None
    seq_id: Seq = 0
    session_id: Id | None = None
    model_seq_id: Seq = 0
    base_model: str | None = None
    optimizer_config: OptimizerChoice | None = None


class SamplingSession(OfSession):
    sampling_session_seq_id: Seq
    base_model: str | None = None
    model_path: Id | None = None


class InputChunk(ClientRequest):
    type: str = "encoded_text"
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]] = []
    data: str = ""
    expected_tokens: int | None = None


class Prompt(ClientRequest):
    chunks: list[InputChunk]

    def read(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        for chunk in self.chunks:
            if chunk.type == "image":
                try:
                    data = base64.b64decode(chunk.data, validate=True)
                except binascii.Error:
                    raise ValueError("the data of an image is not base64") from None
                chunks.append(ImageBytes(data=data, expected_tokens=chunk.expected_tokens))
            elif chunk.type == "encoded_text":
                chunks.append(np.asarray(chunk.tokens, np.int64))
            else:
                raise ValueError(
                    f"chunks of type {chunk.type[:40]} are not supported; of an image give its "
                    "bytes in an ImageChunk"
                )
        return chunks


class Sampling(ClientRequest):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: int = -1
    top_p: Annotated[float, Field(ge=1e-6, le=1)] = 1.0

    @field_validator("temperature")
    @classmethod
    def check_temperature(cls, value: float) -> float:
        if 0 < value < 1e-4:
            raise ValueError("must be 0, which is greedy, or at least 0.0001")
        return value

    @field_validator("stop")
    @classmethod
    def check_stop(cls, stop: str | list[str] | list[int] | None) -> object:
        stops = [stop] if isinstance(stop, str) else stop or []
        lengths = [len(text) for text in stops if isinstance(text, str)]
        if len(stops) > MAX_STOPS or max(lengths, default=0) > MAX_STOP_LENGTH:
            raise ValueError(f"at most {MAX_STOPS} of at most {MAX_STOP_LENGTH} characters")
        return stop


# Fields of a request for samples that this server refuses.
NOT_SAMPLED = (
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "record_stability_info",
)


class Sample(ClientRequest):
    sampling_session_id: Id
    seq_id: Seq
    prompt: Prompt
    num_samples: Annotated[int, Field(ge=1, le=4096)] = 1
    sampling_params: Sampling = Sampling()
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None

    def num_tokens(self, longest: int) -> int:
        """Tokens of the prompt, an image's bytes among them, and of the longest samples."""
        of_prompt = sum(len(chunk.tokens) + len(chunk.data) for chunk in self.prompt.chunks)
        max_tokens = min(self.sampling_params.max_tokens or longest, longest)
        return of_prompt + self.num_samples * max_tokens

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, values: object) -> object:
        for name in NOT_SAMPLED:
            if isinstance(values, dict) and values.get(name):
                raise ValueError(f"{name} is not supported; leave it out")
        return values


class SavedPath(ClientRequest):
    tinker_path: Id


class Retrieve(ClientRequest):
    request_id: Annotated[str, Field(max_length=400)]


R = TypeVar("R", bound=ClientRequest)


def read_request(kind: type[R], value: JSON) -> R:
    """A request of this kind from its JSON. Raises ValueError in one line."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        text = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{where}: {text}" if where else text) from None
