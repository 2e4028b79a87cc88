"""Time in which calls were being answered: the union of their times, in any order."""

from hypothesis import given
from hypothesis import strategies as st

from leyden.schema import CallRecord, Trajectory
from leyden.training.step import covered


def trajectory(*times: tuple[int, int]) -> Trajectory:
    calls = [
        CallRecord(
            call_id=str(i), seq=i, attempt_id="0", dialect="chat", prompt_ids=b"", response_ids=b"", logprobs=b"",
            versions=b"", finish_reason="stop", started_at=float(a), ended_at=float(b),
        )
        for i, (a, b) in enumerate(times)
    ]  # fmt: skip
    return Trajectory(rollout_id="r", attempt_id="0", outcome="ok", reward=1.0, calls=calls)


def test_overlaps_count_once_and_gaps_not_at_all() -> None:
    assert covered([trajectory((0, 4), (10, 11)), trajectory((2, 5), (3, 4))]) == 6
    assert covered([]) == 0


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=12), st.integers(1, 4))
def test_equals_counting_seconds_however_the_calls_are_split(spans: list[tuple[int, int]], parts: int) -> None:
    times = [(a, a + n) for a, n in spans]
    seconds = {s for a, b in times for s in range(a, b)}
    assert covered([trajectory(*times[i::parts]) for i in range(parts)]) == len(seconds)
