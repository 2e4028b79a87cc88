"""Rows from recorded calls: every sampled token trained once, whatever the shape of the forest."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.schema import CallRecord, Trajectory
from leyden.training.rows import build_rows, dropped_totals


def call(call_id: str, seq: int, prompt: list[int], response: list[int], parent: str | None = None, **kw) -> CallRecord:
    n = len(response)
    logprobs = kw.pop("logprobs", [-(seq + 1) - i / 100 for i in range(n)])
    return CallRecord(
        call_id=call_id,
        seq=seq,
        attempt_id=kw.pop("attempt_id", "0"),
        dialect="openai-chat",
        prompt_ids=np.array(prompt, "<i4").tobytes(),
        response_ids=np.array(response, "<i4").tobytes(),
        logprobs=np.array(logprobs, "<f4").tobytes(),
        versions=np.full(n, kw.pop("version", 0), "<i4").tobytes(),
        finish_reason="stop",
        parent=parent,
        **kw,
    )


def attempt(*calls: CallRecord) -> Trajectory:
    return Trajectory(rollout_id="r", attempt_id="0", outcome="ok", reward=1.0, calls=list(calls))


def test_a_conversation_is_one_row_with_tool_tokens_masked() -> None:
    rows, report = build_rows(
        attempt(call("a", 0, [1, 2], [7, 8], version=3), call("b", 1, [1, 2, 7, 8, 50, 51], [9], "a", version=4)),
        max_row_tokens=100,
    )
    (row,) = rows
    assert row.ids.tolist() == [1, 2, 7, 8, 50, 51, 9]
    assert row.mask.tolist() == [False, False, True, True, False, False, True]
    assert row.versions.tolist() == [-1, -1, 3, 3, -1, -1, 4]
    np.testing.assert_allclose(row.logprobs[row.mask], [-1.0, -1.01, -2.0], rtol=1e-6)
    assert row.prompt_ids.tolist() == [1, 2] and row.response_ids.tolist() == [7, 8, 50, 51, 9]
    assert row.calls == ("a", "b")
    assert (report.calls, report.trained_calls, report.trained_tokens, report.dropped) == (2, 2, 3, {})


def test_the_stop_token_is_trained_once_and_a_stripped_one_starts_a_row() -> None:
    """The sampled stop token opens the next turn's history; when the server strips it nothing is merged."""
    kept, _ = build_rows(
        attempt(call("a", 0, [1], [7, 99]), call("b", 1, [1, 7, 99, 60], [5], "a")), max_row_tokens=100
    )
    assert [r.ids.tolist() for r in kept] == [[1, 7, 99, 60, 5]]
    assert kept[0].mask.tolist() == [False, True, True, False, True]
    stripped, report = build_rows(
        attempt(call("a", 0, [1], [7, 99]), call("b", 1, [1, 7, 60], [5], "a")), max_row_tokens=100
    )
    assert [r.ids.tolist() for r in stripped] == [[1, 7, 99], [1, 7, 60, 5]]
    assert report.broken_links == 1
    other, report = build_rows(  # The model ended with one stop token, and the history shows the template's.
        attempt(call("a", 0, [1], [7, 98]), call("b", 1, [1, 7, 99, 60], [5], "a")), max_row_tokens=100
    )
    assert [r.ids[r.mask].tolist() for r in other] == [[7, 98], [5]]
    assert report.broken_links == 1


def test_a_retokenised_history_is_never_merged() -> None:
    """The same text in another split of tokens."""
    rows, report = build_rows(
        attempt(call("a", 0, [1], [53122, 316]), call("b", 1, [1, 393, 30002, 4], [6], "a")), max_row_tokens=100
    )
    assert [r.ids[r.mask].tolist() for r in rows] == [[53122, 316], [6]]
    assert report.broken_links == 1


def test_branches_share_context_but_train_it_once() -> None:
    rows, report = build_rows(
        attempt(
            call("a", 0, [1], [2]),
            call("b", 1, [1, 2, 3], [4], "a"),
            call("c", 2, [1, 2, 5], [6], "a"),
        ),
        max_row_tokens=100,
    )
    assert [r.ids.tolist() for r in rows] == [[1, 2, 3, 4], [1, 2, 5, 6]]
    assert [r.mask.tolist() for r in rows] == [[False, True, False, True], [False, False, False, True]]
    assert report.trained_tokens == 3


def test_untrainable_and_undelivered_calls_are_context_only() -> None:
    rows, report = build_rows(
        attempt(
            call("a", 0, [1], [2], untrainable="usage mismatch: said 3, got 1"),
            call("b", 1, [1, 2, 3], [4], "a"),
            call("c", 2, [1], [9], delivered=False),
            call("d", 3, [1], []),
            call("e", 4, [1], [5], logprobs=[-1.0, -2.0]),
            call("f", 5, [1], [5], attempt_id="1"),
        ),
        max_row_tokens=100,
    )
    assert [r.ids.tolist() for r in rows] == [[1, 2, 3, 4]]
    assert rows[0].mask.tolist() == [False, False, False, True]
    assert report.dropped == {
        "usage mismatch": 1,
        "undelivered": 1,
        "empty_ids": 1,
        "length_mismatch": 1,
        "other_attempt": 1,
    }


