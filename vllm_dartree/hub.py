"""Checkpoints as a person names them, by folder or by name on the hub, and what is said where there is none."""

from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

HUB_ERRORS = (HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError)


def unavailable(subject: str, error: Exception) -> str:
    """The message for a checkpoint that cannot be had; ``subject`` names it, and is followed by "is"."""
    return (
        f"{subject} is neither a folder here nor a checkpoint that the hub gave ({type(error).__name__}); pass the "
        "path of a folder, or check the name and the connection"
    )


def require_checkpoint(option: str, name: str) -> None:
    """Refuses what is neither a folder with a config nor a checkpoint on the hub.

    Raises:
        ValueError: naming the option and its value.
    """
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise ValueError(f"{option} is '{name}', but that folder has no config.json")
        return
    try:
        hf_hub_download(name, "config.json")
    except HUB_ERRORS as error:
        raise ValueError(unavailable(f"{option} is '{name}', which", error)) from error
