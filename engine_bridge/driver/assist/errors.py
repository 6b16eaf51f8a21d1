"""Why the workers cannot help now. Neither is an error of the request: its delta is computed in the engine's process instead."""


class AssistLost(RuntimeError):
    """A worker has ended, or did not answer in time, or is not ready yet; or the pool is closed."""


class AssistBusy(RuntimeError):
    """Too much is in flight for the shared memory: finish or discard a ticket first."""
