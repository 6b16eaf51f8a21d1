"""Measures a model on this machine, on the real engine: `machine.measure` makes the `MachineProfile` of engine_bridge/settings/profile.py."""
