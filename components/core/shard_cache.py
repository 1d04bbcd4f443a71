"""Shards of an artifact as verified local files: fetched ahead by a thread, and dropped again beyond a limit.

What lies on this machine's disk already is used where it is and never dropped. Dropped shards are the ones used
longest ago; a dropped one is fetched and verified again when it is needed. Left out on purpose: parts of shards,
because a checksum covers a whole one.
"""

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.tokens import Pair

log = logging.getLogger(__name__)


class ShardCache:
    """Random access to the pairs of an artifact, from many threads."""

    def __init__(self, artifact: Artifact, stems: Sequence[str], limit: int = 0) -> None:
        """A cache of at most `limit` bytes on disk; 0: of any size.

        Raises:
            ValueError: not even the largest shard fits.
        """
        self._artifact = artifact
        self._stems = stems
        self._sizes = [
            sum(artifact.manifest.file(stem + suffix).bytes for suffix in (".idx", ".bin")) for stem in stems
        ]
        self._remote = artifact.files.local_path() is None
        self._limit = limit or sum(self._sizes)
        if self._remote and max(self._sizes, default=0) > self._limit:
            raise ValueError(
                f"{artifact.uri}: a cache of {limit:,} bytes does not hold its largest shard of "
                f"{max(self._sizes):,} bytes; give more, or make the shards again with fewer shard_tokens"
            )
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._held: OrderedDict[int, Pair] = OrderedDict()
        """Open shards, the one used longest ago first."""
        self._fetching: set[int] = set()

    def __getitem__(self, shard: int) -> Pair:
        """One shard, verified when it was fetched."""
        if self._process != os.getpid():
            self._start()  # after a fork: the thread is the parent's, and so is a lock that it held
        with self._changed:
            while shard not in self._held and not self._has_room(shard):
                self._changed.wait()
            if shard in self._held:
                self._held.move_to_end(shard)
                return self._held[shard]
            self._fetching.add(shard)
        return self._fetch(shard)

    def prefetch(self, shards: Iterable[int]) -> None:
        """Fetch shards in the background, as many as there is room for without dropping any."""
        if self._remote:
            threading.Thread(
                target=self._fetch_ahead, name=f"{self._artifact.uri}: _fetch_ahead", args=(list(shards),), daemon=True
            ).start()

    @property
    def held_bytes(self) -> int:
        """Bytes of the shards that are here, or on their way."""
        return sum(self._sizes[shard] for shard in (*self._held, *self._fetching))

    def _fetch_ahead(self, shards: list[int]) -> None:
        for shard in shards:
            with self._changed:
                if shard in self._held or shard in self._fetching:
                    continue
                if self.held_bytes + self._sizes[shard] > self._limit:
                    return
                self._fetching.add(shard)
            try:
                self._fetch(shard)
            except (OSError, ValueError) as error:
                log.warning("%s: not fetched ahead: %s", self._stems[shard], error)
                return  # whoever needs the shard fetches it again, and hears of it

    def _fetch(self, shard: int) -> Pair:
        stem = self._stems[shard]
        try:
            self._artifact.fetch(f"{stem}.idx")
            path = self._artifact.fetch(f"{stem}.bin")
            pair = Pair(path.with_name(path.name.removesuffix(".bin")))
        except BaseException:
            with self._changed:
                self._fetching.discard(shard)
                self._changed.notify_all()
            raise
        with self._changed:
            self._fetching.discard(shard)
            self._held[shard] = pair
            self._changed.notify_all()
        return pair

    def _has_room(self, shard: int) -> bool:
        """Drop what was used longest ago until a shard fits; False if it, or what is in its way, is being fetched."""
        while (
            self._remote
            and shard not in self._fetching
            and self._held
            and self.held_bytes + self._sizes[shard] > self._limit
        ):
            oldest, _ = self._held.popitem(last=False)
            for suffix in (".idx", ".bin"):
                self._artifact.release(self._stems[oldest] + suffix)
        return shard not in self._fetching and (not self._remote or self.held_bytes + self._sizes[shard] <= self._limit)