def test_calls_with_images_are_refused_and_named() -> None:
    seen = call("b", 1, [1, 2, 7, 60, 60], [9], "a", images=["sha256:00"])
    rows, report = build_rows(attempt(call("a", 0, [1, 2], [7]), seen), max_row_tokens=100)
    assert [r.calls for r in rows] == [("a",)]
    assert report.dropped == {"images": 1}


def test_breaks_are_counted_by_reason() -> None:
    broken = [call(str(i), i, [5 + i], [9], break_reason=r) for i, r in enumerate((None, "compaction", "compaction"))]
    _, report = build_rows(attempt(*broken), max_row_tokens=100)
    assert report.breaks == {"compaction": 2}


def test_over_long_rows_are_dropped_but_shared_calls_are_trained_in_a_row_that_fits() -> None:
    long = call("b", 1, [1, 2, *range(10, 30)], [4], "a")
    rows, report = build_rows(
        attempt(call("a", 0, [1], [2]), long, call("c", 2, [1, 2, 5], [6], "a")), max_row_tokens=10
    )
    assert [r.ids.tolist() for r in rows] == [[1, 2, 5, 6]]
    assert rows[0].calls == ("a", "c")
    assert report.over_long_rows == 1 and report.dropped == {"over_length": 1}


def test_tokens_without_a_logprob_are_kept_and_flagged() -> None:
    rows, report = build_rows(attempt(call("a", 0, [1], [2, 3], logprobs=[-0.5, math.nan])), max_row_tokens=10)
    assert rows[0].mask.tolist() == [False, True, True]
    assert rows[0].unknown.tolist() == [False, False, True]
    assert report.unknown_logprobs == 1


def test_totals_say_why_a_batch_has_no_rows() -> None:
    """A rollout without calls gives no dummy row and is counted."""
    reports = [
        build_rows(attempt(), max_row_tokens=10)[1],
        build_rows(attempt(call("a", 0, [1], [])), max_row_tokens=10)[1],
    ]
    assert dropped_totals(reports) == {"no_calls": 1, "empty_ids": 1}


@st.composite
def forests(draw: st.DrawFn) -> Trajectory:
    calls: list[CallRecord] = []
    ends: list[list[int]] = []
    for seq in range(draw(st.integers(0, 12))):
        parent = draw(st.none() | st.integers(0, seq - 1)) if seq else None
        lying = parent is not None and draw(st.booleans()) and draw(st.booleans())
        before = [] if parent is None or lying else ends[parent]
        prompt = before + draw(st.lists(st.integers(0, 3), min_size=0 if before else 1, max_size=4))
        response = draw(st.lists(st.integers(0, 3), max_size=4))
        item = call(
            f"c{seq}",
            seq,
            prompt,
            response,
            None if parent is None else f"c{parent}",
            version=seq,
            untrainable="x" if draw(st.integers(0, 5)) == 0 else None,
            delivered=draw(st.integers(0, 5)) > 0,
        )
        calls.append(item)
        ends.append(prompt + response)
    return attempt(*draw(st.permutations(calls)))


@settings(max_examples=300, deadline=None)
@given(forests(), st.sampled_from([6, 1000]))
def test_every_token_of_a_trainable_call_is_trained_exactly_once(trajectory: Trajectory, limit: int) -> None:
    rows, report = build_rows(trajectory, max_row_tokens=limit)
    by_id = {c.call_id: c for c in trajectory.calls}
    trained = [c for r in rows for c in r.calls]
    assert len(trained) == len(set(trained)) == report.trained_calls
    for row in rows:
        assert len(row) <= limit and not row.mask[0]
        assert (row.versions[~row.mask] == -1).all()
        # Versions are the call's number here, so they say which call each trained token belongs to.
        for call_id in row.calls:
            c = by_id[call_id]
            at = row.mask & (row.versions == c.seq)
            assert row.ids[at].astype("<i4").tobytes() == c.response_ids
            assert row.logprobs[at].astype("<f4").tobytes() == c.logprobs
            first = int(np.flatnonzero(at)[0])
            assert row.ids[:first].astype("<i4").tobytes() == c.prompt_ids
        assert row.trained == sum(len(by_id[c].response_ids) // 4 for c in row.calls)
    good = {c.call_id for c in trajectory.calls if c.untrainable is None and c.delivered and c.response_ids}
    assert set(trained) <= good
    if limit == 1000:
        assert set(trained) == good
    assert sum(report.dropped.values()) + len(trained) == len(trajectory.calls)
