"""What happens next to requests, KV and adapters: state machines that are told events and the time, and answer with decisions.

They know no engine, thread, clock or socket, so the live engine, the emulated node and the simulator run the same ones. The policy that ranks is
below them (`engine_bridge.policy`); what they decide is carried out above them (`engine_bridge.driver`).
"""
