"""Grammars of structured output are checked here, in processes of their own, before the engine sees them.

A compiler for grammars that clients write is native code which recurses as deep as the grammar says: some texts end its process, hang it or fill its
memory. So each text is compiled first in a helper process with a small stack, a memory bound and a time bound, and only what survives there is
compiled in the engine. `worker.py` is that process, `checker.py` keeps it alive and remembers its verdicts.
"""
