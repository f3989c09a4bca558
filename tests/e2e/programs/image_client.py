"""What `image.py` asks from inside a container: the image's own Python reads this from its stdin.

    podman exec --interactive sim python - get http://127.0.0.1:9464/metrics TOKEN < tests/e2e/image_client.py
    podman exec --interactive sim python - stream 8080 40 < tests/e2e/image_client.py
    podman exec --interactive tap python - writable < tests/e2e/image_client.py

Each prints JSON, one value a line. Standard library only.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any

TIMEOUT_S = 60
PROMPT = "What passes through a tap?"


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def get(url: str, token: str = "") -> None:
    """The status, 0 where nobody answers, and the body."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S) as found:
            say([found.status, found.read().decode()])
    except urllib.error.HTTPError as error:
        say([error.code, error.read().decode()])
    except OSError as error:
        say([0, str(error)])


def stream(port: str, tokens: str) -> None:
    """Each piece of a streamed answer when it comes, and null once it is whole; or a refusal."""
    body = {
        "model": "sim",
        "stream": True,
        "max_tokens": int(tokens),
        "messages": [{"role": "user", "content": PROMPT}],
    }
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=TIMEOUT_S)
    headers = {"Content-Type": "application/json", "x-sim-tokens": tokens}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        say([response.status, response.read().decode()])
        return
    done = False
    for line in response:  # raises IncompleteRead where the chunks do not end as they should
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            done = True
        elif data:
            for choice in json.loads(data).get("choices", ()):
                if piece := choice["delta"].get("content"):
                    say(piece)
    if done:
        say(None)


def writable() -> None:
    """Each folder that this user may write to, with what lies in it; /proc, the process's own, aside."""
    found = {}
    for folder, folders, files in os.walk("/"):
        if folder == "/":
            folders.remove("proc")
        if os.access(folder, os.W_OK):
            found[folder] = sorted(folders + files)
    say(found)


if __name__ == "__main__":
    {"get": get, "stream": stream, "writable": writable}[sys.argv[1]](*sys.argv[2:])
