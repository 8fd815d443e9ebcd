"""Images that come in: their shapes in rows and messages, their limits, hostile files."""

from __future__ import annotations

import base64
import io
import json
import struct
import weakref
import zlib
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from rl_core.data.canonical_messages import canonical_messages
from rl_core.data.image_columns import loaded_column, with_images
from rl_core.data.image_families import PixelCache
from rl_core.data.image_parts import images_of, is_picture
from rl_core.data.images import decoded_image, image_of, read_image
from rl_core.data.preference_pairs import pair_messages
from rl_core.data.row_files import load_rows
from rl_core.data.sft_samples import sft_messages
from rl_core.data.tables import load_other
from rl_core.data.task_rows import TaskSource, make_task
from rl_core.data.vision_models import load_family

COLOURS = np.array([[[255, 0, 0], [0, 255, 0], [9, 9, 9]], [[0, 0, 255], [1, 2, 3], [7, 8, 9]]])
RED = COLOURS.astype(np.uint8)  # [2, 3, 3]: two rows of three pixels.


def file_of(picture: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


PNG = file_of(Image.fromarray(RED))
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


def pixels(url: str) -> np.ndarray:
    return np.asarray(decoded_image(image_of(url)))


# Parts of a message -> an image of PNG. Paths are tested with rows.
PARTS = {
    "OpenAI": {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
    "OpenAI's Responses": {"type": "input_image", "image_url": URL},
    "transformers' URL": {"type": "image", "url": URL},
    "transformers' base64": {"type": "image", "base64": URL.partition(",")[2]},
    "bytes": {"type": "image", "image": PNG},
    "Pillow": {"type": "image", "image": Image.fromarray(RED)},
    "numpy": {"type": "image", "image": RED},
    "Anthropic": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]},
    },
    "MCP": {"type": "image", "data": URL.partition(",")[2], "mimeType": "image/png"},
    "a file's content": PNG,
    "an image of Pillow": Image.fromarray(RED),
    "datasets": {"type": "image", "image": {"bytes": PNG, "path": "elsewhere.png"}},
    "canonical": {"type": "image", "image": URL},
}


@pytest.mark.parametrize("item", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("role", ["user", "tool", "system"])
def test_every_shape_of_a_part_is_read_as_one(item, role):
    text = {"type": "text", "text": "a"}
    [message] = canonical_messages([{"role": role, "content": [text, item, text]}])
    assert [each["type"] for each in message["content"]] == ["text", "image", "text"]
    assert np.array_equal(pixels(message["content"][1]["image"]), RED)
    assert canonical_messages([message]) == [message]
    alone = canonical_messages([{"role": role, "content": item if is_picture(item) else [item]}])
    assert alone[0]["content"] == [message["content"][1]]
    assert json.loads(json.dumps(message)) == message


def test_equal_content_has_one_key_and_other_content_another():
    messages = [{"role": "user", "content": [PARTS["canonical"], PARTS["datasets"]]}]
    other = {"type": "image", "image": RED[::-1]}
    messages += [{"role": "tool", "content": [other]}]
    first, same, other = images_of(canonical_messages(messages))
    assert first == same and first.key != other.key
    assert (first.width, first.height) == (3, 2) and 0 < first.key < 2**62


# Rows of a file -> texts ("#" for an image) of the messages.
IMAGE_ROWS = {
    "TRL": ({"prompt": "a", "images": ["x/a.png", "b.jpg"]}, ["##a"]),
    "TRL, one": ({"prompt": "a", "image": "b.jpg"}, ["#a"]),
    "TRL, system first": (
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
         "image": "b.jpg"},
        ["s", "#a"],
    ),
    "TRL, placeholders": (
        {
            "prompt": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}
            ],
            "images": ["b.jpg"],
        },
        ["a#"],
    ),
    "verl": ({"prompt": [{"role": "user", "content": "<image>a<image>b"}],
              "images": [{"bytes": None, "path": "b.jpg"}, URL]}, ["#a#b"]),
    "LLaVA": ({"conversations": [{"from": "human", "value": "<image>\na"},
                                 {"from": "gpt", "value": "b"}], "image": "x/a.png"}, ["#\na"]),
    "paths in parts": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "x/../b.jpg"}]}]},
        ["#"],
    ),
    "FineVision": ({"images": ["b.jpg"], "texts": [{"user": "a", "assistant": "b"}]}, ["#a"]),
    "VLMEvalKit": ({"question": "a", "image": URL.partition(",")[2], "answer": "b"}, ["#a"]),
    "MMMU": ({"question": "a <image 2> b <image 1>, <image 2>?", "image_2": "x/a.png",
              "image_1": "b.jpg", "image_3": None}, ["a # b #, <image 2>?"]),
    "MMMU, an image of an option": (
        {"question": "a <image 1>?", "image_1": "b.jpg", "image_2": "b.jpg"}, ["a #?#"]),
    "MathVision": ({"question": "a\n<image1>", "image": "b.jpg"}, ["a\n#"]),
    "numbers of a list": ({"prompt": "<image 1>a", "images": ["b.jpg"]}, ["#a"]),
    "BLINK": ({"prompt": "a", "image_1": "b.jpg", "image_2": "x/a.png"}, ["##a"]),
    "no image": ({"prompt": "<image> a"}, ["<image> a"]),
    "another column": ({"prompt": "a", "image": "python:3.12-slim"}, ["a"]),
    "empty": ({"prompt": "a", "images": [], "image": None}, ["a"]),
}  # fmt: skip


