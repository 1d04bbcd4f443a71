"""Who has submitted what: one small object a run file in a store that keeps two writers apart.

`<key>.json` begins as a claim, written only if absent; with the id of what was made it is the receipt, and stays
when Kubeflow Pipelines has long forgotten the run. A claim whose owner died is taken over by a write that holds
only while nobody else has touched it. Left out: listing and deleting; a submitter needs to read and write objects
under this one prefix and nothing else.
"""

import json
import time
import uuid
from dataclasses import asdict, dataclass, replace

from crosstrain.components.core.storage import open_store


@dataclass(frozen=True)
class Record:
    """What the ledger says of one key."""

    key: str
    display_name: str
    owner: str
    """Who claimed it: one process of one submitter."""
    claimed: float
    """Seconds since the epoch by the owner's clock; 0: given up by its owner."""
    id: str = ""
    """Run or recurring run; empty: a claim."""
    done: bool = False
    """Nothing is left to do: for a schedule, that old ones were paused and this one was enabled."""


@dataclass(frozen=True)
class Found:
    """A record and the version of the object that holds it."""

    record: Record
    etag: str


class Ledger:
    """The store of claims and receipts.

    Args:
        uri: s3://bucket/prefix, or a folder.
        take_over_after: Seconds after which a claim without a run is somebody else's to take.
    """

    def __init__(self, uri: str, take_over_after: float) -> None:
        self._store = open_store(uri)
        self._take_over_after = take_over_after
        self._owner = uuid.uuid4().hex

    def check(self) -> None:
        """Probe the store; OSError when it does not hold back conditional writes."""
        self._store.check_conditional_writes()

    def find(self, key: str) -> Found | None:
        """What is recorded for a key.

        Raises:
            ValueError: the object is no record.
        """
        path = f"{key}.json"
        try:
            etag = self._store.stat(path).etag  # before reading: a change in between makes later writes fail, not win
            data = self._store.read(path)
        except FileNotFoundError:
            return None
        try:
            return Found(Record(**json.loads(data)), etag)
        except (ValueError, TypeError):
            raise ValueError(f"{self._store.locate(path)}: not a record of crosstrain; move it away") from None

    def is_stale(self, record: Record) -> bool:
        """Whether a claim is old enough to be taken over."""
        return time.time() - record.claimed >= self._take_over_after

    def claim(self, key: str, display_name: str, over: Found | None) -> Found | None:
        """Become the one who submits this key: the claim, or None when somebody else was quicker.

        Args:
            key: Of the run file.
            display_name: Of its run.
            over: A stale claim to take over; None: there is no record.
        """
        record = Record(key, display_name, self._owner, time.time())
        if over is not None:
            return self._replace(over, record)
        if not self._store.write_if_absent(f"{key}.json", _encode(record)):
            return None
        found = self.find(key)
        return found if found is not None and found.record.owner == self._owner else None

    def renew(self, claim: Found) -> Found | None:
        """The claim with a new time, or None when it was taken over: do not submit."""
        return self._replace(claim, replace(claim.record, claimed=time.time()))

    def give_up(self, claim: Found) -> None:
        """Let the next submitter take the claim at once; nothing was made under it."""
        self._replace(claim, replace(claim.record, claimed=0.0))

    def settle(self, key: str, display_name: str, made: str, done: bool) -> None:
        """Write the receipt, whatever stood there: what is recorded exists."""
        record = Record(key, display_name, self._owner, time.time(), made, done)
        self._store.write(f"{key}.json", _encode(record))

    def _replace(self, old: Found, record: Record) -> Found | None:
        path = f"{record.key}.json"
        if not self._store.write_if_match(path, _encode(record), old.etag):
            return None
        found = self.find(record.key)
        return found if found is not None and found.record == record else None


def _encode(record: Record) -> bytes:
    return (json.dumps(asdict(record), indent=2, sort_keys=True) + "\n").encode()
