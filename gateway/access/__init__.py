"""Which person may ask for how much: keys, rates, shares of what is kept, and calls that are open."""
