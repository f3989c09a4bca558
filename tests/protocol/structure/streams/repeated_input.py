# ruff: noqa: E501  (tables of streams, one a line)
"""Streams that repeat texts of the user: transcripts of speech, messages, earlier turns, results of tools."""

from typing import Any

from tests.protocol.structure.streams.forms import LAKE as L
from tests.protocol.structure.streams.forms import Item, Out, so_far

Answer = tuple[str, list[Item]]
"""Path of the request, and the events."""
ASK = ["What", " is", " the", " tide", " in", " Brest", " today", "?"]
SO = so_far(ASK)
PATHS = ("/x", "/v1/voice", "/v1/chat/completions", "/v1/responses", "/v1/realtime")


def ev(kind: str, **members: Any) -> dict[str, Any]:
    return {"type": kind, **members}


_HEARD: list[Item] = [
    ev(
        "conversation.item.input_audio_transcription.delta",
        event_id=f"e{i}",
        item_id="i1",
        content_index=0,
        delta=x,
    )
    for i, x in enumerate(ASK)
] + [
    ev(
        "conversation.item.input_audio_transcription.completed",
        event_id="e9",
        item_id="i1",
        content_index=0,
        transcript="".join(ASK),
        usage={"type": "tokens", "total_tokens": 20, "input_tokens": 14, "output_tokens": 6},
    )
]
_SPOKEN: list[Item] = [
    Out(
        ev(
            "response.output_audio_transcript.delta",
            event_id=f"f{i}",
            response_id="r",
            item_id="i2",
            output_index=0,
            content_index=0,
            delta=x,
        )
    )
    for i, x in enumerate(L)
]
_HEAD: list[Item] = [
    ev("session.created", event_id="e", session={"id": "s", "model": "m"}),
    ev(
        "conversation.item.added",
        event_id="x",
        item={
            "id": "i1",
            "type": "message",
            "role": "user",
            "status": "completed",
            "content": [{"type": "input_audio", "transcript": None}],
        },
    ),
]
_ITEM: Item = ev(
    "conversation.item.created",
    event_id="x",
    item={
        "id": "i1",
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "".join(ASK)}],
    },
)
_DONE: Item = ev(
    "response.done",
    event_id="z",
    response={
        "id": "r",
        "object": "realtime.response",
        "status": "completed",
        "output": [],
        "usage": {"input_tokens": 20, "output_tokens": 13, "total_tokens": 33},
    },
)
_SNAPSHOT = ev(
    "MESSAGES_SNAPSHOT",
    messages=[
        {"id": "1", "role": "user", "content": "".join(ASK)},
        {"id": "2", "role": "assistant", "content": "".join(L)},
    ],
)
_LIVE_IN: list[Item] = [{"serverContent": {"inputTranscription": {"text": x}}} for x in ASK]
_LIVE_OUT: list[Item] = [Out({"serverContent": {"outputTranscription": {"text": x}}}) for x in L]


def nova(role: str, text: str) -> Item:
    return {
        "event": {
            "textOutput": {
                "completionId": "c",
                "content": text,
                "contentId": "k" + role,
                "promptName": "p",
                "role": role,
            }
        }
    }


def ag(message: str, role: str, texts: list[str]) -> list[Item]:
    pieces = [ev("TEXT_MESSAGE_CONTENT", messageId=message, delta=x) for x in texts]
    return [
        ev("TEXT_MESSAGE_START", messageId=message, role=role),
        *(map(Out, pieces) if role == "assistant" else pieces),
        ev("TEXT_MESSAGE_END", messageId=message),
    ]


