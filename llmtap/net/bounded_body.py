"""Read the body of an answer of aiohttp up to a limit, because a server can send a body that never ends.

`read_at_most` is used for all requests of llmtap that are not part of a load: models, metrics, states.
"""

from typing import Final

import aiohttp

ANSWER_BYTES_MAX: Final = 16 << 20
"""Default limit of a body: even a list of thousands of models takes less than 1 MB."""


class AnswerTooLong(aiohttp.ClientError):
    """An answer is longer than its limit. Its rest is not read, and the connection is closed."""


async def read_at_most(response: aiohttp.ClientResponse, bytes_max: int = ANSWER_BYTES_MAX) -> bytes:
    """Return the whole body. Raises AnswerTooLong, or an error of aiohttp if the connection fails."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > bytes_max:
            response.close()  # otherwise aiohttp would read the rest, to reuse the connection
            raise AnswerTooLong(
                f"the answer is longer than {bytes_max >> 20} MiB, the maximum: check the URL"
            )
    return bytes(body)
