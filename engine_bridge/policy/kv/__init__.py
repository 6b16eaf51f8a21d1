"""Whether KV is copied or computed again, and how much beside a running batch."""
