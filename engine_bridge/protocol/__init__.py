"""What the gateway and a node say to each other, wherever the node runs."""