REPEATED: dict[str, Answer] = {
    **{f"realtime, input only, {path}": (path, [*_HEAD, *_HEARD]) for path in PATHS},
    **{f"realtime, transcript only, {path}": (path, _HEARD) for path in PATHS},
    **{f"realtime, items, {path}": (path, [_ITEM, _ITEM, _ITEM]) for path in PATHS},
    **{f"realtime, input and output, {path}": (path, [*_HEAD, *_HEARD, ev("response.created", event_id="a", response={"id": "r", "object": "realtime.response"}), *_SPOKEN, _DONE]) for path in PATHS},
    **{f"realtime, both mixed, {path}": (path, [_HEAD[0], *_HEARD[:4], *_SPOKEN[:4], *_HEARD[4:8], *_SPOKEN[4:], _DONE]) for path in PATHS},
    "live input": ("/x", [ev("session.started"), *(ev("session.input_transcript.delta", delta=x, item_id="q") for x in ASK)]),
    "live both": ("/x", [ev("session.started"), *(ev("session.input_transcript.delta", delta=x) for x in ASK), *(Out(ev("session.output_transcript.delta", delta=x)) for x in L), ev("session.closed")]),
    "live late input": ("/x", [ev("session.started"), *(Out(ev("session.output_transcript.delta", delta=x)) for x in L), *(ev("session.input_transcript.delta", delta=x) for x in ASK), ev("session.closed")]),
    "gemini live": ("/x", [{"setupComplete":{}}, *_LIVE_IN, *_LIVE_OUT, {"serverContent":{"turnComplete":True}}]),
    "gemini live input only": ("/x", [{"setupComplete":{}}, *_LIVE_IN]),
    "gemini live snake": ("/x", [{"server_content":{"input_transcription":{"text":x}}} for x in ASK] + [Out({"server_content":{"output_transcription":{"text":x}}}) for x in L]),
    "gemini live wrapped": ("/x", [{"event":"msg","data":{"serverContent":{"inputTranscription":{"text":x}}}} for x in ASK]),
    "adk live": ("/x", [{"inputTranscription":{"text":x,"finished":False},"author":"user","id":"1","partial":True} for x in ASK] + [Out({"outputTranscription":{"text":x,"finished":False},"author":"guide","id":"2","partial":True}) for x in L]),
    "adk": ("/run_sse", [{"content":{"parts":[{"text":"".join(ASK)}],"role":"user"},"author":"user","id":"0"}]+[Out({"content":{"parts":[{"text":x}],"role":"model"},"partial":True,"author":"guide","id":str(i)}) for i,x in enumerate(L)] + [{"content":{"parts":[{"text":"".join(L)}],"role":"model"},"author":"guide","id":"99","usageMetadata":{"promptTokenCount":9,"candidatesTokenCount":13}}]),
    "nova sonic": ("/x", [{"event":{"completionStart":{"sessionId":"s"}}}, {"event":{"contentStart":{"role":"USER","type":"TEXT","contentId":"kUSER"}}}, *(nova("USER", x) for x in ASK), {"event":{"contentStart":{"role":"ASSISTANT","type":"TEXT","contentId":"kA"}}}, *(Out(nova("ASSISTANT", x)) for x in L), {"event":{"contentEnd":{"stopReason":"END_TURN"}}}]),
    "nova sonic user only": ("/x", [*(nova("USER", x) for x in ASK)]),
    "nova sonic user late": ("/x", [*(Out(nova("ASSISTANT", x)) for x in L), *(nova("USER", x) for x in ASK)]),
    "ag-ui user message": ("/x", [ev("RUN_STARTED", threadId="t", runId="r", input={"messages":[{"role":"user","content":"".join(ASK)}]}), *ag("m0","user",ASK), *ag("m1","assistant",L), _SNAPSHOT, ev("RUN_FINISHED", threadId="t", runId="r")]),
    "ag-ui user only": ("/x", [ev("RUN_STARTED", threadId="t", runId="r"), *ag("m0","user",ASK), _SNAPSHOT, ev("RUN_FINISHED", threadId="t", runId="r")]),
    "ag-ui chunk": ("/x", [ev("TEXT_MESSAGE_CHUNK", messageId="m0", role="user", delta=x) for x in ASK]+[Out(ev("TEXT_MESSAGE_CHUNK", messageId="m1", role="assistant", delta=x)) for x in L]+[ev("RUN_FINISHED")]),
    "ag-ui interleaved": ("/x", [ev("TEXT_MESSAGE_START", messageId="m0", role="user"), ev("TEXT_MESSAGE_START", messageId="m1", role="assistant"), *(e for a,b in zip(ASK, L, strict=False) for e in (ev("TEXT_MESSAGE_CONTENT", messageId="m0", delta=a), Out(ev("TEXT_MESSAGE_CONTENT", messageId="m1", delta=b)))), ev("RUN_FINISHED")]),
    "snapshots only": ("/x", [_SNAPSHOT, _SNAPSHOT, _SNAPSHOT]),
    "snapshot grows": ("/x", [{"kind":"snapshot","messages":[{"role":"user","content":x}]} for x in SO]),
    "assistants list": ("/x", [("thread.message.created", {"id":"msg","object":"thread.message","role":"user","content":[{"type":"text","text":{"value":"".join(ASK),"annotations":[]}}]})]),
    "assistants delta user": ("/x", [("thread.message.delta", {"id":"msg","object":"thread.message.delta","delta":{"role":"user","content":[{"index":0,"type":"text","text":{"value":x}}]}}) for x in ASK]+[("done", b"[DONE]")]),
    "responses echo": ("/x", [ev("response.created", sequence_number=0, response={"id":"r","object":"response","status":"in_progress","input":[{"role":"user","content":"".join(ASK)}],"instructions":"Be brief.","output":[]}), ev("response.output_item.added", output_index=0, sequence_number=1, item={"type":"message","role":"assistant","content":[]}), *(Out(ev("response.output_text.delta", item_id="m", output_index=0, content_index=0, sequence_number=2+i, delta=x)) for i,x in enumerate(L)), ev("response.completed", sequence_number=99, response={"id":"r","object":"response","status":"completed","input":"".join(ASK),"output":[],"usage":{"input_tokens":8,"output_tokens":13}})]),
    "chat role user": ("/v1/chat/completions", [{"object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"role":"user","content":x}}]} for x in ASK] + [Out({"object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":x}}]}) for x in L]+[{"object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}, b"[DONE]"]),
    "ollama role user": ("/api/chat", [{"model":"m","message":{"role":"user","content":x},"done":False} for x in ASK] + [Out({"model":"m","message":{"role":"assistant","content":x},"done":False}) for x in L]+[{"model":"m","message":{"role":"assistant","content":""},"done":True,"done_reason":"stop","eval_count":13,"prompt_eval_count":8}]),
    "gemini role user": ("/x", [{"candidates":[{"content":{"role":"user","parts":[{"text":x}]}}]} for x in ASK] + [Out({"candidates":[{"content":{"role":"model","parts":[{"text":x}]}}]}) for x in L]),
    "interactions": ("/x", [{"event_type":"interaction.created","interaction":{"id":"i","status":"in_progress"}}, {"event_type":"step.start","index":0,"step":{"type":"user_input","content":[{"type":"text","text":"".join(ASK)}]}}, *({"event_type":"step.delta","index":0,"delta":{"type":"text","text":x}} for x in ASK), {"event_type":"step.stop","index":0}, {"event_type":"step.start","index":1,"step":{"type":"model_output"}}, *(Out({"event_type":"step.delta","index":1,"delta":{"type":"text","text":x}}) for x in L), {"event_type":"step.stop","index":1}, {"event_type":"interaction.completed","interaction":{"id":"i","status":"completed","usage":{"total_input_tokens":8,"total_output_tokens":13}}}]),
    "coze user": ("/v3/chat", [("conversation.message.delta", {"id":"1","role":"user","type":"question","content":x,"content_type":"text"}) for x in ASK]+[("conversation.message.delta", Out({"id":"2","role":"assistant","type":"answer","content":x,"content_type":"text"})) for x in L]+[("conversation.chat.completed",{"id":"c","status":"completed","usage":{"token_count":21,"output_count":13,"input_count":8}}),("done",b'"[DONE]"')]),
    "coze ws": ("/x", [{"id":f"{i}","event_type":"conversation.audio_transcript.update","data":{"content":x}} for i,x in enumerate(SO)]+[{"id":"9","event_type":"conversation.audio_transcript.completed","data":{"content":SO[-1]}}]+[Out({"id":f"m{i}","event_type":"conversation.message.delta","data":{"role":"assistant","type":"answer","content":x}}) for i,x in enumerate(L)]),
    "langgraph tuple": ("/runs/stream", [("messages", [{"type":"human","content":"".join(ASK)},{"langgraph_node":"a"}]), *(("messages", Out([{"type":"AIMessageChunk","content":x},{"langgraph_node":"a"}])) for x in L), ("end", None)]),
    "langgraph values foreign": ("/x", [("values", {"messages":[{"type":"human","content":"".join(ASK)}]}), ("values", {"messages":[{"type":"human","content":"".join(ASK)},{"type":"ai","content":"".join(L)}]}), ("end", None)]),
    "langserve": ("/x", [("data", {"messages":[{"type":"HumanMessageChunk","content":x}]}) for x in ASK]),
    "a2a user": ("/a2a", [{"jsonrpc":"2.0","id":1,"result":{"kind":"status-update","taskId":"t","contextId":"c","status":{"state":"submitted","message":{"kind":"message","role":"user","messageId":"q","parts":[{"kind":"text","text":"".join(ASK)}]}},"final":False}}, *(Out({"jsonrpc":"2.0","id":1,"result":{"kind":"artifact-update","taskId":"t","contextId":"c","artifact":{"artifactId":"a","parts":[{"kind":"text","text":x}]},"append":True}}) for x in L), {"jsonrpc":"2.0","id":1,"result":{"kind":"status-update","taskId":"t","contextId":"c","status":{"state":"completed"},"final":True}}]),
    "a2a user message": ("/a2a", [{"jsonrpc":"2.0","id":1,"result":{"kind":"message","role":"user","messageId":"q","parts":[{"kind":"text","text":"".join(ASK)}]}}]),
    "a2a history": ("/a2a", [{"jsonrpc":"2.0","id":1,"result":{"kind":"task","id":"t","contextId":"c","status":{"state":"submitted"},"history":[{"role":"user","parts":[{"kind":"text","text":"".join(ASK)}]}]}}]),
    "a2a 1.0": ("/a2a", [{"statusUpdate":{"taskId":"t","status":{"state":"TASK_STATE_SUBMITTED","message":{"role":"ROLE_USER","messageId":"q","parts":[{"text":"".join(ASK)}]}}}}, *(Out({"artifactUpdate":{"taskId":"t","artifact":{"artifactId":"a","parts":[{"text":x}]}}}) for x in L)]),
    "eleven": ("/x", [ev("conversation_initiation_metadata", conversation_initiation_metadata_event={"conversation_id":"c"}), *(ev("user_transcript", user_transcription_event={"user_transcript":x}) for x in SO), *(ev("tentative_user_transcript", tentative_user_transcription_event={"user_transcript":x,"event_id":5}) for x in SO), *(Out(ev("agent_chat_response_part", text_response_part={"text":x,"type":"delta"})) for x in L), ev("agent_response", agent_response_event={"agent_response":"".join(L)})]),
    "ultravox": ("/x", [ev("transcript", role="user", medium="voice", text=x, final=False, ordinal=0) for x in SO]+[Out(ev("transcript", role="agent", medium="voice", delta=x, final=False, ordinal=1)) for x in L]),
    "vapi": ("/x", [ev("transcript", role="user", transcriptType="partial", transcript=x) for x in SO]),
    "hume": ("/x", [ev("user_message", message={"role":"user","content":x}, interim=True) for x in SO]+[Out(ev("assistant_message", id=f"{i}", message={"role":"assistant","content":x})) for i,x in enumerate(["It is six. "," Low water is at noon."," Take care."])]),
    "pipecat": ("/x", [{"label":"rtvi-ai","type":"user-transcription","data":{"text":x,"final":False,"timestamp":"2026-01-01T00:00:00Z","user_id":"u"}} for x in SO]+[Out({"label":"rtvi-ai","type":"bot-llm-text","data":{"text":x}}) for x in L]),
    "retell": ("/x", [{"event_type":"update","transcript":[{"role":"user","content":x}]} for x in SO]),
    "assembly": ("/x", [Out(ev("Turn", turn_order=0, end_of_turn=False, transcript=x, words=[{"text":"a","start":1}])) for x in SO]),
    "openai agents voice": ("/x", [ev("history_updated", history=[{"role":"user","content":[{"type":"input_audio","transcript":x}]}]) for x in SO]),
    "from member": ("/x", [{"from":"user","text":x} for x in ASK]+[Out({"from":"bot","text":x}) for x in L]),
    "speaker member": ("/x", [{"speaker":"caller","text":x} for x in SO]+[Out({"speaker":"agent","text":x}) for x in L]),
    "sender nested": ("/x", [{"msg":{"sender":{"role":"user"},"text":x}} for x in ASK]),
    "start role user": ("/x", [ev("message.start", id="a", role="user"), *(ev("message.delta", id="a", delta=x) for x in ASK), ev("message.end", id="a"), ev("message.start", id="b", role="assistant"), *(Out(ev("message.delta", id="b", delta=x)) for x in L), ev("message.end", id="b")]),
    "start role user only": ("/x", [ev("message.start", id="a", role="user"), *(ev("message.delta", id="a", delta=x) for x in ASK), ev("message.end", id="a")]),
    "prompt echo": ("/x", [{"prompt_delta":x} for x in ASK]+[Out({"text_delta":x}) for x in L]),
    "user input event": ("/x", [("user_input.delta", {"text":x}) for x in ASK]+[("answer.delta", Out({"text":x})) for x in L]),
    "speech recognised": ("/x", [("speech.recognized", {"text":x}) for x in SO]+[("answer.delta", Out({"text":x})) for x in L]),
    "stt": ("/x", [ev("stt.partial", text=x) for x in SO]+[Out(ev("llm.delta", text=x)) for x in L]),
    "asr": ("/x", [ev("asr_result", text=x) for x in SO]+[Out(ev("llm_token", token=x)) for x in L]),
    "role user late top": ("/x", [*(Out({"role":"assistant","text":x}) for x in L),*({"role":"user","text":x} for x in ASK)]),
    "role user first top": ("/x", [*({"role":"user","text":x} for x in ASK), *(Out({"role":"assistant","text":x}) for x in L)]),
    "role user nested": ("/x", [*({"message":{"role":"user","text":x}} for x in ASK), *(Out({"message":{"role":"assistant","text":x}}) for x in L)]),
    "role user nested late": ("/x", [*(Out({"message":{"role":"assistant","text":x}}) for x in L), *({"message":{"role":"user","text":x}} for x in ASK)]),
    "openai transcription": ("/x", [Out(ev("transcript.text.delta", delta=x)) for x in L]+[ev("transcript.text.done", text="".join(L))]),
}  # fmt: skip
