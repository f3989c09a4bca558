"""An option that is given has an effect, or is refused by its name."""

import pytest

from llmtap.errors import ConfigError
from llmtap.sim.model_options import ModelOptions, Serving
from llmtap.sim.schedulers.registry import ALL_OPTIONS, SCHEDULERS
from llmtap.sim.server.options import check_effects, options_looked_at

BINNED = ModelOptions(bin_edges=(1, 30))


@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
def test_whatever_is_given_is_looked_at_or_refused(scheduler: str) -> None:
    known = options_looked_at(scheduler, BINNED, Serving())
    assert {"same_instant", "tie"} < known, "the driver's"
    assert not known & {"request_sla", "percentile", "window", "bins"}
    for name in ALL_OPTIONS:
        places = {name: f"--some {name}"}
        if name in known:
            check_effects(scheduler, places, BINNED, Serving())
            continue
        with pytest.raises(ConfigError, match=f"--some {name}: has no effect"):
            check_effects(scheduler, places, BINNED, Serving())


def test_the_token_sla_is_the_controllers() -> None:
    assert "token_sla" in options_looked_at("dynamic_no_bins", BINNED, Serving())
    assert "token_sla" not in options_looked_at("static_fifo", BINNED, Serving())


def test_what_needs_another_option_says_which() -> None:
    places = {"tbt": "--serving tbt"}
    check_effects("chunked_prefill", places, BINNED, Serving(give_up="late"))
    with pytest.raises(ConfigError, match=r"(?s)--serving tbt: has no effect\n.*give_up"):
        check_effects("chunked_prefill", places, BINNED, Serving())
