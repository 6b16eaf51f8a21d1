"""A discrete-event simulator of serving nodes. It models hardware; what is decided is decided by the objects of `engine_bridge.policy`."""
