"""Experiments for tests: options with a few words, resolved."""

from typing import Any

from llmtap.channel.experiment import Arm, Experiment, ExperimentOptions, resolve


def an_experiment(*arms: dict[str, Any], start_wall_ns: int = 0, **options: Any) -> Experiment:
    """A running experiment with a fixed key; without arms, a control and an arm that sets a header."""
    said: dict[str, Any] = {"enabled": True, "key": "pepper", "name": "test", **options}
    made = [
        Arm(**arm) for arm in arms or ({"name": "control"}, {"name": "marked", "headers": {"X-Arm": "b"}})
    ]
    experiment = resolve(ExperimentOptions(arms=made, **said), "spare", start_wall_ns)
    assert experiment is not None
    return experiment
