"""What all doors share over HTTP: connections, bodies, keys, hosts and origins."""
