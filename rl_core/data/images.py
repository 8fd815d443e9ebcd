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
import warnings
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.types import InputImage

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
# Keys of an image in a part, and of an object in their place.
IMAGE_KEYS = ("image", "image_url", "url", "source", "path", "base64", "bytes", "data")
BASE64_STARTS = ("iVBORw0KGgo", "/9j/", "UklGR")  # PNG, JPEG, WebP without a prefix (VLMEvalKit).
FIX = "give a PNG, JPEG or WebP file, or remove it"


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


def store_image(url: str, folder: Path) -> str:
    """Writes the image of a canonical part to folder/images, once; returns its name in `folder`."""
    name = f"images/{key_of(url):016x}.{url[11:].partition(';')[0]}"
    file = folder / name
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_name(f".{file.name}.{os.getpid()}")
        scratch.write_bytes(base64.b64decode(url.partition(",")[2]))
        os.replace(scratch, file)
    return name


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


def is_named(text: str) -> bool:
    is_base64 = text.startswith(BASE64_STARTS) and len(text) > MAX_NAME
    return is_base64 or text.startswith("data:") or text.lower().endswith(SUFFIXES)
