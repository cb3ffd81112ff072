"""What a caller may want to catch besides ValueError and TypeError, which mean its own mistakes."""

import contextlib
from collections.abc import Iterator


class EngineDeadError(RuntimeError):
    """A rank has died or failed: this engine is of no use any more, a new one may be made.

    The message says which rank, its process, and how it ended.
    """


class EngineTimeoutError(EngineDeadError):
    """A rank did not finish a step, or its start, in the time that Config allows."""


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Whatever a caller's object raises while it is looked at becomes an error that names it."""
    try:
        yield
    except ImportError:  # something is not installed
        raise
    except Exception as error:
        if isinstance(error, (ValueError, TypeError)) and str(error).startswith(name):
            raise
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"{name}: cannot be read, {type(error).__name__}: {error!s:.200}") from error
