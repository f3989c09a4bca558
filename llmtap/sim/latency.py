"""Latency models of the simulated engine: duration of a whole batch and of one iteration.

A `LatencyModel` takes the size of a batch and the tokens of its longest request (by the option `length` with
or without the prompt), an `IterationModel` the prompt tokens, the decoding requests and their context of an
iteration; both return ns. The schedulers call them. `sweep/fitting.py` fits both to measurements.

A batch of b requests, the longest of L tokens: T(b, L) = alpha + beta L h(b), h(b) = 1 + gamma (b - 1) / b
(multi-bin paper). alpha is a constant per batch, beta the time per token of a batch of one, beta h(b) the
time between two tokens. The default constants are the paper's (4.2: Qwen3-1.7B in FP16 on an RTX 4080).
T is computed in double precision and rounded once to whole ns, so that starts and ends of batches add up
exactly.
"""

from dataclasses import dataclass
from typing import Final

from llmtap.units import to_seconds


@dataclass(frozen=True, slots=True)
class LatencyModel:
    alpha_ns: float
    beta_ns: float
    gamma: float

    def overhead(self, size: int) -> float:
        return 1 + self.gamma * (size - 1) / size

    def step_ns(self, size: int) -> float:
        """Time between two tokens of a batch of this size: beta h(b)."""
        return self.beta_ns * self.overhead(size)

    def batch_ns(self, size: int, length: int) -> int:
        return round(self.alpha_ns + length * self.step_ns(size))


SEED_MODEL: Final = LatencyModel(alpha_ns=59_653_000, beta_ns=5_742_000, gamma=0.316)


@dataclass(frozen=True, slots=True)
class IterationModel:
    """Duration of one iteration in which some requests prefill and others decode.

    T(p, d, c) = step(max(d, 1)) + prefill p + context c, with step(d) = beta h(d) of a `LatencyModel`, p the
    prompt tokens processed, d the decoding requests, c their tokens in KV memory.
    """

    beta_ns: float
    gamma: float
    """How much slower it is for very many (multi-bin paper's h)."""
    prefill_ns: float
    context_ns: float = 0.0
    """Per token of KV that attention reads."""

    def duration_ns(self, prefill: int, decodes: int, context: int = 0) -> int:
        size = max(decodes, 1)
        step_ns = self.beta_ns * (1 + self.gamma * (size - 1) / size)
        return round(step_ns + self.prefill_ns * prefill + self.context_ns * context)

    def to_dict(self) -> dict[str, float]:
        return {
            "beta": to_seconds(self.beta_ns), "gamma": self.gamma,
            "prefill": to_seconds(self.prefill_ns), "context": to_seconds(self.context_ns),
        }  # fmt: skip


SEED_ITERATIONS: Final = IterationModel(
    beta_ns=SEED_MODEL.beta_ns,
    gamma=SEED_MODEL.gamma,
    prefill_ns=(SEED_MODEL.alpha_ns - SEED_MODEL.beta_ns) / 611,
)
"""Constants of the multi-bin paper with separate phases. The paper has one alpha for any prompt (4.3). Here
a prompt of the mean length in its data (611 tokens, 3.1) takes this time, others in proportion."""
