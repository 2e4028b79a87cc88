"""How harnesses send turns back, and what becomes of the tokens: continued, or broken with a reason and an index."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leyden.gateway.canonical import Message, canonical, clean_tools, request_keys
from leyden.gateway.conversation import Forest, Link, Node, Plan
from leyden.gateway.renderer import ModelRenderer, Parsed, prompt_key
from tests.real_tokenizers import tokenizer_folder
from tests.tiny import make_tiny_model

SYSTEM = {"role": "system", "content": "S"}
USER = {"role": "user", "content": "look twice"}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "description": "é", "parameters": {"type": "object"}}}
]
CALLS = (
    '\n<tool_call>\n{"name": "look", "arguments": {"b":1,  "a": "\\u00e9"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def tiny(model_folder: Path) -> ModelRenderer:
    return ModelRenderer(model_folder)


@pytest.fixture(scope="module")
def qwen() -> ModelRenderer:
    return ModelRenderer(tokenizer_folder("qwen3"))


@dataclass
class Session:
    """Calls of one attempt, with made-up samples."""

    model: ModelRenderer
    mode: Any = "bridge"
    forest: Forest = field(default_factory=Forest)
    relation: Link = field(default_factory=Link)
    said: Parsed = field(default_factory=lambda: Parsed("", None, []))

    def plan(self, messages: list[Message], tools: Any = TOOLS) -> Plan:
        return self.forest.plan(messages, request_keys(messages, tools))

    def call(
        self,
        messages: list[Message],
        text: str = "fine",
        *,
        tools: Any = TOOLS,
        ids: list[int] | None = None,
        finish: str = "stop",
        force: Any = None,
    ) -> Node:
        """One call that samples `text` and the end of turn, or `ids`."""
        plan = self.plan(messages, tools)
        prompt = self.model.render(plan, messages, tools, mode=self.mode, force=force)
        self.relation = self.model.relate(plan, prompt.ids, prompt.reason)
        stop = self.model.stop_token_ids[-1] if self.model.family == "template" else 151645
        sampled = self.model.codec.encode(text) + ([stop] if finish == "stop" else []) if ids is None else ids
        response = np.asarray(sampled, np.int32)
        self.said = self.model.parse(prompt.ids, response, tools, None, prompt.forced)
        name = str(len(self.forest.nodes))
        answer, keys = self.said.message(), plan.keys
        return self.forest.add(
            name, int(name), keys, self.relation, prompt.ids, response, answer, finish, [], delivered=True
        )

    def broke(self) -> tuple[str | None, int | None]:
        assert self.relation.parent is None
        return self.relation.break_reason, self.relation.break_index


def results(said: Parsed, *texts: str) -> list[Message]:
    pairs = zip(said.tool_calls, texts, strict=True)
    return [{"role": "tool", "tool_call_id": c["id"], "content": text} for c, text in pairs]


def echo(said: Parsed, **changes: Any) -> Message:
    return {**said.message(), **changes}


def rewritten(said: Parsed, change_id: Any = None, arguments: Any = None) -> list[dict[str, Any]]:
    out = []
    for call in said.tool_calls:
        function = call["function"]
        if arguments is not None:
            function = {**function, "arguments": arguments(json.loads(function["arguments"]))}
        out.append({**call, "id": change_id(call["id"]) if change_id else call["id"], "function": function})
    return out


ECHOES: dict[str, Any] = {
    "verbatim": lambda said: echo(said),
    "arguments with spaces": lambda s: echo(s, tool_calls=rewritten(s, arguments=json.dumps)),
    "arguments compact and escaped": lambda s: echo(
        s, tool_calls=rewritten(s, arguments=lambda a: json.dumps(a, separators=(",", ":")))
    ),
    "arguments sorted": lambda s: echo(s, tool_calls=rewritten(s, arguments=lambda a: json.dumps(a, sort_keys=True))),
    "text stripped": lambda s: echo(s, content=s.text.strip()),
    "reasoning dropped": lambda s: {k: v for k, v in echo(s).items() if k != "reasoning_content"},
    "content as parts": lambda s: echo(s, content=[{"type": "text", "text": s.text, "cache_control": {"type": "x"}}]),
    "ids cut to letters": lambda s: echo(s, tool_calls=rewritten(s, lambda i: i.replace("-", "")[:12])),
    "ids made anew": lambda s: echo(s, tool_calls=rewritten(s, lambda i: f"call_{i}_f_12ab")),
}


@pytest.mark.parametrize("name", ECHOES)
@pytest.mark.parametrize("text", ["  I look. ", ""])
def test_every_harness_s_way_to_send_an_answer_back_is_continued(tiny: ModelRenderer, name: str, text: str) -> None:
    session = Session(tiny)
    first = session.call([SYSTEM, USER], f"<think>\nhm\n</think>\n\n{text}{CALLS}")
    assert len(session.said.tool_calls) == 2 and session.said.reasoning == "hm"
    sent = ECHOES[name](session.said)
    if not text and name != "content as parts":
        sent["content"] = None
    ids = [c["id"] for c in sent["tool_calls"]]
    found = [{"role": "tool", "tool_call_id": i, "content": t} for i, t in zip(ids, ("one", "two"), strict=True)]
    second = session.call([SYSTEM, USER, sent, *found], "done")
    assert second.parent is first and session.relation.break_reason is None
    assert second.prompt()[: len(first.full())].tolist() == first.full().tolist()


def test_results_may_come_in_the_order_in_which_they_finished(tiny: ModelRenderer) -> None:
    session = Session(tiny)
    session.call([SYSTEM, USER], CALLS)
    said = session.said
    one, two = results(said, "one", "two")
    second = session.call([SYSTEM, USER, echo(said), two, one], "done")
    assert tiny.codec.decode(second.prompt().tolist()).count("two<|im_end|>\n<|im_start|>tool\none") == 1
    third = session.call([SYSTEM, USER, echo(said), one, two, echo(session.said), USER], "more")
    assert third.parent is second
    # The same texts as results of the other call are another conversation.
    swapped = [{**one, "content": "two"}, {**two, "content": "one"}]
    session.call([SYSTEM, USER, echo(said), *swapped, echo(session.said), USER])
    assert session.broke()[0] == "history_rewritten"


def test_results_without_ids_keep_their_places() -> None:
    def key(*texts: str) -> bytes:
        calls = [{"id": i, "function": {"name": "look", "arguments": "{}"}} for i in ("x", "y")]
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        return request_keys([USER, answer, *({"role": "tool", "content": t} for t in texts)], None).chain[-1]

    assert key("1", "2") == key("1", "2") != key("2", "1")


def test_what_does_not_count_in_tools_and_what_does() -> None:
    marked = [{**TOOLS[0], "cache_control": {"type": "ephemeral"}}]
    inside = [{"type": "function", "function": {**TOOLS[0]["function"], "cache_control": {}, "defer_loading": True}}]
    assert request_keys([USER], TOOLS) == request_keys([USER], marked) == request_keys([USER], inside)
    assert clean_tools(marked) == clean_tools(inside) == TOOLS
    renamed = [{"type": "function", "function": {**TOOLS[0]["function"], "description": "e"}}]
    assert request_keys([USER], TOOLS).tools != request_keys([USER], renamed).tools


def test_messages_that_cannot_be_written_as_json_again_have_an_identity() -> None:
    deep = "[" * 400 + "]" * 400
    call = {"id": "1", "function": {"name": "f", "arguments": deep}}
    assert deep.encode() in canonical({"role": "assistant", "content": "", "tool_calls": [call]})


def test_images_are_part_of_a_message() -> None:
    def picture(url: str) -> Message:
        return {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "url": url}]}

    assert canonical(picture("a")) == canonical(picture("a")) != canonical(picture("b"))


def test_few_shot_answers_that_nobody_sampled_are_context(tiny: ModelRenderer) -> None:
    session = Session(tiny)
    shots = [USER, {"role": "assistant", "content": "as an example"}, USER]
    first = session.call(shots)
    assert session.relation == Link()
    second = session.call([*shots, echo(session.said), USER])
    assert second.parent is first


# -- breaks ------------------------------------------------------------------------------------------------------------


def test_tools_that_changed_break_where_the_prompt_changes(tiny: ModelRenderer) -> None:
    session = Session(tiny)
    first = session.call([SYSTEM, USER])
    session.call([SYSTEM, USER, echo(session.said), USER], tools=None)
    reason, index = session.broke()
    assert reason == "tools_changed" and index is not None and 0 < index < first.prompt_len


def test_history_that_was_rewritten_or_left_out(tiny: ModelRenderer) -> None:
    session = Session(tiny)
    first = session.call([SYSTEM, USER])
    session.call([SYSTEM, USER, {"role": "assistant", "content": "something else"}, USER])
    assert session.broke()[0] == "history_rewritten"
    # After a format error some harnesses drop the answer and add an error message.
    session.call([SYSTEM, USER, {"role": "user", "content": "that was no JSON"}])
    reason, index = session.broke()
    assert reason == "history_rewritten" and index is not None and index <= first.prompt_len


def test_a_request_that_ends_with_the_answer_has_nothing_new(tiny: ModelRenderer) -> None:
    session = Session(tiny)
    session.call([SYSTEM, USER], ids=[*(tiny.codec.encode(ch)[0] for ch in "answer"), 2])
    session.call([SYSTEM, USER, echo(session.said)])
    assert session.broke()[0] == "no_new_message"


def test_the_same_question_again_is_another_sample_of_the_same_prompt(tiny: ModelRenderer) -> None:
    session = Session(tiny)
    first = session.call([SYSTEM, USER], "one")
    second = session.call([SYSTEM, USER], "two")
    assert (session.relation.parent, session.relation.break_reason) == (None, None)
    assert second.prompt().tolist() == first.prompt().tolist() and len(second.suffix) == 0


def test_a_summary_that_comes_back_in_a_new_conversation_is_a_compaction(tiny: ModelRenderer) -> None:
    session = Session(tiny)
    session.call([SYSTEM, USER])
    long = "We looked at everything twice, found nothing in the first place, and will look at the second one next."
    summary = session.call([SYSTEM, USER, echo(session.said), {"role": "user", "content": "sum it up"}], long)
    session.call([SYSTEM, {"role": "user", "content": f"Earlier:\n{session.said.text}\nGo on."}])
    assert session.broke()[0] == "compaction" and session.relation.base is summary
    session.call([SYSTEM, {"role": "user", "content": "something new"}])
    assert session.relation.break_reason is None
    session.call([{"role": "system", "content": "sub-agent"}, {"role": "user", "content": f"Check this: {long}"}])
    assert session.relation.break_reason is None


def test_a_truncated_answer_is_not_continued(tiny: ModelRenderer) -> None:
    session = Session(tiny)
    odd = [tiny.codec.encode(ch)[0] for ch in "answer"]
    first = session.call([SYSTEM, USER], ids=odd, finish="length")
    second = session.call([SYSTEM, USER, echo(session.said), USER])
    reason, index = session.broke()
    assert reason == "truncated" and index is not None and first.prompt_len <= index < len(first.full())
    assert second.prompt().tolist() == tiny.full([SYSTEM, USER, {**first.answer}, USER], TOOLS).tolist()


def test_a_truncated_answer_whose_rendering_is_what_was_sampled_is_continued(tiny: ModelRenderer) -> None:
    session = Session(tiny)
    first = session.call([SYSTEM, USER], "fine", finish="length")
    second = session.call([SYSTEM, USER, echo(session.said), USER])
    assert second.parent is first


def test_an_unknown_family_is_rendered_in_full_and_says_so(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    template = folder / "chat_template.jinja"
    template.write_text("{{ messages | length }}" + template.read_text())
    session = Session(ModelRenderer(folder))
    assert session.model.family == "default"
    session.call([SYSTEM, USER], tools=None)
    session.call([SYSTEM, USER, echo(session.said), USER], tools=None)
    assert session.broke() == ("unknown_family", 0)


def test_late_system_messages_that_the_template_moves_are_a_break() -> None:
    session = Session(ModelRenderer(tokenizer_folder("deepseek_v3")))
    first = session.call([SYSTEM, USER], tools=None)
    late = {"role": "system", "content": "by the way"}
    session.call([SYSTEM, USER, echo(session.said), late], tools=None)
    reason, index = session.broke()
    assert reason == "template_rewrote_history" and index is not None and index < first.prompt_len


# -- stop tokens -------------------------------------------------------------------------------------------------------


def test_the_end_of_turn_is_there_once_whether_or_not_the_engine_keeps_it(tiny: ModelRenderer) -> None:
    for ids in ([*tiny.codec.encode("A"), 2], tiny.codec.encode("A")):
        session = Session(tiny)
        first = session.call([SYSTEM, USER], ids=ids)
        second = session.call([SYSTEM, USER, echo(session.said), USER])
        assert second.parent is first
        between = second.prompt()[first.prompt_len :].tolist()
        assert between[: between.index(1)] == [*tiny.codec.encode("A"), 2, *tiny.codec.encode("\n")]


def test_another_stop_token_than_the_template_s_stays_as_it_was_sampled(qwen: ModelRenderer) -> None:
    other = qwen.codec.convert_tokens_to_ids("<|endoftext|>")
    session = Session(qwen)
    first = session.call([SYSTEM, USER], ids=[*qwen.codec.encode("A"), other])
    second = session.call([SYSTEM, USER, echo(session.said), USER])
    assert second.parent is first
    assert second.prompt().tolist().count(other) == 1


# -- reasoning ---------------------------------------------------------------------------------------------------------


def test_reasoning_is_kept_while_tools_run_and_dropped_when_the_user_speaks(qwen: ModelRenderer) -> None:
    session = Session(qwen)
    first = session.call([SYSTEM, USER], f"<think>\nhm\n</think>\n\nI look.{CALLS}")
    assert session.said.reasoning == "hm"
    history = [SYSTEM, USER, echo(session.said), *results(session.said, "one", "two")]
    second = session.call(history, "<think>\nso\n</think>\n\nDone.")
    assert second.parent is first
    third = session.call([*history, echo(session.said), USER])
    reason, index = session.broke()
    assert reason == "template_dropped_reasoning"
    assert index is not None and first.prompt_len <= index < len(first.full())
    assert "hm" not in qwen.codec.decode(third.prompt().tolist())


def test_without_reasoning_nothing_is_dropped_and_the_user_may_speak(qwen: ModelRenderer) -> None:
    session = Session(qwen)
    node: Node | None = None
    messages = [SYSTEM, USER]
    for turn in range(4):
        later = session.call(messages, f"answer {turn}")
        assert later.parent is node and session.relation.break_reason is None
        node = later
        messages = [*messages, echo(session.said), USER]


def test_an_empty_block_of_reasoning_is_reasoning(qwen: ModelRenderer) -> None:
    session = Session(qwen)
    session.call([SYSTEM, USER], "<think>\n\n</think>\n\nA")
    assert session.said.reasoning is None
    session.call([SYSTEM, USER, echo(session.said), USER])
    assert session.broke()[0] == "template_dropped_reasoning"


# -- modes -------------------------------------------------------------------------------------------------------------


def test_render_mode_links_by_tokens_and_says_when_text_was_encoded_otherwise(tiny: ModelRenderer) -> None:
    session = Session(tiny, mode="render")
    first = session.call([SYSTEM, USER], "fine")
    second = session.call([SYSTEM, USER, echo(session.said), USER], "fine")
    assert second.parent is first
    assert second.prompt().tolist() == tiny.full([SYSTEM, USER, first.answer, USER], TOOLS).tolist()
    odd = [tiny.codec.encode(ch)[0] for ch in "answer"]
    third = session.call([SYSTEM, USER], ids=[*odd, 2])
    session.call([SYSTEM, USER, echo(session.said), USER])
    assert session.broke()[0] == "retokenised"
    assert session.relation.break_index is not None and session.relation.break_index >= third.prompt_len


def test_render_mode_names_reasoning_that_the_template_dropped(qwen: ModelRenderer) -> None:
    session = Session(qwen, mode="render")
    session.call([SYSTEM, USER], "<think>\nhm\n</think>\n\nA")
    session.call([SYSTEM, USER, echo(session.said), USER])
    assert session.broke()[0] == "template_dropped_reasoning"


def test_a_prompt_that_an_engine_made_is_linked_by_its_tokens(tiny: ModelRenderer) -> None:
    session = Session(tiny)
    first = session.call([SYSTEM, USER])
    messages = [SYSTEM, USER, echo(session.said), USER]
    plan = session.plan(messages)
    theirs = np.concatenate([first.full(), np.asarray([5, 6, 7], np.int32)])
    assert tiny.relate(plan, theirs, None).parent is first
    theirs[first.prompt_len] += 1
    relation = tiny.relate(plan, theirs, None)
    assert relation.parent is None and relation.break_index == first.prompt_len
    assert relation.break_reason == "template_rewrote_history"


def test_prompts_that_clients_wrote_themselves_are_continued_by_their_tokens(tiny: ModelRenderer) -> None:
    forest = Forest()
    keys = request_keys([], None)

    def call(name: str, prompt: list[int], response: list[int]) -> Node:
        ids = np.asarray(prompt, np.int32)
        plan = forest.plan_tokens(ids, keys)
        relation = tiny.relate(plan, ids, None)
        said = {"role": "assistant", "content": name}
        return forest.add(
            name, len(forest.nodes), keys, relation, ids, np.asarray(response, np.int32), said, "stop", []
        )

    first = call("a", [5, 6], [7])
    second = call("b", [5, 6, 7, 8], [9])
    assert second.parent is first
    assert call("c", [5, 6, 7, 8, 9, 10], [11]).parent is second
    other = call("d", [5, 6, 8], [9])
    assert other.parent is None and other.base_len == 2


# -- overlapping calls -------------------------------------------------------------------------------------------------


def test_calls_that_overlap_continue_answers_that_nobody_continues_yet(tiny: ModelRenderer) -> None:
    session = Session(tiny)
    same = [session.call([SYSTEM, USER], "the same") for _ in range(2)]
    messages = [SYSTEM, USER, echo(session.said), USER]
    plans = []
    for _ in range(2):
        plans.append(session.plan(messages))
        session.forest.reserve(plans[-1])
    assert {id(p.node) for p in plans} == {id(n) for n in same}
    session.forest.release(plans[0])
    assert session.plan(messages).node is plans[0].node
    # What failed holds nothing; what was recorded counts for good.
    session.forest.release(plans[1])
    done = session.call(messages)
    assert done.parent is not None and session.plan(messages).node is not done.parent


def test_two_calls_that_continue_one_are_branches_of_it(tiny: ModelRenderer) -> None:
    session = Session(tiny)
    first = session.call([SYSTEM, USER])
    history = [SYSTEM, USER, echo(session.said)]
    left = session.call([*history, {"role": "user", "content": "left"}])
    right = session.call([*history, {"role": "user", "content": "right"}])
    assert left.parent is first and right.parent is first


# -- forced calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tool", "rest"), [(None, '{"name": "look", "arguments": {"a": 1}}'), ("look", ' {"a": 1}}')])
def test_a_forced_call_is_opened_in_the_prompt_and_parsed_as_a_whole(
    tiny: ModelRenderer, tool: str | None, rest: str
) -> None:
    force = tiny.opening(tool)
    assert force is not None
    session = Session(tiny)
    first = session.call([SYSTEM, USER], f"{rest}\n</tool_call>", force=force)
    assert first.prompt()[-len(force) :].tolist() == force.tolist()
    assert [c["function"] for c in session.said.tool_calls] == [{"name": "look", "arguments": '{"a": 1}'}]
    assert session.said.text == ""
    second = session.call([SYSTEM, USER, echo(session.said), *results(session.said, "seen")], "done")
    assert second.parent is first


def test_models_that_reason_are_not_forced(qwen: ModelRenderer) -> None:
    assert qwen.opening(None) is None and qwen.opening("look") is None


# -- memory ------------------------------------------------------------------------------------------------------------


def test_the_first_prompts_of_a_group_are_rendered_once(model_folder: Path) -> None:
    model = ModelRenderer(model_folder)
    messages = [{"role": "system", "content": "rules " * 400}, USER]
    first = Session(model).call(messages)
    renders = []
    original = model.known.full.render_ids
    model.known.full.render_ids = lambda *a, **k: renders.append(1) or original(*a, **k)
    assert Session(model).call(messages).prompt().tolist() == first.prompt().tolist()
    assert not renders and model.remembers(prompt_key(messages, TOOLS))
    # Other users' questions share the long system prompt.
    hits = model.codec.cache.hits
    Session(model).call([messages[0], {"role": "user", "content": "another"}])
    assert renders and model.codec.cache.hits > hits