def shown(messages: list[dict]) -> list[str]:
    texts = []
    for message in messages:
        content = message["content"]
        parts = [{"text": content}] if isinstance(content, str) else content
        texts.append("".join(item.get("text", "#") for item in parts))
    return texts


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "set/x").mkdir(parents=True)
    (tmp_path / "set/x/a.png").write_bytes(PNG)
    (tmp_path / "set/b.jpg").write_bytes(file_of(Image.fromarray(RED), "JPEG"))
    (tmp_path / "outside.png").write_bytes(PNG)
    return tmp_path / "set"


def tasks_in(source: str) -> list:
    rows, files = load_rows(source, "train", load_other)
    return list(TaskSource(rows, env="e", split="train", seed=0, shuffle=False, files=files))


@pytest.mark.parametrize("row, texts", IMAGE_ROWS.values(), ids=IMAGE_ROWS)
def test_rows_of_a_file_have_their_images_where_they_belong(row, texts, folder):
    (folder / "rows.jsonl").write_text(json.dumps(row))
    for source in ("rows.jsonl", "*.jsonl", ""):
        [task] = tasks_in(str(folder / source))
        assert shown(task.messages) == texts


def test_a_mark_with_a_number_names_its_image(folder):
    row = {"question": "a <image 2> <image 1>", "image_1": "b.jpg", "image_2": "x/a.png"}
    urls = [
        image.url for image in images_of(make_task(row, 0, "e", "train", folder=folder).messages)
    ]
    assert [url.partition(";")[0] for url in urls] == ["data:image/png", "data:image/jpeg"]


def test_a_column_of_a_row_in_code_holds_an_array():
    assert loaded_column(RED, None) == loaded_column([Image.fromarray(RED)], None) != [None]


USER = {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "a"}]}
CAT = {"role": "assistant", "content": [{"type": "text", "text": "cat"}]}
DOG = {"role": "assistant", "content": "dog"}
# Rows of DPO, and of SFT -> texts of the messages of each side.
LEARNED_ROWS = {
    "TRL": ({"images": ["b.jpg"], "prompt": [USER], "chosen": [CAT], "rejected": [DOG]}, "#a cat | #a dog"),
    "TRL, conversations": (
        {"images": ["b.jpg"], "chosen": [USER, CAT], "rejected": [USER, DOG]}, "#a cat | #a dog"),
    "RLAIF-V": ({"image": "b.jpg", "question": "a", "chosen": "cat", "rejected": "dog"}, "#a cat | #a dog"),
    "LLaMA-Factory, pairs": (
        {"conversations": [{"from": "human", "value": "a<image>"}], "images": ["b.jpg"],
         "chosen": {"from": "gpt", "value": "cat"}, "rejected": {"from": "gpt", "value": "dog"}},
        "a# cat | a# dog"),
    "TRL, SFT": ({"messages": [USER, CAT], "images": ["b.jpg"]}, "#a cat"),
    "TRL, completion": ({"prompt": [USER], "completion": [CAT], "images": ["b.jpg"]}, "#a cat"),
    "LLaMA-Factory": (
        {"messages": [{"role": "user", "content": "a<image>"}, CAT], "images": ["b.jpg"]}, "a# cat"),
    "OpenAI": ({"messages": [{"role": "user", "content": [PARTS["OpenAI"]]}, DOG]}, "# dog"),
}  # fmt: skip


@pytest.mark.parametrize("row, texts", LEARNED_ROWS.values(), ids=LEARNED_ROWS)
def test_rows_of_sft_and_dpo_have_their_images_in_the_prompt(row, texts, folder):
    row = with_images(row, folder)
    sides = pair_messages(row) if "rejected" in row else [(sft_messages(row), [])]
    assert " | ".join(" ".join(shown(context + reply)) for context, reply in sides) == texts


