"""Continuous batching, where the request with the shortest predicted answer is next.

Requests of one length are served as they came, and those that were preempted before all others.
"""

from llmtap.sim.schedulers.continuous_batching import ContinuousBatching
from llmtap.sim.serving import ServingSetup
from llmtap.workload.requests import Requests

__all__ = ["shortest_predicted_first"]


def shortest_predicted_first(requests: Requests, setup: ServingSetup) -> ContinuousBatching:
    """Continuous batching in the order of `Requests.predicted`."""
    return ContinuousBatching(requests, setup, requests.predicted)
