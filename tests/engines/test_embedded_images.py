"""Images in prompts of the embedded engine, and in whole runs, against transformers' own forward."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from aiohttp import web
from aiohttp.test_utils import TestServer
from kit import STOP, embedded, metrics, run, steps
from oracle import chosen, frozen, inputs, scores
from packaging.version import Version
from PIL import Image
from test_runs import assert_same_weights, lasting
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.gemma.tokenization_gemma import GemmaTokenizer
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor
from transformers.processing_utils import ProcessorMixin

from rl_core.config import parse_config
from rl_core.data.canonical_messages import canonical_messages
from rl_core.data.chat import Chat
from rl_core.data.chat_loading import load_chat
from rl_core.data.image_columns import with_images
from rl_core.data.images import read_image
from rl_core.data.preference_pairs import scored_pair
from rl_core.data.samples import samples_from_turns
from rl_core.data.tables import read_episodes
from rl_core.data.task_rows import prompt_messages
from rl_core.data.token_stream import TokenStream
from rl_core.data.vision_models import load_family
from rl_core.learning.teachers.self_distill import as_teacher_reads, taught_samples
from rl_core.models.vision import Vision
from rl_core.rewards.reward_model import RewardModel, ScoreServer, remote_scores
from rl_core.run.plan.image_checks import why_no_images
from rl_core.run.saving.run_files import write_trajectories
from rl_core.sampling.resumable_rollouts import FILE, read_groups, read_trajectories
from rl_core.tools.cli import main
from rl_core.types import Completion, SamplingParams, Trajectory, Turn

try:
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
except ModuleNotFoundError:  # Older versions need torchvision for it.
    Gemma4Processor = ProcessorMixin


class Pixtral:
    """transformers' PixtralProcessor needs torchvision."""

    def replace_image_token(self, seen, number: int) -> str:
        rows, columns = (seen["image_sizes"][number] // 8).tolist()
        lines = ["<|image_pad|>" * columns] * rows
        return "[IMG_BREAK]".join(lines) + "[IMG_END]"


FRAME = {"start_image_token": "<img>", "end_image_token": "</img>", "image_seq_length": 1}
TILES = {"fake_image_token": "<fake_token_around_image>", "image_seq_len": 1}
FULL = {"vision_feature_select_strategy": "full"}
LLAVA = {
    "patch_size": 4,
    "num_additional_image_tokens": 1,
    "vision_feature_select_strategy": "default",
}
GEMMA = f"\n\n<start_of_image>{'<|image_pad|>' * 4}<end_of_image>\n\n"
# Model -> (processor, its settings).
FAMILIES: dict[str, tuple] = {
    "qwen2_5_vl": (Qwen2_5_VLProcessor, {}),
    "qwen3_vl": (Qwen3VLProcessor, {}),
    "qwen2_vl": (Qwen2VLProcessor, {}),
    "qwen3_vl_moe": (Qwen3VLProcessor, {}),
    "qwen3_5": (Qwen3VLProcessor, {}),
    "glm4v": (Glm4vProcessor, {}),
    "glm4v_moe": (Glm4vProcessor, {}),
    "glm46v": (Glm46VProcessor, {}),
    "mistral3": (Pixtral, {}),
    "internvl": (InternVLProcessor, FRAME),
    "idefics3": (Idefics3Processor, TILES | {"global_image_tag": "<global-img>"}),
    "smolvlm": (SmolVLMProcessor, TILES | {"global_image_token": "<global-img>"}),
    "gemma3": (Gemma3Processor, {"full_image_sequence": GEMMA}),
    "gemma4": (Gemma4Processor, {"boi_token": "<|image>", "eoi_token": "<image|>"}),
    "llava": (LlavaProcessor, LLAVA),
    "llava_next": (LlavaNextProcessor, LLAVA),
    "llava_onevision": (
        LlavaOnevisionProcessor,
        {"num_image_tokens": 4, "vision_aspect_ratio": "anyres_max_9"} | FULL,
    ),
}


# The families left out share classes. LLaVA-OneVision takes one image in a conversation.
SAMPLED = [name for name in FAMILIES if name not in ("glm4v", "smolvlm", "llava_onevision")]


# Older versions read images of the first two with torchvision alone, and mask Gemma's otherwise.
IS_OLD = Version(transformers.__version__) < Version("5.19")
REFUSED_BEFORE = {"idefics3", "smolvlm", "gemma3", "gemma4"}
GEMMA_SEES = pytest.mark.skipif(IS_OLD, reason="transformers is too old for Gemma's images")


@pytest.fixture(params=SAMPLED)
def path(request, make_model):
    if IS_OLD and request.param in REFUSED_BEFORE:
        pytest.skip(f"transformers {transformers.__version__} is too old for {request.param}")
    return str(make_model(request.param))


def noise(number: int, height: int = 16, width: int = 24) -> np.ndarray:
    return np.random.RandomState(number).randint(0, 256, (height, width, 3), dtype=np.uint8)


def user(*parts, role: str = "user") -> dict:
    """A message of texts and images."""
    content = []
    for item in parts:
        is_text = isinstance(item, str)
        kind = "text" if is_text else "image"
        content.append({"type": kind, kind: item})
    [message] = canonical_messages([{"role": role, "content": content}])
    return message


@pytest.mark.parametrize("path", FAMILIES, indirect=True)
def test_tokens_and_positions_are_those_of_transformers_processor(path):
    chat = load_chat(path)
    family, processor = chat.vision, AutoImageProcessor.from_pretrained(path)
    kind, settings = FAMILIES[family.config.model_type]
    if kind.replace_image_token is getattr(ProcessorMixin, "replace_image_token", None):
        pytest.skip(f"transformers {transformers.__version__} has no text of one image")
    processor.return_row_col_info = True
    theirs = kind.__new__(kind)
    vars(theirs).update(settings, image_token="<|image_pad|>", image_processor=processor)
    shapes = [(16, 24), (7, 9), (100, 40), (1000, 1200), (9, 500)]
    pictures = [noise(n, *shape) for n, shape in enumerate(shapes)]
    seen = processor([Image.fromarray(picture) for picture in pictures], return_tensors="pt")
    for number, picture in enumerate(pictures):
        image = read_image(picture)
        text = theirs.replace_image_token(seen, number)
        ids = chat.tokenizer.encode(text, add_special_tokens=False)
        assert text.count("<|image_pad|>") == family.num_tokens(image)
        placeholder = chat.tokenizer.convert_ids_to_tokens(family.placeholder_id)
        ours = chat.expand(chat.encode(placeholder), [user(picture)])
        assert [family.token_id if n < 0 else n for n in ours] == ids
        family.check_tokens([5, *ours, *ours, 7], [image])
        if (num_tokens := family.num_tokens(image)) > 1:
            with pytest.raises(ValueError, match=f"has other tokens .* {num_tokens};"):
                family.check_tokens([*ours, -image.key], [image])
    images = [read_image(picture) for picture in pictures]
    for name, tensor in family.cache.joined(images).items():
        assert torch.equal(tensor, seen[name])


@GEMMA_SEES
@pytest.mark.parametrize(
    "contents",
    [["a", 0], [0, "b"], ["a\n", 0, "\n\nb"], [0, 1, "b\n\n\n"], ["a", 0, "\n", 1]],
)
def test_newlines_around_an_image_join_those_of_the_text(contents, make_model):
    path = str(make_model("gemma3"))
    vocab = load_chat(path).tokenizer.get_vocab()
    vocab |= {"\n" * num: len(vocab) + num for num in (2, 3, 4)}
    tokens = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = GemmaTokenizer(
        vocab=vocab,
        merges=[("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n")],
        extra_special_tokens={"image_token": "<|image_pad|>", **tokens},
        **{"unk_token": "<|unk|>", "bos_token": "<|begin|>", "eos_token": "<|end|>"},
    )
    template = (Path(__file__).parents[1] / "templates/gemma3.jinja").read_text()
    chat = Chat(tokenizer, template, vision=load_family(path))
    pictures = [noise(item) for item in contents if isinstance(item, int)]
    message = user(*(noise(item) if isinstance(item, int) else item for item in contents))
    processor = Gemma3Processor(AutoImageProcessor.from_pretrained(path), tokenizer, None, 4)
    theirs = processor(list(map(Image.fromarray, pictures)), chat.render([message]))
    ours = [tokenizer.image_token_id if n < 0 else n for n in chat.prompt_ids([message])]
    assert ours == theirs["input_ids"][0]
    assert vocab["\n\n"] in ours or vocab["\n\n\n"] in ours


@GEMMA_SEES
@pytest.mark.parametrize(
    "changes, most, version, reason",
    [
        ({"do_pan_and_scan": True}, None, "5.24.0", "has do_pan_and_scan"),
        ({}, 255, "5.24rc1", "--data.max_image_pixels=255: gemma3"),
        ({"max_soft_tokens": 140}, 4479, "5.24.0", "takes at least 4480"),
        ({"max_soft_tokens": 560}, 280 * 64, "5.24.0", "at most 280 tokens"),
        ({"max_soft_tokens": 140}, 280 * 64, "5.24.0", "at most 140 tokens"),
        ({}, None, "5.18rc1", "need transformers 5.19, which is 5.18rc1 here"),
    ],
)
def test_settings_of_gemma_are_read_or_refused(
    changes, most, version, reason, make_model, tmp_path, monkeypatch
):
    monkeypatch.setattr("transformers.__version__", version)
    arch = "gemma4" if "max_soft_tokens" in changes else "gemma3"
    shutil.copytree(make_model(arch), tmp_path / "model")
    file = tmp_path / "model/preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    family = load_family(str(tmp_path / "model"), most)
    if not isinstance(family, str):
        family = f"at most {family.processor.max_soft_tokens} tokens"
    assert reason in family


@pytest.mark.parametrize("strategy", ["default", "full"])
def test_llava_has_the_tokens_of_its_features(strategy, make_model, tmp_path):
    """transformers' forward refuses another number."""
    hf = AutoModelForImageTextToText.from_pretrained(make_model("llava"))
    shutil.copytree(make_model("llava"), tmp_path / "model")
    hf.config.vision_feature_select_strategy = strategy
    hf.config.save_pretrained(tmp_path / "model")
    vision = Vision(load_family(str(tmp_path / "model")), hf)
    image = read_image(noise(0))
    hf(vision.model_ids(torch.tensor([vision.family.expand(image)])), **vision.tensors([image]))


def test_a_second_image_of_llava_onevision_is_refused(make_model):
    chat = load_chat(str(make_model("llava_onevision")))
    with pytest.raises(ValueError, match="has 2 images; this model reads 1"):
        chat.prompt_ids([user(noise(0)), user(noise(1))])


def test_larger_images_are_resized_as_the_processor_does(make_model):
    path = str(make_model("qwen2_5_vl"))
    small, usual = load_family(path, 1024), load_family(path)
    image = read_image(noise(0, 64, 64))
    assert (usual.num_tokens(image), small.num_tokens(image)) == (64, 16)
    assert small.tensors(image)["image_grid_thw"].tolist() == [[1, 8, 8]]
    tiles = load_family(str(make_model("llava_next")), 128)  # 11 x 11 pixels fit 2 x 2 tiles.
    assert tiles.num_tokens(image) == 4 + 4 * 5
    assert tiles.tensors(image)["image_sizes"].tolist() == [[11, 11]]


def expected_logprobs(path: str, sample, hf=None) -> torch.Tensor:
    """`hf`: model with other weights than those at the path."""
    hf, ids = hf or frozen(path), torch.from_numpy(sample.token_ids)
    with torch.no_grad():
        logits = hf(**inputs(hf, sample, ids[None, :-1]), use_cache=False).logits[0]
    mask = torch.from_numpy(sample.loss_mask[1:])
    return chosen(logits[mask].log_softmax(-1), sample)


async def converse(engine, chat, openings: list, later: list, max_tokens: int = 6) -> list:
    """Samples of conversations of two turns each, all at once."""

    async def one(number: int, opening: list, more: list):
        stream, turns = TokenStream(chat, opening), []
        for turn, messages in enumerate((more, None)):
            params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(1,))
            images = {"images": stream.images} if stream.images else {}
            done = await engine.generate(
                stream.prompt_ids, params, seed=10 * number + turn, session=f"{number}", **images
            )
            turns.append(stream.turn(done))
            if messages:
                stream.append(done.token_ids, done.text, messages)
        return samples_from_turns(turns, 1.0)

    pairs = enumerate(zip(openings, later, strict=True))
    of_each = await asyncio.gather(*(one(n, *pair) for n, pair in pairs))
    return [sample for samples in of_each for sample in samples]


