"""Why the workers cannot help now."""


class AssistLost(RuntimeError):
    """The workers cannot help: one has ended, did not answer in time or is not ready yet, or the pool is closed.

    This is no error of the request: its delta is computed in the engine's process instead.
    """
