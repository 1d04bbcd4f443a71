"""Storage, credentials and disk: whether the run can read, write and delete where it must, and for how long."""

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from crosstrain.components.core.credentials import find_credentials
from crosstrain.components.core.findings import Finding, error, not_checked, warning
from crosstrain.components.core.hub import SCHEME, download, read_address
from crosstrain.components.core.memory import FP32, GIB, MOMENTS, Shape
from crosstrain.components.core.storage import Store, open_store
from crosstrain.components.preflight.config import Config
from crosstrain.components.preflight.work import PRETRAIN, Training, locations

PROBE = ".preflight"
REMOTE = ("s3://", "minio://")
EXPIRATION_VARIABLE = "AWS_CREDENTIAL_EXPIRATION"
"""Set beside temporary keys by `aws configure export-credentials --format env`."""


def check_storage(config: Config, credentials: bool) -> list[Finding]:
    """Write, read and delete a probe where the run writes; look for something to read where it reads.

    Args:
        config: What to check.
        credentials: Whether there are any for remote storage.
    """

    def check(place: tuple[str, str, bool]) -> list[Finding]:
        name, uri, written = place
        where = f"storage of {name} {uri}"
        if uri.startswith(REMOTE) and not credentials:
            return [not_checked(where, "there are no credentials")]
        try:
            if uri.startswith(SCHEME):
                with tempfile.TemporaryDirectory() as scratch:
                    download(read_address(uri), Path(scratch) / "model", ["config.json"])
                return []
            store = open_store(uri)
            return list(_probe(store, where) if written else _look(store, uri, where))
        except (OSError, ValueError) as fault:
            return [error(where, fault)]

    places = list(locations(config))
    with ThreadPoolExecutor(len(places)) as pool:  # a server that does not answer is waited for once
        return [finding for found in pool.map(check, places) for finding in found]


def _probe(store: Store, where: str) -> Iterator[Finding]:
    key, content = f"{PROBE}/{uuid.uuid4().hex}", os.urandom(64)
    store.write(key, content)
    try:
        if store.read(key) != content:
            yield error(where, "what was written is not what is read", "look for a cache or proxy before the store")
    finally:
        store.delete(key)
    if store.exists(key):
        yield error(where, f"{key} is still there after it was deleted", "allow deleting: old checkpoints are removed")


def _look(store: Store, uri: str, where: str) -> Iterator[Finding]:
    folder = Path(uri.removeprefix("file://"))
    if "://" not in uri.removeprefix("file://") and folder.is_file():
        return
    if next(iter(store.list()), None) is None and not _is_object(uri):
        yield error(where, "nothing is there", "correct the URI, or upload it first")


def _is_object(uri: str) -> bool:
    """Whether a URI names one object, not a prefix."""
    parent, _, name = uri.rstrip("/").rpartition("/")
    return bool(name) and "://" in parent and bool(parent.partition("://")[2]) and open_store(parent).exists(name)


def check_credentials(config: Config) -> Iterator[Finding]:
    """Whether the credentials that this process has hold for as long as the run may take."""
    if not any(uri.startswith(REMOTE) for _, uri, _ in locations(config)):
        return
    where = "credentials"
    try:
        source = find_credentials()
        credentials = source.retrieve()
    except PermissionError as fault:
        yield error(where, fault)
        return
    wanted = f"the run may take {config.hours:g} h" if config.hours else "how long the run takes is not known (hours)"
    renewed = credentials.expiration is not None
    if renewed or not credentials.session_token:
        return  # fetched anew before they expire, or permanent
    advice = "give the pod a role (Pod Identity or IRSA), or temporary keys that last longer"
    try:
        left = _seconds_told()
    except ValueError as fault:
        yield error(where, f"{EXPIRATION_VARIABLE}: {fault}", "give it as 2026-01-02T03:04:05Z, or take it away")
        return
    if left is None:
        yield warning(where, f"{source.name} are temporary, nobody says until when, and {wanted}", advice)
    elif left <= 0:
        yield error(where, f"{source.name} expired {-left / 3600:.1f} h ago", advice)
    elif config.hours and left < config.hours * 3600:
        yield error(where, f"{source.name} expire in {left / 3600:.1f} h, and {wanted}", advice)
    elif not config.hours:
        yield warning(where, f"{source.name} expire in {left / 3600:.1f} h, and {wanted}", advice)


def _seconds_told() -> float | None:
    text = os.environ.get(EXPIRATION_VARIABLE)
    if not text:
        return None
    moment = datetime.fromisoformat(text)
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (moment - datetime.now(UTC)).total_seconds()


def check_disk(config: Config, found: list[Training]) -> Iterator[Finding]:
    """Whether this machine's disks hold what training here writes: a model, its checkpoints, and a copy in the making.

    A checkpoint of pre-training is weights and moments in fp32; one more than is kept lies there while it is written.
    """
    for training in found:
        if training.on_cluster:
            yield not_checked(f"{training.component} disk", "it trains in other pods", "see resources of run_on")
            continue
        if training.component != PRETRAIN or not training.vocab:
            continue
        parameters = Shape.read(training.shape, training.vocab).parameters
        model, checkpoint = FP32 * parameters, (FP32 + MOMENTS) * parameters
        needs = {Path(tempfile.gettempdir()): model + checkpoint}
        for uri, size in ((config.output, model), (config.state or config.output, checkpoint)):
            copies = training.config.keep_checkpoints + 1 if size == checkpoint else 1
            if (folder := open_store(uri).local_path()) is not None:
                folder = _existing(folder)
                needs[folder] = needs.get(folder, 0) + size * copies
        for folder, size in needs.items():
            free = shutil.disk_usage(folder).free
            if size > free:
                what = f"needs {size / GIB:.1f} GiB in {folder}, which has {free / GIB:.1f} GiB free"
                yield error(
                    f"{training.component} disk", what, "free some, or keep artifacts and state in object storage"
                )


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())
