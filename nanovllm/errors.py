"""What a caller may want to catch besides ValueError and TypeError, which mean its own mistakes."""


class EngineDeadError(RuntimeError):
    """A rank has died or failed: this engine is of no use any more, a new one may be made.

    The message says which rank, its process, and how it ended.
    """


class EngineTimeoutError(EngineDeadError):
    """A rank did not finish a step, or its start, in the time that Config allows."""
