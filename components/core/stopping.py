"""Being asked to stop: SIGTERM as an event that a loop looks at between steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm() -> Iterator[threading.Event]:
    """An event that SIGTERM sets, instead of ending the process; outside the main thread it is never set."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