def conversations() -> tuple[list, list]:
    """Openings and later messages. Groups share prompts; two images of one size differ; turns see
    further images; texts run in the same batches."""
    long = "the number of squares in this picture, which has many colours and one frame"
    openings = [[user(long, noise(0), "how many?")]] * 3
    openings += [[user(long, noise(1), "how many?")]] * 2
    openings += [[user("a question")], [user(noise(2, 8, 8), noise(3, 40, 16), noise(2, 8, 8))]]
    later = [[user("and ", noise(n, 8, 8 + 8 * (n % 2)), role="tool")] for n in range(6)]
    return openings, [*later[:5], [user("why?")], later[5]]


def test_the_engine_samples_with_transformers_logprobs(path):
    chat = load_chat(path)
    model = AutoModelForImageTextToText.from_pretrained(path)
    more = {"num_slots": 5, "max_context_tokens": 1024 if "gemma4" in path else 256}
    engine = embedded(model, **more, tokenizer=chat.tokenizer, vision=chat.vision)
    samples = asyncio.run(converse(engine, chat, *conversations()))
    assert {len(sample.images) for sample in samples} == {0, 2, 3}
    for sample in samples:
        ours = torch.from_numpy(sample.rollout_logprobs[sample.loss_mask])
        torch.testing.assert_close(
            ours.double(), expected_logprobs(path, sample), atol=1e-5, rtol=0
        )
    # The first three prompts are computed once, and the next two from their image on. Qwen3.5 is
    # sampled row by row, with all of a later turn's prompt.
    if "qwen3_5" not in path:
        assert engine.stats["prefill_tokens"] < 0.6 * sum(len(s.token_ids) for s in samples)


