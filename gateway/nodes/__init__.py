"""The nodes behind the gateway: which there are, which one a request goes to, and which adapters they have."""
