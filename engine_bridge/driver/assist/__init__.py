"""Host workers that compute a LoRA delta while the adapter is still on its way to the device (CaraServe §4).

`pool` is the interface: `store` holds the adapters and `team` the processes, `worker` runs in each of these. `layout` says where in the
shared memory what lies, `allocator` divides it, `profile` finds how many rows one worker can take.

Nothing here imports vllm: a worker would spend seconds and much memory on it.
"""
