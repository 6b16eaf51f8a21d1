"""Errors of the tiers. A bad block is never an error: it is a miss and a count."""

from __future__ import annotations


class KvTiersError(Exception):
    """An error whose message names the folder and says what to do; it is for an operator, not for a client."""


class StoreBusy(KvTiersError):
    """Another live process holds the store's lock."""


class StoreUnusable(KvTiersError):
    """The store's folder cannot be made, written or locked; the cause is chained."""
