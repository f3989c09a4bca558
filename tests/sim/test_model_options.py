import msgspec
import pytest

from llmtap.sim.model_options import ModelOptions, explain_model_options, read_model_options
from llmtap.units import Duration


def test_the_defaults_are_the_bold_ones() -> None:
    r = ModelOptions()
    assert (r.eps, r.token_sla, r.request_sla) == (5_000_000, 10_000_000, 20_000_000_000)
    assert (r.bins, r.candidates, r.static_batch, r.b_max) == (8, 128, 8, 128)
    assert (r.free_gb, r.safe_gb) == (8.0, 7.0)
    firsts = {
        name: meaning.rpartition("(")[2].split(" | ")[0].rstrip(")")
        for name, _, meaning in explain_model_options()
    }
    choices = {
        name: value for name, value in msgspec.to_builtins(r, enc_hook=int).items() if "|" in _told(name)
    }
    assert choices == {name: firsts[name] for name in choices}


def _told(name: str) -> str:
    return next(meaning for known, _, meaning in explain_model_options() if known == name)


def test_settings_are_read_from_text() -> None:
    r = read_model_options({"eps": "1ms", "bins": "4", "bin-choice": "oldest-head", "bin_edges": "1, 30,117"})
    assert (r.eps, r.bins, r.bin_choice, r.bin_edges) == (Duration(1_000_000), 4, "oldest-head", (1, 30, 117))


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("epsilon", "1ms", "no reading is called 'epsilon'"),
        ("bin_chioce", "x", "did you mean bin_choice?"),
        ("eps", "soon", "eps: expected a duration such as 30, 0.5 or '500ms', got 'soon'"),
        ("bin_choice", "random", "bin_choice: expected one of round-robin, longest-queue, oldest-head, got"),
        ("bins", "0", "bins: expected a whole number from 1 to 1,024, got '0'"),
        ("bins", "many", "bins: expected a whole number from 1 to 1,024, got 'many'"),
        ("bin_edges", "5,5", "bin_edges: expected rising whole numbers, got '5,5'"),
        ("bin_edges", "5,a", "bin_edges: expected whole numbers, apart by commas, got '5,a'"),
        ("memory_gb", "4.5", "memory_gb: nothing is left"),
    ],
)
def test_what_cannot_be_read_is_named(name: str, value: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("?", r"\?")):
        read_model_options({name: value})


def test_every_reading_is_explained() -> None:
    told = explain_model_options()
    assert [name for name, _, _ in told] == list(ModelOptions.__struct_fields__)
    assert all(default and meaning for _, default, meaning in told)
