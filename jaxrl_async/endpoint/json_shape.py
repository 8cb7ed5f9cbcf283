"""Limits on nesting depth and number of parts of a JSON text, checked before parsing. Pure.

15 MB of `[],[],...` parse to five million objects and block all Python threads for seconds.
Counting the brackets outside of strings takes a tenth of that time and lets other threads run.
"""

import numpy as np

from jaxrl_async.endpoint.http_errors import CallRefused

MAX_DEPTH = 64
"""Maximum nesting of lists and objects in a body."""
MAX_PARTS = 2**18
"""Maximum number of lists, objects and fields of objects in a body."""
PIECE = 2**16
"""Number of bytes that are counted in one step."""
QUOTE, COLON, OPEN, CLOSE = ord('"'), ord(":"), b"[{", b"]}"


def check_shape(body: bytes) -> None:
    """Raise CallRefused for JSON that is nested too deeply or has too many parts. Invalid JSON may
    pass."""
    plain = body
    if b"\\" in body:  # a quote after an odd number of backslashes does not end a string
        plain = body.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    in_string, depth, parts = 0, 0, 0
    for start in range(0, len(plain), PIECE):
        piece = np.frombuffer(plain, np.uint8, min(PIECE, len(plain) - start), start)
        quotes = np.cumsum(piece == QUOTE, dtype=np.int32) + in_string
        outside = quotes % 2 == 0
        opens, closes = (outside & np.isin(piece, list(which)) for which in (OPEN, CLOSE))
        depths = depth + np.cumsum(opens.astype(np.int32) - closes)
        parts += int(np.count_nonzero(opens)) + int(np.count_nonzero(outside & (piece == COLON)))
        if depths.max() > MAX_DEPTH:
            raise CallRefused(
                f"the body is nested deeper than {MAX_DEPTH} levels", code="invalid_json"
            )
        if parts > MAX_PARTS:
            raise CallRefused(
                f"the body has more than {MAX_PARTS:,} lists, objects and fields",
                code="invalid_json",
            )
        in_string, depth = int(quotes[-1]) % 2, int(depths[-1])
