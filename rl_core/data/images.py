"""Images of rows, hooks and programs -> one canonical form, under limits.

A canonical part of a message is {"type": "image", "image": "data:image/png;base64,..."}: a text,
which copies of a message share and JSON can hold. An image of a column that has no position yet
is {"type": "image"}; place_images() fills it.

Bytes stay as they are if the model reads them as RGB or grey: PNG, JPEG, WebP. Other images become
a PNG in RGB: EXIF rotation is applied, alpha dropped, 16 bit scaled to 8 bit.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.types import JSON, InputImage, JSONObject, Message, Row, Trajectory

if TYPE_CHECKING:
    from PIL import Image

KEPT_FORMATS = {"PNG": "png", "JPEG": "jpeg", "WEBP": "webp"}
READ_FORMATS = (*KEPT_FORMATS, "GIF", "BMP", "TIFF")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
MAX_BYTES = 32 << 20
# A header is read before pixels are decoded: a PNG of a few bytes may hold gigabytes of pixels.
MAX_PIXELS = 64_000_000
MAX_ASPECT = 200  # Qwen's processors refuse more.
MAX_NAME = 64  # Characters of a text that begins as base64 does and may name a file.
KEY_BITS = 62
IMAGE_PARTS = ("image", "image_url", "input_image")
IMAGE_COLUMNS = ("image", "images")
SIDE_IMAGES = ("chosen_images", "rejected_images")  # Of one reply of a pair, as in ms-swift.
NUMBERED = re.compile(r"image_(\d+)")  # The columns of MMMU.
# Keys of an image in a part, and of an object in their place.
IMAGE_KEYS = ("image", "image_url", "url", "source", "path", "base64", "bytes", "data")
MARK = "<image>"
# The place of an image by its number, from 1: <image 1> in MMMU, <image1> in MathVision.
NUMBERED_MARK = re.compile(r"<image[ _]?(\d+)>")
BASE64_STARTS = ("iVBORw0KGgo", "/9j/", "UklGR")  # PNG, JPEG, WebP without a prefix (VLMEvalKit).
FIX = "give a PNG, JPEG or WebP file, or remove it"


def image_part(item: object, folder: Path | None = None) -> JSONObject:
    """The canonical part of OpenAI's, transformers', Anthropic's or MCP's part of an image, or of a
    picture. Raises ValueError as read_image()."""
    if isinstance(item, dict) and all(item.get(key) is None for key in IMAGE_KEYS):
        return {"type": "image"}
    return {"type": "image", "image": read_image(item, folder).url}


def is_image_part(item: object) -> bool:
    return is_picture(item) or (isinstance(item, dict) and item.get("type") in IMAGE_PARTS)


def is_picture(value: object) -> bool:
    """True for an image that stands for its part: a file's content, or an image of PIL."""
    return isinstance(value, bytes) or type(value).__module__.startswith("PIL.")


def read_image(value: object, folder: Path | None = None) -> InputImage:
    """The image in a data: URL, bytes, an array, an object of PIL, or an object with one of these.
    A text is a path in `folder`; without a folder, paths are refused: programs and models must not
    read files here. Raises ValueError for anything else."""
    while isinstance(value, dict):
        values = [value[key] for key in IMAGE_KEYS if value.get(key) is not None]
        if not values:
            raise ValueError(f"an image has none of the keys {', '.join(IMAGE_KEYS)}; {FIX}")
        # datasets.Image has both bytes and a name; Anthropic's source has base64 without a prefix.
        if isinstance(value.get("data"), str):
            values = [f"data:{value.get('media_type', 'image/png')};base64,{value['data']}"]
        elif isinstance(value.get("base64"), str):
            values = [f"data:image/png;base64,{value['base64']}"]
        value = value["bytes"] if isinstance(value.get("bytes"), bytes) else values[0]
    if isinstance(value, str):
        if value.startswith(BASE64_STARTS) and len(value) > MAX_NAME:
            value = f"data:image/png;base64,{value}"
        if value.startswith("data:"):
            return image_in_url(value)
        return image_in_bytes(file_bytes(value, folder))
    if isinstance(value, Path):  # Only code gives a Path, and may read any file.
        return image_in_bytes(bytes_of(value))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return image_in_bytes(bytes(value))
    return image_in_bytes(png_of(value))


