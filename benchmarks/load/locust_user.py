"""The user that locust needs for a streamed answer; locust itself knows nothing of tokens.

As most people write one: HttpUser, `iter_lines`, a clock read per line. Users wait for each other before
their first request, so that all begin at one moment.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from gevent.event import Event
from locust import HttpUser, constant, events, task
from locust.exception import StopUser

USERS = int(os.environ["LOAD_USERS"])
TURNS = int(os.environ["LOAD_TURNS"])
RESULT = Path(os.environ["LOAD_RESULT"])
BODY = {
    "model": "sim-model",
    "stream": True,
    "max_tokens": int(os.environ["LOAD_TOKENS"]),
    "stream_options": {"include_usage": True},
    "messages": [{"role": "user", "content": "Tell me how late a load generator can be."}],
}

all_there = Event()
there = ended = 0
ttft_ms: list[float] = []
gaps_ms: list[float] = []


class Caller(HttpUser):
    wait_time = constant(0)
    turns = 0

    def on_start(self) -> None:
        global there
        there += 1
        if there == USERS:
            all_there.set()
        all_there.wait()

    @task
    def ask(self) -> None:
        global ended
        if self.turns == TURNS:
            ended += 1
            if ended == USERS:
                self.environment.runner.quit()
            raise StopUser
        self.turns += 1
        begin = before = time.perf_counter()
        first = True
        with self.client.post("/v1/chat/completions", json=BODY, stream=True, catch_response=True) as answer:
            for line in answer.iter_lines():
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                choices = json.loads(line[6:])["choices"]
                if not choices:
                    continue  # usage
                if first:
                    ttft_ms.append((now - begin) * 1e3)
                else:
                    gaps_ms.append((now - before) * 1e3)
                first, before = False, now
            answer.success()


@events.quitting.add_listener
def write(environment: object, **_: object) -> None:
    RESULT.write_text(json.dumps({"ttft_ms": ttft_ms, "itl_ms": gaps_ms}))
