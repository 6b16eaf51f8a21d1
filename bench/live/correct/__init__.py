"""Whether answers are right whatever was reused for them: KV from each tier, adapters, restarts with something changed.

Run it with `python -m bench.live.correct`; its help says what each part does.
"""