@lru_cache(64)
def image_in_url(url: str) -> InputImage:
    """The image of a data: URL, whose pixels are checked."""
    return image_in_bytes(decoded_url(url))


@lru_cache(256)
def image_of(url: str) -> InputImage:
    """The image of a canonical part, whose pixels were checked before."""
    width, height = opened(base64.b64decode(url.partition(",")[2])).size
    return InputImage(key=key_of(url), url=url, width=width, height=height)


def key_of(url: str) -> int:
    """A number of KEY_BITS bits by which images with the same content have the same key."""
    digest = hashlib.sha256(url.encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> (64 - KEY_BITS)) or 1


def decoded_url(url: str) -> bytes:
    head, comma, text = url.partition(",")
    if not comma or not head.endswith(";base64") or not head.startswith("data:image/"):
        raise ValueError(f"a data: URL of an image begins with {head[:60]!r}; {URL_FIX}")
    if len(text) > 2 * MAX_BYTES:
        raise ValueError(too_large(len(text) * 3 // 4))
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"a data: URL of an image is not base64; {URL_FIX}") from None


URL_FIX = "it must be data:image/png;base64,... (or jpeg, webp)"


def file_bytes(name: str, folder: Path | None) -> bytes:
    """The content of a file in the folder of a data file. Raises ValueError for other files."""
    if "://" in name:
        raise ValueError(
            f"an image is at {name[:80]!r}: a run downloads nothing; download the file next to the "
            "rows and give its path, or give a data: URL"
        )
    if folder is None:
        raise ValueError(
            f"an image is the text {name[:80]!r}: paths are read in rows of a file alone, relative "
            "to the file; give a data: URL, bytes, a pathlib.Path or an image of PIL"
        )
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(
            f"image {name!r} is outside of {folder}, the folder of its rows; put the file into "
            "that folder"
        )
    return bytes_of(path)


def bytes_of(path: Path) -> bytes:
    if not path.is_file():
        raise ValueError(f"image {path}: no such file")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"image {path}: {too_large(path.stat().st_size)}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"image {path} cannot be read: {error.strerror}") from None


def too_large(num: int) -> str:
    return f"an image has {num:,} bytes, the limit is {MAX_BYTES:,}; store a smaller one"


def image_in_bytes(data: bytes) -> InputImage:
    """The image in a file's content, converted if need be. Decodes it once, so that a damaged file
    raises ValueError here."""
    if len(data) > MAX_BYTES:
        raise ValueError(too_large(len(data)))
    picture = opened(data)
    width, height = picture.size
    kind = picture.format
    try:
        keeps = kind in KEPT_FORMATS and picture.mode in ("RGB", "L")
        keeps = keeps and picture.getexif().get(0x0112, 1) == 1
        if kind == "JPEG" and keeps:
            picture.draft(
                "RGB", (width // 8 + 1, height // 8 + 1)
            )  # An eighth of the pixels is decoded.
        picture.load()
        if not keeps:
            data, (width, height) = as_png(picture)
            kind = "PNG"
    except Exception as error:  # Decoders raise OSError, SyntaxError, ValueError, struct.error ...
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"an image ({kind}) is damaged or cut short: {reason}; {FIX}") from None
    url = f"data:image/{KEPT_FORMATS[str(kind)]};base64,{base64.b64encode(data).decode()}"
    return InputImage(key=key_of(url), url=url, width=width, height=height)


def opened(data: bytes) -> Image.Image:
    """The image with its header read. Raises ValueError if its header is not one, or exceeds the
    limits."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(data), formats=READ_FORMATS)
    except Image.DecompressionBombError:
        raise ValueError(f"an image has more than {MAX_PIXELS:,} pixels; {SMALLER}") from None
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, OverflowError):
        start = data[:200].lstrip().lower()
        kind = "an SVG, which has no pixels" if b"<svg" in start else "not an image"
        raise ValueError(
            f"a file of {len(data)} bytes that begins with {bytes(data[:8])!r} is {kind}; {FIX}"
        ) from None
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise ValueError(
            f"an image has {width} x {height} pixels, the limit is {MAX_PIXELS:,}; {SMALLER}"
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ValueError(
            f"an image has {width} x {height} pixels, one side over 200 times the "
            "other; cut it into pieces"
        )
    if (frames := getattr(picture, "n_frames", 1)) > 1:
        raise ValueError(f"an image has {frames} frames; store one of them as a PNG")
    return picture


SMALLER = "store a smaller one"


def as_png(picture: Image.Image) -> tuple[bytes, tuple[int, int]]:
    """(PNG in RGB, size) after EXIF rotation, as transformers.image_utils.load_image() converts
    an image; but 16 bits are scaled, which Pillow would clip to white."""
    from PIL import Image, ImageOps

    if picture.mode.startswith("I"):
        import numpy as np

        picture = Image.fromarray((np.asarray(picture).astype(np.uint32) >> 8).astype(np.uint8))
    picture = ImageOps.exif_transpose(picture).convert("RGB")
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue(), picture.size


def png_of(value: object) -> bytes:
    """The PNG of an image of PIL, or of an array [H, W], [H, W, 3] of bytes."""
    from PIL import Image

    if type(value).__module__.startswith("numpy"):
        import numpy as np

        array = np.asarray(value)
        is_grey = array.ndim == 2
        if array.dtype != np.uint8 or not (is_grey or (array.ndim == 3 and array.shape[2] == 3)):
            raise ValueError(
                f"an image is an array {list(array.shape)} of {array.dtype}; it must be [H, W, 3] "
                "or [H, W] of uint8"
            )
        value = Image.fromarray(array)
    if not isinstance(value, Image.Image):
        raise ValueError(f"an image is of type {type(value).__name__}; {FIX}")
    return as_png(value)[0]


def decoded_image(image: InputImage) -> Image.Image:
    """The pixels of an image, in RGB."""
    return opened(base64.b64decode(image.url.partition(",")[2])).convert("RGB")


def small_copy(data: bytes, longest: int) -> str:
    """The image in a file's content as a data: URL, with at most `longest` pixels on a side. Raises
    ValueError as opened(), and for a damaged image."""
    picture, urls = opened(data), []
    try:
        picture.thumbnail((longest, longest))
        picture = picture.convert("RGB")
    except Exception as error:  # Decoders raise errors of many types.
        raise ValueError(f"an image is damaged: {error}") from None
    for kind in ("PNG", "JPEG"):
        buffer = io.BytesIO()
        picture.save(buffer, kind)
        data = base64.b64encode(buffer.getvalue())
        urls.append(f"data:image/{KEPT_FORMATS[kind]};base64,{data.decode()}")
    return min(urls, key=len)


def images_of(messages: Sequence[Message]) -> list[InputImage]:
    """The images of canonical messages in their order. Raises ValueError for a part without an
    image."""
    images = []
    for number, message in enumerate(messages, 1):
        content = message.get("content")
        for item in content if isinstance(content, list) else ():
            if item.get("type") != "image":
                continue
            if message["role"] == "assistant":
                raise ValueError(
                    f"message {number}: an assistant's message has an image; models "
                    "write text alone"
                )
            if "image" not in item:
                raise ValueError(
                    f"message {number}: a part of type 'image' has no image; give one there, or in "
                    "a column 'images' of the row"
                )
            images.append(image_of(item["image"]))
    return images


def with_images(row: Row, folder: Path | None) -> Row:
    """The row with each image of its columns and messages as a data: URL. `folder`: of the data
    file. A row without images is returned itself. Raises ValueError with the column."""
    changed: Row = {}
    for column, value in row.items():
        try:
            if column in (*IMAGE_COLUMNS, *SIDE_IMAGES) or NUMBERED.fullmatch(column):
                loaded = loaded_column(value, folder)
            else:
                loaded = loaded_messages(value, folder)
        except ValueError as error:
            raise ValueError(f"column {column!r}: {error}") from None
        if loaded is not None:
            changed[column] = loaded
    return row | changed if changed else row


def loaded_column(value: JSON, folder: Path | None) -> list[str] | None:
    """The URLs of a column of images; None if it holds none. A text that names no file of an image
    is of another column, such as the container of an environment."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    is_empty = not values or (len(values) == 1 and values[0] is None)
    if is_empty or any(isinstance(v, str) and not is_named(v) for v in values):
        return None
    urls = []
    for number, each in enumerate(values, 1):
        try:
            urls.append(read_image(each, folder).url)
        except ValueError as error:
            raise ValueError(f"image {number}: {error}") from None
    return urls


def is_named(text: str) -> bool:
    is_base64 = text.startswith(BASE64_STARTS) and len(text) > MAX_NAME
    return is_base64 or text.startswith("data:") or text.lower().endswith(SUFFIXES)


def holds_image(value: object) -> bool:
    """True if a column of any name has images: pixels, or paths of files."""
    return holds_pixels(value) or any(map(is_image_name, values_of(value)))


def holds_pixels(value: object) -> bool:
    """True for images of PIL, data: URLs, and datasets.Image's bytes."""
    return any(is_picture(each) or is_image_url(each) for each in values_of(value))


def is_image_name(value: object) -> bool:
    return isinstance(value, str) and is_named(value) and not re.search(r"\s", value)


def values_of(value: object) -> list[object]:
    """The images of a column: the items of a list; the bytes, else the name, of datasets.Image."""
    images: list[object] = []
    for each in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(each, dict) and "path" in each:
            each = each["bytes"] if isinstance(each.get("bytes"), bytes) else each["path"]
        images.append(each)
    return images


def loaded_messages(value: JSON, folder: Path | None) -> list[JSON] | None:
    """The messages with canonical parts for their images; None if the value has none."""
    if not isinstance(value, (list, tuple)) or not any(map(has_image, value)):
        return None
    messages = []
    for number, message in enumerate(value, 1):
        if not has_image(message):
            messages.append(message)
            continue
        content = [message["content"]] if is_picture(message["content"]) else message["content"]
        try:
            parts = [image_part(item, folder) if is_image_part(item) else item for item in content]
        except ValueError as error:
            raise ValueError(f"message {number}: {error}") from None
        messages.append({**message, "content": parts})
    return messages


def has_image(message: JSON) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    is_list = isinstance(content, (list, tuple))
    return is_picture(content) or (is_list and any(map(is_image_part, content)))


def load_images(trajectory: JSONObject, folder: Path) -> None:
    """Reads the images of a trajectory's messages from files in `folder`."""
    for key in ("messages", "teacher_messages"):
        if (loaded := loaded_messages(trajectory.get(key), folder)) is not None:
            trajectory[key] = loaded


def set_images(trajectory: Trajectory) -> None:
    """Sets the images of turns from the messages, which alone have them on disk and between
    processes. Raises ValueError if an image of a turn is in no message."""
    with_tokens = [turn for turn in trajectory.turns if min(turn.new_ids, default=0) < 0]
    known = {image.key: image for image in images_of(trajectory.messages) if with_tokens}
    for turn in with_tokens:
        keys = dict.fromkeys(-number for number in turn.new_ids if number < 0)
        if missing := keys.keys() - known:
            raise ValueError(
                f"a turn of {trajectory.group_id or trajectory.actor} has tokens of the image "
                f"{min(missing):016x}, which no message of its trajectory has"
            )
        turn.images = tuple(known[key] for key in keys)


def row_images(row: Row) -> list[str]:
    """The URLs of a row of with_images(): of one of IMAGE_COLUMNS, else of the numbered ones."""
    numbered = [column for column in row if NUMBERED.fullmatch(column)]
    numbered.sort(key=lambda column: int(column.rpartition("_")[2]))
    for columns in (*[[column] for column in IMAGE_COLUMNS], numbered):
        # A column without images is not read in the sense of ReadRow.
        filled = [column for column in columns if is_image_list(dict.get(row, column))]
        if filled:
            return [url for column in filled for url in row[column]]
    return []


def is_image_list(value: JSON) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_image_url, value))


