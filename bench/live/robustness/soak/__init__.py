"""A server under everything that goes wrong, for as long as one likes: see `__main__`."""
