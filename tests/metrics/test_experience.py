import pytest

from llmtap.exchange.exchange import OUTPUT, EventLog, Exchange, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, TokenSource
from llmtap.metrics.latency import measure
from llmtap.metrics.objectives import Objectives, experience_of, fluidity, qoe_area_step

MS = 1_000_000
STALL_AFTER_2 = [t * MS for t in (100, 120, 1120, 1140, 1160, 1180, 1200, 1220, 1240, 1260)]


def stream(times_ns: list[int], tokens: int) -> Exchange:
    log = EventLog()
    for t in times_ns:
        log.add(t, EventClass.CONTENT, 100, tokens, OUTPUT)
    t = Timeline(
        arrival_ns=0, submit_ns=0, first_token_ns=times_ns[0], last_token_ns=times_ns[-1], events=log
    )
    x = Exchange(relay="r", seq=1, arrival_wall_ns=0, timeline=t, stream=True)
    x.tokens = Tokens(output=tokens * len(times_ns), source=TokenSource.TOKEN_IDS)
    return x


class TestFluidity:
    def test_one_long_gap_makes_the_two_forms_differ(self) -> None:
        # Oracle S2: 0.3 s of bound and 0.18 s of slack later, seven deadlines passed.
        counted = fluidity(STALL_AFTER_2, 0, 300 * MS, 100 * MS)
        assert counted is not None
        assert (counted.tokens, counted.in_time, counted.missed, counted.deadlines) == (10, 9, 7, 16)
        assert (counted.doc, counted.code) == (0.9, 0.5625)

    def test_slack_is_carried_over_and_lost_by_a_late_token(self) -> None:
        # Gaps 10, 30, 30, 60 at a bound of 20: the first leaves 10, which the second uses up.
        counted = fluidity([10, 40, 70, 130], 0, 20, 20)
        assert counted is not None
        assert (counted.in_time, counted.missed) == (2, 1 + 3)

    def test_a_late_token_leaves_no_slack(self) -> None:
        # Slack 10, then a gap of 50 is late, and the next of 25 finds nothing left over.
        counted = fluidity([10, 60, 85], 0, 20, 20)
        assert counted is not None
        assert (counted.in_time, counted.missed) == (1, (50 - 10) // 20 + 25 // 20)

    def test_a_late_first_token_misses_all_deadlines_it_let_pass(self) -> None:
        # Oracle S6, third request: TTFT 0.9 s at a bound of 0.3 s misses 1 + 6.
        counted = fluidity([900 * MS, 930 * MS], 0, 300 * MS, 100 * MS)
        assert counted is not None
        assert (counted.in_time, counted.missed) == (1, 7)

    def test_of_nothing_is_none(self) -> None:
        assert fluidity([], 0, 1, 1) is None


class TestArea:
    def test_is_the_ratio_of_areas(self) -> None:
        # Expected 10, 20; digested 20, 40; until 40: (20 + 0) / (30 + 20).
        assert qoe_area_step([20, 40], 0, 10, 10) == 0.4

    def test_early_is_no_better_than_expected(self) -> None:
        assert qoe_area_step([1, 2, 3], 0, 10, 10) == 1.0

    def test_oracle_s2(self) -> None:
        assert qoe_area_step(STALL_AFTER_2, 0, 300 * MS, 50 * MS) == pytest.approx(0.390476190476, abs=1e-12)

    def test_one_token_in_time_is_one(self) -> None:
        assert qoe_area_step([10], 0, 10, 10) == 1.0
        assert qoe_area_step([], 0, 10, 10) is None


class TestOfAnExchange:
    objectives = Objectives.parse("ttft:300ms tpot:100ms")

    def test_takes_its_bounds_from_the_objectives(self) -> None:
        x = stream(STALL_AFTER_2, 1)
        experience = experience_of(x, measure(x), self.objectives)
        assert experience is not None
        assert experience.fluidity.code == 0.5625
        assert experience.qoe_area_step == pytest.approx(0.390476190476, abs=1e-12)

    def test_counts_the_tokens_of_a_chunk(self) -> None:
        x = stream([100 * MS, 200 * MS], 3)
        experience = experience_of(x, measure(x), self.objectives)
        assert experience is not None
        assert (experience.fluidity.tokens, experience.fluidity.in_time) == (6, 6)

    @pytest.mark.parametrize("text", ["e2e:1s", "ttft:1s", "tpot:1s", "tbc_max:1s e2e:1s"])
    def test_needs_both_bounds(self, text: str) -> None:
        x = stream(STALL_AFTER_2, 1)
        assert experience_of(x, measure(x), Objectives.parse(text)) is None

    def test_needs_submit(self) -> None:
        x = stream(STALL_AFTER_2, 1)
        x.timeline.submit_ns = None
        assert experience_of(x, measure(x), self.objectives) is None
