"""What all live benches share: a server to start, the model, load, and the report."""
