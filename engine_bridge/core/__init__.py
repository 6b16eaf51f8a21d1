"""What lies between policy and engine: state machines that take events and the time, and return what to do. The driver carries it out."""
