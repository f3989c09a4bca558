"""What the sizes and times in a capture tell an attacker, at each privacy level.

Two attacks, each a choice among N known texts:

- `answers`: which known answer was streamed? The attacker has streamed each of them three times through the
  same service and compares sizes, counts and durations (a Gaussian naive Bayes classifier). Answers have 40
  to 400 words, or all of them 150.
- `keystrokes`: which known phrase was typed, if each key sends a request, as completion in an editor does?
  The attacker knows how long this person takes on average from each letter to the next.

Answers and phrases are passages of this repository's documentation. The rows are made by the capture's own
code. Server and person are simulated: speed differs between answers (15 %) and keys (20 %).

    .venv/bin/python benchmarks/privacy/attack.py [--trials 1000] [--seed 1]
"""

import argparse
import math
import random
import re
from array import array
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from llmtap.capture.store.rows import to_batch
from llmtap.exchange.exchange import OUTPUT, EventLog, Exchange, RequestShape, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, TokenSource

LEVELS: Final = ("shape", "none", "coarse")
MS: Final = 1_000_000
ENVELOPE_BYTES: Final = 190
"""An OpenAI chat chunk beside its text."""
TRAINING: Final = 3
PHRASE_CHARS: Final = 30
TRAITS: Final = ("response_bytes", "output_tokens", "last_token_us", "event_us", "event_bytes")


def corpus() -> str:
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    text = " ".join(page.read_text(encoding="utf-8") for page in pages)
    return re.sub(r"\s+", " ", re.sub(r"```.*?```|<[^>]*>|[|#*`]", " ", text, flags=re.DOTALL))


# ---------------------------------------------------------------- answers


def passages(n: int, rng: random.Random, words_min: int, words_max: int) -> list[list[str]]:
    """Return n different answers, as tokens of up to seven characters."""
    words = corpus().split()
    found = []
    for begin in rng.sample(range(len(words) - 400), n):
        length = round(words_min * (words_max / words_min) ** rng.random())
        text = " ".join(words[begin : begin + length])
        found.append(re.findall(r" ?\w{1,7}|[^\w]", text))
    return found


def streamed(tokens: list[str], rng: random.Random) -> Exchange:
    """Return the exchange of an answer: TTFT of 300 ms, a token each 20 ms, at the speed of the moment."""
    gap_ms = 20 * rng.lognormvariate(0, 0.15)
    arrival_ns = rng.randrange(10**12)
    t_ns = arrival_ns + round(300 * rng.lognormvariate(0, 0.3)) * MS
    log = EventLog()
    for token in tokens:
        t_ns += round(gap_ms * rng.lognormvariate(0, 0.1) * MS)
        log.add(t_ns, EventClass.CONTENT, ENVELOPE_BYTES + len(token), -1, OUTPUT)
    t = Timeline(arrival_ns, submit_ns=arrival_ns + MS, last_token_ns=t_ns, events=log)
    t.first_content_ns, t.response_end_ns = log.t_ns[0], t_ns
    return Exchange(
        "r",
        1,
        arrival_ns,
        t,
        stream=True,
        response_bytes=sum(log.sizes),
        tokens=Tokens(50, len(tokens), source=TokenSource.USAGE),
    )


def rows(exchanges: list[Exchange], level: str) -> list[dict[str, Any]]:
    batch, failed = to_batch(exchanges, capture="c", level=level)
    assert not failed
    found: list[dict[str, Any]] = batch.to_pylist()
    return found


def traits(row: dict[str, Any]) -> list[float]:
    """Return logarithms of what a row tells of its answer: totals, and the sum of squares of event sizes."""
    sizes = row["event_bytes"] or [0]
    told = (*(row[name] for name in TRAITS[:3]), len(row["event_us"]), sum(size**2 for size in sizes))
    return [math.log(max(1, value)) for value in told]


def guess_answers(
    n: int, level: str, trials: int, seed: int, words_min: int = 40, words_max: int = 400
) -> float:
    rng = random.Random(seed)
    answers = passages(n, rng, words_min, words_max)
    known = np.array(
        [
            [traits(row) for row in rows([streamed(answer, rng) for _ in range(TRAINING)], level)]
            for answer in answers
        ]
    )
    centres = known.mean(axis=1)
    noise = np.sqrt(known.var(axis=1).mean(axis=0)) + 1e-4
    hits = 0.0
    for _ in range(trials):
        truth = rng.randrange(n)
        seen = np.array(traits(rows([streamed(answers[truth], rng)], level)[0]))
        hits += best((((centres - seen) / noise) ** 2).sum(axis=1), truth)
    return hits / trials


# ---------------------------------------------------------------- keystrokes


def typed(pauses: list[float], rng: random.Random) -> list[Exchange]:
    """Return the requests of a phrase: one for each key, with pauses (s) that differ by 20 %."""
    at_ns, found = rng.randrange(10**12), []
    for number, pause in enumerate(pauses, 1):
        at_ns += round(pause * rng.lognormvariate(0, 0.2) * 1e9)
        shape = RequestShape(roles=["prompt"], sizes=array("q", [number]))
        found.append(Exchange("r", number, at_ns, Timeline(at_ns), shape=shape))
    return found


def guess_keystrokes(n: int, level: str, trials: int, seed: int) -> float:
    rng = random.Random(seed)
    text = re.sub(r"[^a-z ]", "", corpus().lower())
    phrases = [text[i : i + PHRASE_CHARS + 1] for i in rng.sample(range(len(text) - PHRASE_CHARS - 1), n)]
    usual = {pair: 0.15 * rng.lognormvariate(0, 0.4) for p in phrases for pair in pairwise(p)}
    pauses = [[usual[pair] for pair in pairwise(p)] for p in phrases]
    expected = np.array(pauses)[:, 1:]
    hits = {"gaps": 0.0, "sums": 0.0}
    for _ in range(trials):
        truth = rng.randrange(n)
        arrivals = np.array([row["arrival_ns"] for row in rows(typed(pauses[truth], rng), level)]) / 1e9
        gaps = np.diff(arrivals)
        hits["gaps"] += best(((np.log(np.maximum(gaps, 1e-3)) - np.log(expected)) ** 2).sum(axis=1), truth)
        # Where single gaps are lost in the steps, the time since the first key is what is left.
        hits["sums"] += best(((np.cumsum(gaps) - np.cumsum(expected, axis=1)) ** 2).sum(axis=1), truth)
    return max(hits.values()) / trials


def best(scores: np.ndarray[Any, Any], truth: int) -> float:
    """Return the chance that the attacker, who takes one of the nearest, is right."""
    nearest = np.flatnonzero(scores <= scores.min() + 1e-9)
    return float(truth in nearest) / len(nearest)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    attacks = (guess_answers, partial(guess_answers, words_min=150, words_max=150), guess_keystrokes)
    table = Table("level", "known texts", "chance", "answers", "of one length", "keystrokes")
    for level in LEVELS:
        for n in (10, 100):
            found = (attack(n, level, args.trials, args.seed) for attack in attacks)
            table.add_row(level, str(n), f"{1 / n:.0%}", *(f"{share:.0%}" for share in found))
    Console().print(table)


if __name__ == "__main__":
    main()