@pytest.mark.parametrize("path", ["qwen2_5_vl", "gemma4"], indirect=True)
def test_a_sampled_placeholder_is_read_as_another_token_by_all(path):
    family = load_family(path)
    vision = Vision(family, AutoModelForImageTextToText.from_pretrained(path))
    image = read_image(noise(0))
    # <|image_pad|>, and <|video_pad|>, which Gemma 4's forward takes for a video.
    sampled = [106, 107] if "gemma4" in path else [106]
    ids = torch.tensor([5, *family.expand(image), *sampled, 7])
    read = vision.model_ids(ids).tolist()
    assert read.count(106) == family.num_tokens(image) and 107 not in read
    assert read[-len(sampled) - 1 :] == [*[0] * len(sampled), 7]
    assert family.model_ids(ids.tolist()) == read
    assert vision.images_in(ids, {image.key: image}) == [image]


@pytest.mark.parametrize("path", ["qwen2_5_vl", "qwen3_vl", "mistral3"], indirect=True)
def test_a_request_continues_after_a_pause_and_new_weights(path):
    chat = load_chat(path)
    model = AutoModelForImageTextToText.from_pretrained(path)
    engine = embedded(model, tokenizer=chat.tokenizer, vision=chat.vision)
    stream = TokenStream(chat, [user("a", noise(0), "b", noise(1))])
    params = SamplingParams(max_tokens=12)

    async def paused():
        task = asyncio.ensure_future(
            engine.generate(stream.prompt_ids, params, seed=0, images=stream.images)
        )
        while engine.stats["decode_steps"] < 4:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await engine.pause()
        await engine.update(None, 1)
        await engine.resume()
        return await task

    done = asyncio.run(paused())
    assert done.policy_versions[0] == 0 and done.policy_versions[-1] == 1
    [sample] = samples_from_turns([stream.turn(done)], 1.0)
    ours = torch.tensor(done.logprobs).double()
    torch.testing.assert_close(ours, expected_logprobs(path, sample), atol=1e-5, rtol=0)


