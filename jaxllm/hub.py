"""Where the files of `model.path` are: in a local folder, or in what huggingface_hub fetched for a name on its hub.

Fetches configs, safetensors and tokenizer files, never code and never pickles.
"""

import re
from pathlib import Path

from jaxllm.section import UserError


def resolve_model_path(path: str, revision: str | None = None, weights: bool = True) -> tuple[Path, str | None]:
    """Folder of the model `path`, and its revision (a commit hash) if it comes from the Hugging Face hub, None if it is
    a local folder.

    A name such as "org/name" that is no folder here is looked up with huggingface_hub; `weights=False` fetches
    config.json only.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder, None
    if folder.exists() or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path):
        raise UserError(
            f"model.path: {path!r} is {'a file' if folder.exists() else 'not there'}; it must be a Hugging Face "
            "folder, a name on its hub, or a checkpoint folder"
        )
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            f"model.path: no folder {path!r}; to look it up on the Hugging Face hub, `pip install huggingface_hub`"
        ) from None
    files = ["*.json", "*.safetensors", "tokenizer*", "*.jinja"] if weights else ["config.json"]
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                path, revision=revision, allow_patterns=files, ignore_patterns="original/*"
            )
        )
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        at = f" at revision {revision}" if revision else ""
        raise UserError(
            f"model.path: no folder {path!r}, and the Hugging Face hub gave no model of that name{at}: "
            f"{type(error).__name__}: {reason} Check the name, the network (HF_HUB_OFFLINE) and HF_TOKEN, or "
            "download it and give the folder"
        ) from None
    return folder, folder.name
