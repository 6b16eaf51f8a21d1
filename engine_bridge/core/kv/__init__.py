"""KV blocks on their way between disk, host memory and the device."""