def place_images(messages: list[Message], urls: Sequence[str]) -> list[Message]:
    """The messages with the images of a row's columns: in the parts of type image that have none,
    else in place of the marks <image> (verl, LLaVA) or <image 1> (MMMU) in texts, else before the
    first text of a user (TRL). Images whose number has no mark are behind the last text with marks.
    Raises ValueError for another number of parts or marks than of images."""
    parts = [list_of_parts(message) for message in messages]
    empty = sum(item == {"type": "image"} for message in parts for item in message)
    if any("image" in item for message in parts for item in message) and not empty:
        return messages  # The messages hold the images themselves.
    marked = [i for i, message in enumerate(messages) if has_numbered_mark(message)]
    if marked and not empty:
        left = dict(enumerate(urls, 1))
        filled = {i: numbered_parts(parts[i], left, len(urls)) for i in marked}
        filled[marked[-1]] += [{"type": "image", "image": url} for url in left.values()]
        return [m | {"content": filled[i]} if i in filled else m for i, m in enumerate(messages)]
    if not empty:
        parts = [split_marks(message) for message in parts]
    places = sum(item == {"type": "image"} for message in parts for item in message)
    if not places:
        first = next((i for i, m in enumerate(messages) if m["role"] == "user"), 0)
        parts[first] = [{"type": "image"} for _ in urls] + parts[first]
        places = len(urls)
    if places != len(urls):
        kind = "parts of type 'image'" if empty else f"marks {MARK}"
        raise ValueError(
            f"the messages have {places} {kind}, and the row has {len(urls)} images; give one for "
            "each"
        )
    left, placed = iter(urls), []
    for message, of_message in zip(messages, parts, strict=True):
        if {"type": "image"} in of_message:
            filled = []
            for item in of_message:
                is_empty = item == {"type": "image"}
                filled.append({"type": "image", "image": next(left)} if is_empty else item)
            message = {**message, "content": filled}
        placed.append(message)
    return placed


