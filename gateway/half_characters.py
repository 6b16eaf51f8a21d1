r"""Half characters in JSON texts: one half of a surrogate pair, as of an emoji that a client has cut in two. Pure.

Programs in JavaScript cut texts (the output of a tool, say) between the two halves and write the half as `\ud83d`. JSON's grammar has that, but no
UTF-8 text has it, so decoders refuse it. An agent that sends its whole history each time would be refused for ever.
"""

from __future__ import annotations

import json


def without_halves(text: str | bytes) -> bytes | None:
    """Return a JSON text with a question mark for each half character; None for a text that is no JSON with any.

    It takes some ten times as long as to decode the text.
    """
    try:
        whole = json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    try:
        whole.encode()
    except UnicodeEncodeError:
        return whole.encode("utf-8", "replace")
    return None
