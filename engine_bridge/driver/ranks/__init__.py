"""One engine whose model is split over several devices, a process (rank) for each: tensor parallelism.

The scheduler, the tiers' memory and disk, and all that decides stay in the engine's process. A rank has its part of the weights and of the KV cache,
copies its part of each block, and reports when it has.

Source: CaraServe §5. vLLM's `MultiprocExecutor` makes the processes.
"""
