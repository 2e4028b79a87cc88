"""Keeping what clients sent: whole when read back, and no bigger on disk than what is new in it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.gateway.store import raw
from leyden.gateway.store.raw import put_together, share, take_apart
from tests.gateway.conftest import World

_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_NAMES = ["model", "messages", "tools", "input", "contents", "system", "n", "prompt", "stop"]
_BODIES = st.dictionaries(st.sampled_from(_NAMES), _JSON)


@given(_BODIES, _BODIES, st.sampled_from([2, 3, 2048]))
def test_a_body_comes_back_equal_whatever_it_shares_with_an_earlier_one(first: Any, second: Any, piece: int) -> None:
    with patch.object(raw, "_PIECE", piece):
        earlier, later = take_apart(first), take_apart(second)
    later = share(later, "earlier", earlier.hashes())
    stored = earlier.hashes()[: later.base_len * 16] + later.hashes()[later.base_len * 16 :]
    bodies = {r.hash: r.body for r in later.refs}
    back = put_together(orjson.loads(later.head.body), later.fields, stored, lambda h: orjson.loads(bodies[h]))
    assert back == second


@pytest.mark.parametrize("ids", [True, False], ids=["ids", "text"])
async def test_prompts_of_ids_and_of_text_cost_what_is_new_in_them(world: World, ids: bool) -> None:
    claim = await world.claim()
    world.gateway.engines.set([world.gateway.engines.all()[0].model_copy(update={"max_model_len": 100_000})])
    sent: list[dict[str, Any]] = []
    for turn in range(1, 5):
        prompt = [5 + i % 200 for i in range(6000 * turn)]
        sent.append({"prompt": prompt if ids else "".join(chr(97 + i % 26) for i in prompt), "stop": ["\n\n", "END"]})
        assert (await world.chat(claim.agent_key, sent[-1], "/openai/v1/completions"))[0] == 200
    calls = (await world.admin.trajectory(claim.rollout.rollout_id, content=True)).calls
    assert [c.raw for c in calls] == sent

    def sizes(db: Any) -> tuple[list[int], int]:
        suffixes = [r[0] for r in db.execute("SELECT length(raw_suffix) FROM calls ORDER BY seq")]
        return suffixes, db.execute("SELECT count(*) FROM messages").fetchone()[0]

    suffixes, stored = await world.gateway.store.db.read(sizes)
    assert max(suffixes) <= 16 * 5 and stored <= 4 * 5


async def test_raw_requests_are_kept_whole_at_the_cost_of_what_is_new(world: World) -> None:
    claim = await world.claim()
    tool = {"type": "function", "function": {"name": "f", "description": "d" * 500, "parameters": {"type": "object"}}}
    extra = {"model": "m", "tools": [tool], "user": "somebody", "metadata": {"note": "w" * 300}, "seed": 3}
    sent: list[dict[str, Any]] = []
    for turn in range(8):
        messages = [{"role": "user", "content": [{"type": "text", "text": f"question {i}"}]} for i in range(turn + 1)]
        for i in range(turn):
            messages.insert(2 * i + 1, {"role": "assistant", "content": "ok"})
        sent.append({"messages": messages, **extra})
        assert (await world.chat(claim.agent_key, sent[-1]))[0] == 200
    calls = (await world.admin.trajectory(claim.rollout.rollout_id, content=True)).calls
    assert [c.raw for c in calls] == sent
    assert all(c.raw is None for c in (await world.admin.trajectory(claim.rollout.rollout_id)).calls)

    def sizes(db: Any) -> list[int]:
        return [r[0] for r in db.execute("SELECT length(raw_suffix) FROM calls ORDER BY seq")]

    assert set((await world.gateway.store.db.read(sizes))[1:]) == {32}

    def bodies(db: Any) -> str:
        return "".join(r[0] for r in db.execute("SELECT body FROM messages"))

    stored = await world.gateway.store.db.read(bodies)
    # The tool twice: the body writes its keys in an order of its own, the template's view in another.
    assert stored.count("d" * 500) <= 2 and stored.count("w" * 300) == 1 and claim.agent_key not in stored


async def test_branches_of_one_call_are_kept_whole_and_only_last_calls_are_remembered_whole(world: World) -> None:
    claim = await world.claim()
    history: list[dict[str, Any]] = [{"role": "user", "content": "question 0"}]
    sent: list[dict[str, Any]] = []

    async def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
        sent.append({"messages": messages})
        status, answer = await world.chat(claim.agent_key, sent[-1])
        assert status == 200
        return answer["choices"][0]["message"]

    for turn in range(1, 6):
        history = [*history, await ask(history), {"role": "user", "content": f"question {turn}"}]
    for branch in ("one", "another"):
        await ask([*history[:5], {"role": "user", "content": branch}][-6:])
        await ask([*history[:3], await ask(history[:3]), {"role": "user", "content": branch}])
    calls = (await world.admin.trajectory(claim.rollout.rollout_id, content=True)).calls
    assert [c.raw for c in calls] == sent
    assert [(c.request or {})["messages"][-1]["content"] for c in calls] == [s["messages"][-1]["content"] for s in sent]
    (live,) = world.gateway.live.all()
    nodes = live.forest.nodes.values()
    continued = [n for n in nodes if any(other.parent is n for other in nodes)]
    assert len(continued) >= 4 and all(not n.request_hashes and not n.raw_hashes for n in continued)
