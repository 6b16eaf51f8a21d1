"""Host workers that compute a LoRA delta while the adapter is still on its way to the device (CaraServe §4).

`pool` is the interface, and holds the adapters; `team` holds the processes, and `worker` runs in each of these. `layout` says where in the shared
memory what lies, `store` writes adapters there, `allocator` divides it, `shares` says how many rows one worker takes, `profile` measures it.

Nothing here imports vllm: a worker would spend seconds and much memory on it.
"""
