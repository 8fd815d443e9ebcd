"""Code in a model's folder does not run, whatever the terminal answers."""

from __future__ import annotations

import io
import json
import shutil
import sys

import pytest

from rl_core.data.chat_loading import load_chat
from rl_core.models.loading import load_hf_model, load_model_config
from rl_core.models.policy import end_token_ids
from rl_core.rewards.reward_model import RewardModel
from rl_core.run.plan.model_paths import check_weights

READERS = {
    "configuration": load_model_config,
    "tokenizer": load_chat,
    "model": lambda path: load_hf_model(path, "auto", None),
    "classifier": lambda path: load_hf_model(path, "auto", None, is_scoring=True),
    "generation settings": end_token_ids,
    "reward model": lambda path: RewardModel(path, "cpu"),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_models_own_code_does_not_run_on_a_yes(read, tiny_model, tmp_path, monkeypatch):
    folder, mark = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(tiny_model, folder)
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w')\n")
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((folder / name).read_text())
        settings["model_type"] = "a_new_one"
        names = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
        settings["auto_map"] = dict.fromkeys(names, "own.Own") | {
            "AutoTokenizer": ["own.Own", None]
        }
        settings["tokenizer_class"] = "Own"
        (folder / name).write_text(json.dumps(settings))
    (folder / "generation_config.json").unlink(missing_ok=True)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    with pytest.raises(ValueError, match=r"trust_remote_code|custom code|a_new_one|Own"):
        read(str(folder))
    assert not mark.exists()


def test_a_damaged_file_that_transformers_does_not_read_is_left_alone(tiny_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "consolidated.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    check_weights(folder)
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ValueError, match=r"model-00001-of-00002\.safetensors is damaged"):
        check_weights(folder)
