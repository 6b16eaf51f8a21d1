"""The helper process: reads one document from its standard input, writes its text or what is wrong with it, and ends.

Out goes an `Outcome` as JSON. The arguments are the document's media type, MiB of memory and seconds of a core. It may end at any time.
"""

from __future__ import annotations

import math
import os
import resource
import sys

import msgspec

from gateway.documents.extraction import UnreadableError, extract
from gateway.documents.messages import Outcome

MIB = 1 << 20
DAMAGED = "The document could not be read: it is damaged, or of a kind that is not known here."
TOO_LARGE = "Reading the document takes more memory than is allowed here (document_mib)."


def main() -> None:
    """Read the document."""
    media_type, memory_mib, cpu_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    os.setpgrp()  # Ctrl-C in the server's terminal is for the server to handle; uvloop cannot start processes so
    os.nice(10)  # answers go before documents
    _bound(memory_mib * MIB, cpu_s)
    try:
        outcome = Outcome(extract(sys.stdin.buffer.read(), media_type))
    except UnreadableError as error:
        outcome = Outcome(fault=str(error))
    except MemoryError:
        outcome = Outcome(fault=TOO_LARGE)
    except Exception:  # the libraries' readers fail in many ways
        outcome = Outcome(fault=DAMAGED)
    sys.stdout.buffer.write(msgspec.json.encode(outcome))
    sys.stdout.buffer.flush()


def _bound(more_bytes: int, cpu_s: float) -> None:
    """Bound what this process may take from now on; it may write no file."""
    num_pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115 - one line of the kernel's
    limit = num_pages * resource.getpagesize() + more_bytes
    used = resource.getrusage(resource.RUSAGE_SELF)
    end_s = math.ceil(used.ru_utime + used.ru_stime + cpu_s)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (end_s, end_s))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