ENV = '''
max_turns = 2

def interact(messages):
    """Shows the picture again, darker."""
    import base64, io
    from PIL import Image
    if isinstance(messages[0]["content"], str):
        return None
    url = next(p["image"] for p in messages[0]["content"] if p["type"] == "image")
    picture = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    darker = picture.point(lambda value: value // 2)
    return [{"role": "user", "content": [{"type": "image", "image": darker}]}]

def reward_fn(messages, answer):
    return sum(map(ord, messages[-1]["content"])) / 1000
'''


@pytest.fixture
def folder(tmp_path):
    """Rows with one and two images, and without, and an environment that shows more."""
    rows = []
    for number in range(4):
        Image.fromarray(noise(number)).save(tmp_path / f"{number}.png")
        images = [f"{number}.png"] * (number % 3)
        rows.append({"prompt": f"{number}?", "images": images, "answer": "1"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "env.py").write_text(ENV)
    return tmp_path


RUN = "--tasks_per_step 4 --group_size 3 --num_steps 2 --max_tokens 5 --max_prompt_tokens 40"
RUN += f" {STOP} --optim.lr 1e-3 --learner.microbatch_tokens 70"


def rollouts_hold_each_image_once(out, capsys) -> None:
    """Also checks that SFT learns the episodes from there, and that people read them."""
    rows = list(read_episodes(out / "rollouts/step_000001.jsonl.zst"))
    images = [item for row in rows for message in row["messages"]
              if isinstance(message["content"], list)
              for item in message["content"] if item["type"] == "image"]  # fmt: skip
    names = {item["image"] for item in images}
    # Two tasks have images; each is shown again, darker.
    assert len(names) == 4 < len(images)
    assert {f"images/{file.name}" for file in (out / "rollouts/images").iterdir()} == names
    for name in names:
        assert Image.open(out / "rollouts" / name).size == (24, 16)
    assert "data:image" not in (out / "rollouts/step_000001.jsonl.zst").read_bytes().decode(
        "latin-1"
    )
    flags = ["--algorithm", "sft", "--model", out / "hf/policy", "--data.train", out / "rollouts"]
    assert main(["show", str(out), "--step", "1", "--num", "12"]) == 0
    shown = capsys.readouterr().out
    assert all(f"[image {name}]" in shown for name in names)
    sft = run(out.parent / "sft", *flags, "--num_steps 1 --tasks_per_step 12", RUN_SFT)
    assert [row["learn/policy/loss"] for row in metrics(sft) if "learn/policy/loss" in row]


RUN_SFT = "--max_tokens 40 --max_prompt_tokens 60"


BLOCK = "visual.blocks.0"
ADAPTER = "--actors.policy.lora.rank 4 --actors.policy.lora.alpha 8"


@pytest.mark.parametrize(
    "arch, ranks, more",
    [
        ("qwen2_5_vl", 1, ""),
        ("qwen2_5_vl", 2, ""),
        ("qwen2_5_vl", 1, f"{ADAPTER} --learner.train vision,language"),
        ("qwen2_5_vl", 2, f"{ADAPTER} --algo.kl_coef 0.1 --learner.epochs 2"),
        ("qwen3_5", 1, ""),
        pytest.param("gemma3", 1, "", marks=GEMMA_SEES),
    ],
)
def test_grpo_learns_from_images_with_the_engines_logprobs(
    arch, ranks, more, folder, make_model, capsys
):
    model = make_model(arch)
    flags = ["--model", model, "--env_path", folder / "env.py", "--data.train"]
    out = run(folder / "run", *flags, folder / "rows.jsonl", RUN, more, ranks=ranks)
    if ranks == 1:
        assert ("on padded rows" in capsys.readouterr().out) == (arch == "qwen3_5")
    if arch == "qwen2_5_vl" and ranks == 1 and not more:
        rollouts_hold_each_image_once(out, capsys)
    for row in metrics(out):
        if "learn/policy/mismatch_kl_nats" in row:
            assert row["learn/policy/mismatch_kl_nats"] < 1e-6
            assert row["learn/policy/grad_norm"] > 0
    before = dict(AutoModelForImageTextToText.from_pretrained(model).named_parameters())
    after = dict(AutoModelForImageTextToText.from_pretrained(out / "hf/policy").named_parameters())
    tower = (
        ("vision_tower", "projector") if arch == "gemma3" else ("visual.blocks.0", "visual.merger")
    )
    for item in (*tower, "language_model.layers.1"):
        changed = [n for n in before if item in n and not torch.equal(before[n], after[n])]
        is_trained = not more or "language" in item or (item == BLOCK and "vision" in more)
        assert bool(changed) == is_trained, item


def test_a_model_that_reads_text_alone_is_refused_with_actor_and_row(folder, tiny_model, capsys):
    flags = ["--model", tiny_model, "--env_path", folder / "env.py", "--data.train"]
    run(folder / "run", *flags, folder / "rows.jsonl", RUN, status=1)
    error = capsys.readouterr().err
    assert "row 2 of" in error and "actor policy takes none: model" in error, error
    assert "(qwen3) reads text alone" in error


def test_episodes_under_way_are_restored_with_their_images(tmp_path):
    image, shown = read_image(noise(0)), read_image(noise(1))
    done = Completion(token_ids=[7], logprobs=[-1.0])
    turn = Turn(new_ids=[-image.key], is_fresh=True, completion=done, images=(image,))
    ended = Trajectory(messages=[user("a", noise(0))], turns=[turn])
    ended.teacher_messages, ended.teacher_ids = [user("b", noise(1))], [[8, -shown.key]]
    episodes = {"1": {"answers": {}, "trajectories": [ended]}, "2": {"trajectories": None}}
    row = {"position": 3, "version": 0, "trajectories": [ended], "episodes": episodes}
    write_trajectories(tmp_path / f"{FILE}0.jsonl.zst", [row], tmp_path / "run")
    assert len(list((tmp_path / "run/images").iterdir())) == 2
    restored = read_groups(tmp_path, {3}, 0, tmp_path / "run")[3]
    for values in (restored["trajectories"], restored["episodes"]["1"]["trajectories"]):
        assert read_trajectories(values) == [ended]
    # A sample has the images of both prompts.
    [taught] = taught_samples(ended, [1.0], set(), [], False)
    assert taught.token_ids.tolist() == [-image.key, 7]
    read = as_teacher_reads(taught)
    assert read.token_ids.tolist() == [8, -shown.key, 7] and set(read.images) == {image, shown}


# Some episodes of a group have ended at a checkpoint, and others are in their second turn.
STALE = "--max_staleness 1 --deterministic true --save_every 1 --keep_checkpoints 0"


def test_a_run_stopped_between_two_images_resumes_as_if_it_never_was(folder, make_model):
    ends = "if len(messages[-1]['content']) < 3 or isinstance("
    env = ENV.replace("def", "async def").replace("if isinstance(", ends)
    (folder / "env.py").write_text(env)
    flags = ["--model", make_model("qwen2_5_vl"), "--env_path", folder / "env.py", "--data.train"]
    flags += [folder / "rows.jsonl", RUN, STALE, "--tasks_per_step 2 --max_tokens 12"]
    flags += ["--num_steps 3 --max_prompt_tokens 60 --learner.microbatch_tokens 300"]
    full, parts = run(folder / "full", *flags), folder / "parts"
    for name in ("metrics.jsonl", "env_code.yaml", "checkpoints/step_000001", "rollouts/images"):
        (parts / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (full / name).is_dir() else shutil.copy)(full / name, parts / name)
    kept = read_groups(parts / "checkpoints/step_000001", range(9), 0, parts / "rollouts").values()
    texts = [str(group["episodes"]) for group in kept]
    assert any("data:image" in text and "policy/0#1'" in text for text in texts), texts
    run(parts, *flags, "--resume")
    assert not (parts / "rollouts/step_000001.jsonl.zst").exists(), "it began anew"
    assert lasting(steps(full)) == lasting(steps(parts))
    assert_same_weights(full, parts)


def test_people_read_images_by_their_size(folder, make_model, capsys):
    flags = ["--model", str(make_model("qwen2_5_vl")), "--data.train", str(folder / "rows.jsonl")]
    flags += ["--algorithm", "grpo", "--env_path", str(folder / "env.py")]
    assert main(["tokens", *flags]) == 0
    image = "<|vision_start|>[image 24x16, 6 tokens]<|vision_end|>"
    assert f"<|user|>{image}{image}2?<|end|><|assistant|>" in capsys.readouterr().out


@pytest.mark.skipif(IS_OLD, reason="transformers is too old for kimi_k25")
def test_a_family_that_cannot_be_right_is_refused_with_the_reason(tmp_path):
    AutoConfig.for_model("kimi_k25").save_pretrained(tmp_path)
    reason = load_family(str(tmp_path))
    assert isinstance(reason, str) and "kimi_k25" in reason and "with torchvision alone" in reason


@pytest.mark.parametrize(
    "flags, reason",
    [("--cp 2", "--cp=2"), ("--data.max_images 1", "has 2 images, --data.max_images is 1")],
)
def test_options_that_take_no_images_are_refused_with_the_row(
    flags, reason, folder, make_model, capsys, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "2" if "cp" in flags else "1")
    more = ["--model", make_model("qwen2_5_vl"), "--env_path", folder / "env.py", "--data.train"]
    run(folder / "run", *more, folder / "rows.jsonl", RUN, flags, status=1)
    error = capsys.readouterr().err
    assert reason in error and "rows.jsonl" in error, error


@pytest.mark.parametrize(
    "flags, reason",
    [
        ("--algorithm ppo --critic.model TEXT", "--critic.model=TEXT: model TEXT (qwen3) reads"),
        ("--algo.reference TILES", "--algo.reference=TILES: it reads an image of 28 x 28 pixels"),
        ("--algo.teacher TEXT", "--algo.teacher=TEXT: model TEXT (qwen3) reads text alone"),
        (
            "--algo.teacher http://a:1",
            "--algo.teacher=http://a:1: requests to a server have no images",
        ),
        ("--algo.teacher self", ""),
        ("--algorithm ppo --critic.model SAME --algo.reference SAME --algo.teacher SAME", ""),
        ("--engine sglang", ""),
        ("--engine sglang --model TILES", "SGLangEngine takes no images of internvl"),
    ],
)
def test_engines_and_second_models_read_the_actors_image_tokens(flags, reason, make_model):
    models = {"SAME": "qwen2_5_vl", "TEXT": "qwen3", "TILES": "internvl"}
    sizes = "--env_path x.py --out x --engine embedded --max_prompt_tokens 16 --max_tokens 16"
    model = make_model("qwen2_5_vl")
    for name, arch in models.items():
        path = str(make_model(arch, hidden=32 if name == "SAME" else 64))
        flags, reason = flags.replace(name, path), reason.replace(name, path)
    config = parse_config([*f"--model {model} {sizes} {flags}".split()])
    assert why_no_images(config, "policy").startswith(reason)
    assert bool(reason) == bool(why_no_images(config, "policy"))


def test_a_reward_model_learns_from_images_and_scores_them(folder, make_model):
    rows = [
        {"prompt": f"{number}?", "images": [f"{n}.png" for n in range(number % 3)]}
        | {"chosen": "yes", "rejected": "no"}
        for number in range(4)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--algorithm", "rm", "--model", make_model("qwen2_5_vl"), "--optim.lr 1e-2"]
    flags += ["--data.train", folder / "pairs.jsonl", "--tasks_per_step 4 --num_steps 2"]
    path = str(run(folder / "run", *flags) / "hf/policy")
    model, hf = RewardModel(path, "cpu"), frozen(path, is_scoring=True)
    talks, expected = [], []
    for row in (*rows, rows[0]):
        row = with_images(row, folder)
        talk = [*prompt_messages(row), {"role": "assistant", "content": "yes"}]
        talks.append(talk)
        expected.append(scores(hf, scored_pair(model.chat, row)[0])[-1].item())
    assert model.score(talks) == pytest.approx(expected, abs=1e-5)
    assert np.std(expected) > 1e-3
    # Texts after images have positions from 0.
    assert model.score(talks[:1]) == pytest.approx(expected[:1], abs=1e-5)

    async def asked():
        app = web.Application()
        app.add_routes([web.post("/classify", ScoreServer(model).classify)])
        async with TestServer(app) as server:
            return await remote_scores(str(server.make_url("")), talks)

    assert asyncio.run(asked()) == pytest.approx(expected, abs=1e-5)