def list_of_parts(message: Message) -> list[JSONObject]:
    content = message.get("content") or []
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def has_numbered_mark(message: Message) -> bool:
    texts = (item.get("text", "") for item in list_of_parts(message))
    return message["role"] != "assistant" and any(map(NUMBERED_MARK.search, texts))


def numbered_parts(
    parts: list[JSONObject], left: dict[int, str], num_images: int
) -> list[JSONObject]:
    """The parts with the image of each NUMBERED_MARK. Images of `left`, by number, are taken out; a
    later mark of the same number stays text."""
    split: list[JSONObject] = []
    for item in parts:
        text, end = item.get("text", ""), 0
        for mark in NUMBERED_MARK.finditer(text):
            if not 0 < int(mark[1]) <= num_images:
                raise ValueError(f"a text has the mark {mark[0]}, and the row {num_images} images")
            if (url := left.pop(int(mark[1]), None)) is None:
                continue
            if before := text[end : mark.start()]:
                split.append({"type": "text", "text": before})
            split.append({"type": "image", "image": url})
            end = mark.end()
        if rest := text[end:]:
            split.append({"type": "text", "text": rest} if end else item)
    return split


def split_marks(parts: list[JSONObject]) -> list[JSONObject]:
    """The parts with an empty part of an image for each mark in their texts."""
    split: list[JSONObject] = []
    for item in parts:
        if MARK not in item.get("text", ""):
            split.append(item)
            continue
        for number, text in enumerate(item["text"].split(MARK)):
            if number:
                split.append({"type": "image"})
            if text:
                split.append({"type": "text", "text": text})
    return split


