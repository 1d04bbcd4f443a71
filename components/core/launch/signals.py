"""SIGTERM and SIGINT as a call, for as long as something runs that must be ended first."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_stop(handle: Callable[[signal.Signals], None]) -> Iterator[None]:
    """While inside, SIGTERM and SIGINT call `handle` instead of ending this process.

    Outside of the main thread, where Python takes no signals, they stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda got, _: handle(signal.Signals(got))) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
