"""Models on the Hugging Face Hub by address, `hf://organization/name@commit`.

A branch or a tag moves, and the same work would no longer give the same bytes, so the full commit is wanted and nothing
else is taken. The token is huggingface_hub's own affair (HF_TOKEN), the server is HF_ENDPOINT's. Left out on purpose:
the machine's cache of the hub, and data sets.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SCHEME = "hf://"
_ADDRESS = re.compile(r"hf://((?:[\w.-]+/)?[\w.-]+)(?:@(.*))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubModel:
    """One commit of a model's repository."""

    repository: str
    """organization/name, or the bare name of an old one."""
    commit: str
    """40 hexadecimal digits."""

    @property
    def address(self) -> str:
        """What the user gave."""
        return f"{SCHEME}{self.repository}@{self.commit}"


def read_address(address: str) -> HubModel:
    """Take `hf://organization/name@commit` apart.

    Raises:
        ValueError: it is not of this form, or names no full commit.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise ValueError(f"{address}: not a model of the hub; write hf://organization/name@commit")
    if not _COMMIT.fullmatch(match[2] or ""):
        raise ValueError(
            f"{address}: name the commit by its 40 hexadecimal digits (hf://{match[1]}@…, see the history of the "
            "model's files on the hub); a branch or tag may be another model tomorrow"
        )
    return HubModel(match[1], match[2])


def download(model: HubModel, folder: Path, names: Sequence[str]) -> None:
    """Fetch those files of a commit that match `names` (shell patterns); files in folders of it are left out.

    Args:
        model: What to fetch.
        folder: Where to put them; must not exist yet, because what lies there could pass for the download.
        names: Patterns.

    Raises:
        PermissionError: the hub wants a token, or another one.
        FileNotFoundError: there is no such repository or commit, or the token may not see it.
        ConnectionError: the hub was not reached, or the download broke off.
    """
    import httpx2  # huggingface_hub's own client; both are heavy, and only addresses of the hub need them
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils.logging import set_verbosity_error
    from huggingface_hub.utils.tqdm import disable_progress_bars

    assert not folder.exists()
    disable_progress_bars()
    set_verbosity_error()  # each retry is a warning of two lines
    try:
        snapshot_download(
            model.repository,
            revision=model.commit,
            local_dir=folder,
            cache_dir=folder.with_name(folder.name + "-cache"),
            allow_patterns=list(names),
            ignore_patterns=["*/*"],
        )
    except (httpx2.HTTPError, OSError) as error:
        status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
        if status in (401, 403):
            raise PermissionError(
                f"{model.address}: the hub answers {status}; correct the name, or set HF_TOKEN to a token that may "
                "read it (a gated model wants its conditions accepted first)"
            ) from None
        if status == 404:
            raise FileNotFoundError(
                f"{model.address}: the hub answers 404; correct the name and the commit, or set HF_TOKEN if private"
            ) from None
        what = f"the hub answers {status}" if status else f"the hub was not reached ({type(error).__name__})"
        raise ConnectionError(
            f"{model.address}: {what}; try again, or fetch the model where there is a network and give the folder"
        ) from None