SIDES = [
    ({"images": ["b.jpg"], "rejected_images": ["x/a.png"]}, ["jpeg", "png"]),
    ({"chosen_images": ["x/a.png"], "rejected_images": "b.jpg"}, ["png", "jpeg"]),
    ({"image": "b.jpg", "rejected_images": ["x/a.png"]}, ["jpeg", "png"]),
    ({"image": "b.jpg", "chosen_images": None, "rejected_images": []}, ["jpeg", "jpeg"]),
]


@pytest.mark.parametrize("columns, kinds", SIDES)
@pytest.mark.parametrize("replies", [("cat", "dog"), ([USER, CAT], [USER, DOG])])
def test_each_side_of_a_pair_has_its_images(replies, columns, kinds, folder):
    chosen, rejected = replies
    row = {"prompt": "a", "chosen": chosen, "rejected": rejected} | columns
    contexts = [context for context, _ in pair_messages(with_images(row, folder))]
    urls = [[image.url for image in images_of(context)] for context in contexts]
    assert [url.partition(";")[0] for [url] in urls] == [f"data:image/{k}" for k in kinds]


def test_columns_of_images_of_a_table_are_read(folder):
    table = datasets.Dataset.from_list([{"prompt": "a", "image": {"bytes": PNG}, "images": None}])
    table = table.cast_column("image", datasets.Image())
    table.to_parquet(folder / "rows.parquet")
    table.save_to_disk(folder / "saved")
    for source in ("rows.parquet", "saved"):
        [task] = tasks_in(str(folder / source))
        assert shown(task.messages) == ["#a"]
        assert np.array_equal(pixels(task.row["image"][0]), RED)


