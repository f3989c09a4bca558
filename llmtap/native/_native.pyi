FINGERPRINT: str
FRAMING_ABI: int
MATCHER_ABI: int

def plain_request(
    raw: bytes, /
) -> tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes, int, bool, bool] | None: ...
def plain_response(raw: bytes, /) -> tuple[int, bytes, list[tuple[bytes, bytes]], int, bool, bool] | None: ...
def write_head(
    start: bytes, fields: list[tuple[bytes, bytes]], host: bytes | None, end: bytes, /
) -> bytes | None: ...
