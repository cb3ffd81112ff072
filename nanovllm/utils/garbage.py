"""Python's garbage collector, kept from holding the device up while requests are made and end."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NUM_NEW = 50_000  # objects, of some 3,000 requests, after which to look for garbage
_lock = threading.Lock()
_num_inside, _usual = 0, (0, 0, 0)


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Collect as rarely as is sound in a call that runs many requests.

    Objects by the thousand set the collector off again and again, and now and then through all
    that the caller holds: stops of up to a tenth of a second in which no step is launched.
    """
    global _num_inside, _usual
    with _lock:
        if not _num_inside:
            _usual = gc.get_threshold()
            if _usual[0]:  # 0: the caller wants none
                gc.set_threshold(max(_usual[0], _NUM_NEW), *_usual[1:])
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if not _num_inside:
                gc.set_threshold(*_usual)