def png_of_size(width: int, height: int) -> bytes:
    """A PNG whose header has this size, and a few bytes of pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(10))), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n"
    for name, content in chunks:
        data += struct.pack(">I", len(content)) + name + content
        data += struct.pack(">I", zlib.crc32(name + content))
    return data


def animation() -> bytes:
    frames = [Image.fromarray(np.full((2, 2, 3), n, np.uint8)) for n in (0, 99)]
    return file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])


def text_bomb() -> bytes:
    about = PngImagePlugin.PngInfo()
    about.add_itxt("bomb", " " * (80 << 20), zip=True)
    return file_of(Image.fromarray(RED), pnginfo=about)


HOSTILE = {
    "20,000 x 20,000": (png_of_size(20_000, 20_000), "more than 64,000,000 pixels; store a sm"),
    "9,000 x 9,000": (png_of_size(9_000, 9_000), "has 9000 x 9000 pixels, the limit is 64,0"),
    "a line": (file_of(Image.new("RGB", (999, 2))), "999 x 2 pixels, one side over 200 times"),
    "SVG": (b"<?xml version='1.0'?><svg xmlns=''/>", "is an SVG, which has no pixels; give a PNG"),
    "animated": (animation(), "an image has 2 frames; store one of them as a PNG"),
    "truncated PNG": (PNG[:-30], "damaged or cut short"),
    "truncated JPEG": (file_of(Image.fromarray(np.zeros((99, 99, 3), np.uint8)), "JPEG")[:-40], "d"
                       "amaged or cut short"),
    "text chunk of 80 MB": (text_bomb(), "is not an image|damaged"),
    "text": (b"hello", "a file of 5 bytes that begins with b'hello' is not an image; give"),
    "empty": (b"", "is not an image"),
    "too large": (bytes(33 << 20), "has 34,603,008 bytes, the limit is 33,554,432; store a sm"),
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an image"),
}  # fmt: skip


@pytest.mark.parametrize("data, error", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_with_its_row(data, error, folder):
    (folder / "h.png").write_bytes(data)
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "a", "images": ["b.jpg", "h.png"]}))
    with pytest.raises(ValueError, match=rf"row 1 of .*column 'images': image 2: .*({error})"):
        tasks_in(str(folder / "rows.jsonl"))


OUTSIDE = {
    "../outside.png": "is outside of .*, the folder of its rows; put the file",
    "/etc/hostname.png": "is outside of",
    "link.png": "is outside of",
    "none.png": "none.png: no such file",
    "https://x.org/a.png": "a run downloads nothing; download the file next to the rows",
    "file:///etc/a.png": "a run downloads nothing",
    "data:image/png,abc.png": "it must be data:image/png;base64",
    "data:text/html;base64,AAAA": "it must be data:image/png;base64",
    "data:image/png;base64,A*": "is not base64",
}


@pytest.mark.parametrize("name, error", OUTSIDE.items(), ids=OUTSIDE)
def test_a_path_that_a_row_may_not_name_is_refused(name, error, folder):
    (folder / "link.png").symlink_to(folder.parent / "outside.png")
    item = {"type": "image", "image": name}
    row = {"messages": [{"role": "user", "content": [item]}]}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=f"row 1 of .*column 'messages': message 1: .*{error}"):
        tasks_in(str(folder / "rows.jsonl"))


@pytest.mark.parametrize("item", [PARTS["OpenAI"] | {"image_url": {"url": "b.jpg"}},
                                  {"type": "image", "path": "/etc/passwd"}])  # fmt: skip
def test_messages_of_programs_name_no_files(item):
    with pytest.raises(ValueError, match=r"message 1: .*paths are read in rows of a file alone"):
        canonical_messages([{"role": "user", "content": [item]}])


def exif(number: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = number
    return tags


GREY_16 = (np.arange(6).reshape(2, 3) * 9000).astype(np.uint16)
CONVERTED = {
    "EXIF rotation": (file_of(Image.fromarray(RED), exif=exif(6)), np.rot90(RED, -1)),
    "16 bit": (
        file_of(Image.fromarray(GREY_16)),
        np.repeat((GREY_16 >> 8)[..., None], 3, -1),
    ),
    "palette": (file_of(Image.fromarray(RED).convert("P", palette=1)), None),
    "alpha": (file_of(Image.fromarray(np.dstack([RED, RED[..., 0]]))), RED),
    "CMYK": (file_of(Image.new("CMYK", (3, 2)), "JPEG"), np.full((2, 3, 3), 255)),
    "BMP": (file_of(Image.fromarray(RED), "BMP"), RED),
    "1 bit": (file_of(Image.fromarray(RED[..., 0] > 99)), np.repeat(RED[..., :1] // 255 * 255, 3, -1)),
}  # fmt: skip


@pytest.mark.parametrize("data, wanted", CONVERTED.values(), ids=CONVERTED)
def test_other_forms_become_rgb_as_transformers_reads_them(data, wanted):
    [image] = images_of(canonical_messages([{"role": "user", "content": [
        {"type": "image", "image": data}]}]))  # fmt: skip
    assert image.url.startswith("data:image/png;")
    if wanted is None:
        wanted = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(np.asarray(decoded_image(image)), wanted)
    assert (image.height, image.width) == wanted.shape[:2]


@pytest.mark.parametrize(
    "row, error",
    [
        ({"prompt": "<image>a", "images": [URL, URL]}, "the messages have 1 marks <image>, and the"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "images": [URL, URL]},
         "have 1 parts of type 'image', and the row has 2 images"),
        ({"prompt": "<image 3>a", "images": [URL, URL]},
         "a text has the mark <image 3>, and the row 2 images"),
    ],
)  # fmt: skip
def test_another_number_of_marks_than_of_images_is_refused(row, error):
    with pytest.raises(ValueError, match=rf"row 1 of the split 'train': .*{error}"):
        make_task(row, 0, "e", "train")


def test_the_pixel_cache_drops_the_least_recently_used(make_model, monkeypatch):
    family = load_family(str(make_model("qwen2_5_vl")))
    a, b, c = (read_image(np.full((16, 16, 3), n, np.uint8)) for n in range(3))
    size = sum(tensor.nbytes for tensor in family.tensors(a).values())
    cache = PixelCache(family, 2 * size + 99)  # Grids have bytes too.
    for images in ([a, b], [a, a], [c]):
        assert len(list(cache.each(images))) == len(images)
    assert cache.made.keys() == {(a.key, None), (c.key, None)}
    assert cache.total == pytest.approx(2 * size, abs=99)
    # One waits for its first use, which is more than a quarter of the limit.
    later = [read_image(np.full((16, 16, 3), n, np.uint8)) for n in range(3, 9)]
    cache.start(later)
    assert [key for key, _ in cache.made] == [c.key, later[0].key]
    assert len(cache.joined(later)["image_grid_thw"]) == 6 and cache.total <= 2 * size + 99
    # Images in the cache, the one that is computed and the one that is copied.
    refs, counts, tensors = [], [], family.tensors

    def counted(image):
        made = tensors(image)
        refs.append(weakref.ref(made["pixel_values"]))
        counts.append(sum(ref() is not None for ref in refs))
        return made

    monkeypatch.setattr(family, "tensors", counted)
    many = [read_image(np.full((16, 16, 3), n, np.uint8)) for n in range(10, 22)]
    assert len(cache.joined(many)["image_grid_thw"]) == len(counts) == 12 and max(counts) < 6
