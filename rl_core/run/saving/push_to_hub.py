"""--push_to_hub ORG/NAME: uploads the exported model to the Hugging Face hub. With several actors
each model goes to ORG/NAME-ACTOR."""

from __future__ import annotations

from huggingface_hub import HfApi

from rl_core.config import Config
from rl_core.plugin import Plugin, RunState
from rl_core.types import RunError


def repositories(config: Config) -> dict[str, str]:
    """Actor -> repository."""
    names, repository = config.trained, config.push_to_hub
    return {name: f"{repository}-{name}" if len(names) > 1 else str(repository) for name in names}


class PushToHub(Plugin):
    def __init__(self, trainer: RunState):
        """Creates the repositories at the start, so that a wrong name or token fails before
        training. Raises ValueError."""
        super().__init__(trainer)
        if not trainer.ranks.is_writer:
            return
        for repository in repositories(trainer.config).values():
            try:
                HfApi().create_repo(repository, exist_ok=True)
            except Exception as error:  # Errors of the network, the hub or the name.
                raise ValueError(
                    f"--push_to_hub {repository}: {error}; log in by `hf auth login` or HF_TOKEN"
                ) from error

    def after_run(self) -> None:
        if not self.trainer.signal:
            push(self.trainer.config)


def push(config: Config) -> None:
    """Raises RunError with the command that repeats the upload. The export stays where it is."""
    for name, repository in repositories(config).items():
        folder = config.folder / "hf" / name
        try:
            HfApi().upload_folder(
                repo_id=repository, folder_path=folder, commit_message="Model trained with rl_core"
            )
            if (adapter := folder.with_name(f"{name}_adapter")).is_dir():
                HfApi().upload_folder(
                    repo_id=repository, folder_path=adapter, path_in_repo="adapter"
                )
        except Exception as error:
            raise RunError(
                f"--push_to_hub {repository}: {error}; the model is in {folder}: hf upload "
                f"{repository} {folder}"
            ) from error
        print(f"pushed {folder} to {repository}", flush=True)
