"""Why the workers cannot help now."""


class AssistLost(RuntimeError):
    """A worker has ended, or did not answer in time, or is not ready yet; or the pool is closed. No error of the request: its delta is computed in
    the engine's process instead."""
