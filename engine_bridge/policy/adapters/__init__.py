"""Which adapters are kept, loaded ahead and placed where."""
