"""Which adapters are in device memory, which come and which go."""
