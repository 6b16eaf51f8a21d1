"""What a GPU is to decide, in the order of worth; `tiers` is the play over HTTP."""
