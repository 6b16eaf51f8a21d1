"""The next moves of requests, KV and adapters: state machines that are told events and the time, and answer with decisions.

They know no engine, thread, clock or socket, so the live engine, the emulated node and the simulator run the same ones. The policies that rank are
below them (`engine_bridge.policy`); their decisions are carried out above them (`engine_bridge.driver`).
"""