def with_stored_images(text: str, folder: Path) -> str:
    """JSON text whose parts of images name files in folder/images, which hold each image once: the
    paths are relative to `folder`, as those of rows are."""
    if URL_START not in text:
        return text

    def stored(match: re.Match[str]) -> str:
        url = match[1]
        name = f"images/{key_of(url):016x}.{url[11:].partition(';')[0]}"
        file = folder / name
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            scratch = file.with_name(f".{file.name}.{os.getpid()}")
            scratch.write_bytes(base64.b64decode(url.partition(",")[2]))
            os.replace(scratch, file)
        return f'"image": "{name}"'

    return STORED_URL.sub(stored, text)


URL_START = '"image": "data:image/'
STORED_URL = re.compile(r'"image": "(data:image/[a-z]+;base64,[A-Za-z0-9+/=]+)"')


def is_image_url(value: JSON) -> bool:
    return isinstance(value, str) and value.startswith("data:image/")


def without_pixels(value: JSON, depth: int = 5) -> JSON:
    """A value for people: data: URLs of images down to `depth` are replaced by shown_image()."""
    if is_image_url(value):
        with suppress(ValueError):
            return shown_image(image_of(value))
    if isinstance(value, dict) and depth:
        return {key: without_pixels(each, depth - 1) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and depth:
        return [without_pixels(each, depth - 1) for each in value]
    return value


def shown_image(image: InputImage) -> str:
    """Text for people in place of an image."""
    return f"[image {image.width}x{image.height}]"
