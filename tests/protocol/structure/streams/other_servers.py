# ruff: noqa: E501  (tables of streams, one a line)
"""Streams of servers that are no model, many of them in forms that a model's server has, too, and streams of
models in unusual envelopes or behind much else. An event without `Out` must not be read as output."""

import base64

from tests.protocol.structure.streams.forms import CHINESE, Out, so_far
from tests.protocol.structure.streams.forms import LAKE as L
from tests.protocol.structure.streams.repeated_input import Answer, ev

T = "".join(L)
SO = so_far(L)
CHAT = "/v1/chat/completions"
TYPED = so_far(list("The tide is high"))
BYTES = base64.b64encode(bytes(range(7, 255, 3)) * 3).decode()
SPEECH = ["the lake", "the lake is", "the late is deep", "the lake is deep and", "the lake is deep and cold"]
LOG = [
    "2026-11-20 10:00:01 INFO sta",
    "rt server\n2026-11-20 10:00:02 ",
    "INFO bind port 80",
    "80\n2026-11-20 10:00:03 WARN slow",
    " disk\n2026-11-20 10:00:04 INFO ready\n",
]
PEOPLE = ["hello all", "did the build pass?", "not yet", "ok, waiting", "I will look at it", "thanks"]
WORDS = ["hi", "yo", "ok", "thanks", "sure", "later", "bye"]
PORTUGUESE = ["O", " lago", " é", " fundo", " e", " frio", ",", " com", " poucos", " peixes", "."]
KOREAN = ["호수는", " 깊고", " 차갑", "습니다", ".", " 물고기", "는", " 적", "습니다", "."]
ARABIC = ["البحيرة", " عميقة", " وباردة", " ويعيش", " فيها", " القليل", " من", " السمك", "."]
JAPANESE = ["湖", "は", "深く", "て", "冷たい", "です", "。", "魚", "は", "少ない", "。"]
CLAUSES = ["湖水很深、", "也很冷、", "所以", "鱼很少。", "夏天", "可以", "划船。"]
CODE = [
    "```",
    "python",
    "\n",
    "def",
    " area",
    "(",
    "r",
    "):",
    "\n",
    "   ",
    " return",
    " 3.14",
    " *",
    " r",
    " **",
    " 2",
    "\n",
    "```",
]
LIST = [
    "1",
    ".",
    " Pack",
    " a",
    " coat",
    "\n",
    "2",
    ".",
    " Bring",
    " water",
    "\n",
    "3",
    ".",
    " Leave",
    " early",
]
TABLE = ["| lake", " | depth", " |\n", "|---", "|---", "|\n", "| Ness", " | 230", " m |"]
JSON = ['{"', "name", '":"', "Ness", '","', "depth", '":', "230", ',"', "cold", '":', "true", "}"]
CHINESE_CHAT = ["你好", "在吗", "今天开会吗", "下午三点", "好的", "谢谢"]
JAPANESE_STEPS = ["モデルを読み込み中", "索引を作成中", "検索を実行中", "結果を整理中"]
STATUS = [ev("status", message=f"Loading shard {i} of 40") for i in range(40)]


def rpc(method: str, **params: object) -> dict[str, object]:
    return {"jsonrpc": "2.0", "method": method, "params": params}


def slices(text: str, n: int) -> list[str]:
    return [text[i : i + n] for i in range(0, len(text), n)]


def row(text: str, before: str) -> tuple[dict[str, object], dict[str, object]]:
    return {"id": 7, "title": "Lakes", "text": text}, {"id": 7, "title": "Lakes", "text": before}


def pairs() -> list[tuple[dict[str, object], dict[str, object]]]:
    return [row(a, b) for a, b in zip(SO, ["", *SO], strict=False)]


OTHER_SERVERS: dict[str, Answer] = {
    # Changes of a database: a column with a text that grows.
    "debezium": ("/x", [{"payload": {"before": b, "after": a, "source": {"connector": "postgresql", "db": "app", "table": "notes", "lsn": 9 + i}, "op": "u", "ts_ms": 1767000000 + i}} for i, (a, b) in enumerate(pairs())]),
    "debezium unwrapped": ("/x", [{"before": b, "after": a, "op": "u", "ts_ms": 1767000000 + i} for i, (a, b) in enumerate(pairs())]),
    "supabase": ("/x", [{"event": "postgres_changes", "topic": "realtime:notes", "payload": {"data": {"schema": "public", "table": "notes", "type": "UPDATE", "record": a, "old_record": {"id": 7}, "errors": None}, "ids": [1]}} for a, b in pairs()]),
    "mongodb": ("/x", [{"_id": {"_data": f"8263F{i}"}, "operationType": "update", "ns": {"db": "app", "coll": "notes"}, "documentKey": {"_id": "5f0c"}, "updateDescription": {"updatedFields": {"text": s}, "removedFields": []}} for i, s in enumerate(SO)]),
    "couchdb": ("/notes/_changes", [{"seq": f"{i}-g1AA", "id": "note", "changes": [{"rev": f"{i}-9f"}], "doc": {"_id": "note", "_rev": f"{i}-9f", "text": s}} for i, s in enumerate(SO)]),
    "pocketbase": ("/x", [("notes/7", {"action": "update", "record": {**a, "collectionName": "notes", "updated": f"2026-01-01 00:00:{i:02d}Z"}}) for i, (a, _) in enumerate(pairs())]),
    "wal2json": ("/x", [{"change": [{"kind": "update", "schema": "public", "table": "note", "columnnames": ["id", "text"], "columnvalues": [7, s]}]} for s in SO]),
    "dynamodb": ("/x", [{"eventName": "MODIFY", "eventSource": "aws:dynamodb", "dynamodb": {"Keys": {"id": {"S": "7"}}, "NewImage": {"id": {"S": "7"}, "text": {"S": s}}, "SequenceNumber": str(100 + i)}} for i, s in enumerate(SO)]),
    "firestore": ("/x", [{"documentChange": {"document": {"name": "projects/p/databases/d/documents/notes/7", "fields": {"text": {"stringValue": s}}, "updateTime": "2026-01-01T00:00:00Z"}, "targetIds": [1]}} for s in SO]),
    "electric": ("/x", [[{"key": '"public"."notes"/"7"', "value": {"id": "7", "text": s}, "headers": {"operation": "update", "lsn": str(i)}}] for i, s in enumerate(SO)]),
    "rethinkdb": ("/x", [{"old_val": b, "new_val": a} for a, b in pairs()]),
    "maxwell": ("/x", [{"database": "app", "table": "notes", "type": "update", "ts": 1767000000, "xid": i, "data": a, "old": {"text": b["text"]}} for i, (a, b) in enumerate(pairs())]),
    "insert feed": ("/x", [{"table": "customers", "op": "INSERT", "row": {"id": i, "content": c}} for i, c in enumerate(("Likes tea", "sails", "runs far", "paints boats"))]),
    "insert feed on chat path": (CHAT, [{"table": "notes", "op": "UPDATE", "row": {"id": 7, "content": s}} for s in SO]),
    "change feed of answers": ("/x", [{"op": "c", "table": "answers", "after": {"id": i, "answer": a}} for i, a in enumerate(("Yes.", "No.", "Perhaps later.", "Ask again."))]),
    "event sourcing": ("/x", [{"aggregate": "note-7", "version": i, "type": "NoteRevised", "data": {"text": s}} for i, s in enumerate(SO)]),
    # A text box that several people see.
    "whole document": ("/x", [ev("doc.update", doc="d", rev=i, text=s) for i, s in enumerate(SO)]),
    "two editors": ("/x", [{"client": f"c{i % 2}", "value": s} for i, s in enumerate(SO)]),
    "typed letters": ("/x", [ev("text", content=s) for s in TYPED]),
    "typed letters, inserted": ("/x", [ev("insert", at=i, content=c) for i, c in enumerate("The tide is high")]),
    "typed with corrections": ("/x", [{"text": s} for s in ("The tide", "The tidee", "The tide", "The tide is", "The tide is lo", "The tide is", "The tide is high")]),
    "etherpad": ("/x", [{"type": "COLLABROOM", "data": {"type": "NEW_CHANGES", "newRev": i, "changeset": f"Z:{i}>1*0+1$e", "author": "a.x"}} for i in range(6)]),
    "operational transform": ("/x", [{"v": i, "op": [{"retain": i}, {"insert": c}]} for i, c in enumerate(L)]),
    "quill": ("/x", [{"ops": [{"retain": 4 * i}, {"insert": x}], "source": "user"} for i, x in enumerate(L)]),
    "sticky note": ("/x", [ev("shape.changed", shape={"id": "s", "kind": "note", "props": {"text": s, "color": "yellow"}}) for s in SO]),
    "cursors": ("/x", [ev("cursor", client="c1", line=i, column=4, text=w) for i, w in enumerate(("lake", "deep", "cold", "fish"))]),
    "search box": ("/x", [{"q": s, "hits": 40 - i} for i, s in enumerate(SO)]),
    "form field": ("/x", [{"field": "bio", "value": s, "valid": True} for s in SO]),
    "yjs": ("/x", [ev("sync", update=base64.b64encode(bytes([1, i, 200, 3 * i, 7, 9, 130, i])).decode()) for i in range(9)]),
    # Pieces of a tokenizer.
    "tokenizer pieces": ("/x", [{"id": 400 + i, "token": x.replace(" ", "\u0120")} for i, x in enumerate(L)]),
    "sentencepiece": ("/x", [{"id": 400 + i, "piece": x.replace(" ", "\u2581")} for i, x in enumerate(L)]),
    "token list": ("/x", [{"tokens": [x.replace(" ", "\u0120") for x in L[i : i + 3]], "count": 3} for i in range(0, 12, 3)]),
    "tokens with offsets": ("/x", [{"token": x, "start": 4 * i, "end": 4 * i + 4} for i, x in enumerate(L)]),
    "vocabulary": ("/x", [{"id": i, "token": x, "rank": 100 - i} for i, x in enumerate(("<unk>", "<s>", " the", " of", "ing", " and", "er", " to"))]),
    "word pieces": ("/x", [{"id": 90 + i, "token": x} for i, x in enumerate(("the", "lake", "##s", "are", "deep", "##er", "than", "the", "riv", "##ers"))]),
    "draft tokens": ("/x", [ev("draft.token", token=x, accepted=False) for x in L]),
    "attention": ("/x", [{"token": x, "weight": 0.1, "layer": 3, "head": 2} for x in L]),
    # Signs of life.
    "dots": ("/x", [{"text": "."}] * 8),
    "two dots": ("/x", [ev("delta", delta=".")] * 2),
    "dots after a word": ("/x", [{"text": "Working"}, *[{"text": "."}] * 9]),
    "dots and a word": ("/x", [*[ev("chunk", chunk=".")] * 5, ev("chunk", chunk=" ok\n")]),
    "dots, plain": ("/x", [b"."] * 12),
    "test dots": ("/x", [{"out": c} for c in "....F...s...."] + [{"out": "\n"}, {"out": "2 failed"}]),
    "spinner signs": ("/x", [{"delta": c} for c in "|/-\\|/-\\"]),
    "braille spinner": ("/x", [{"text": c} for c in "\u280b\u2819\u2839\u2838\u283c\u2834"]),
    "blanks": ("/x", [ev("delta", text=" ")] * 5),
    "newlines": ("/x", [ev("chunk", content="\n")] * 2),
    "zero width": ("/x", [ev("delta", text="\u200b")] * 4),
    "thinking dots": ("/x", [{"text": "Thinking" + "." * (i % 4)} for i in range(12)]),
    "heartbeat words": ("/x", [b"alive", b"alive", b"still alive", b"alive", b"alive"]),
    "empty choices": (CHAT, [{"choices": []}] * 6),
    "keepalive in choices": ("/x", [{"choices": [{"text": " "}]}] * 6),
    "tick tock": ("/x", [ev("content", content=c) for c in ("tick", "tock") * 4]),
    "percentages": ("/x", [ev("text", text=f"{i} %") for i in range(0, 100, 10)]),
    "percent so far": ("/x", [ev("chunk", content=f"Rendering {i}%") for i in range(0, 100, 10)]),
    "fractions": ("/x", [{"text": f"{i}/8 files"} for i in range(8)]),
    "bar of signs": ("/x", [ev("chunk", chunk=c) for c in "########"]),
    "countdown": ("/x", [{"text": f"Starting in {i} seconds"} for i in (3, 2, 1)]),
    # Logs, metrics and builds.
    "log in slices": ("/x", [{"chunk": x} for x in LOG]),
    "log in slices, event": ("/x", [("chunk", {"content": x}) for x in LOG]),
    "log in slices, plain": ("/x", [x.encode() for x in LOG]),
    "json log in slices": ("/x", [{"chunk": x} for x in slices('{"level":"info","msg":"start"}\n{"level":"info","msg":"bind 8080"}\n{"level":"warn","msg":"slow disk"}\n', 14)]),
    "log tail": ("/x", [{"content": f"[INFO] request {i} handled in {3 * i} ms"} for i in range(6)]),
    "container log": ("/x", [{"stream": "stdout", "text": f"epoch {i} loss 0.{9 - i}\n"} for i in range(6)]),
    "metrics": ("/x", [b'http_requests_total{code="200"} 12', b'http_requests_total{code="500"} 1', b"up 1", b"process_open_fds 31"]),
    "metrics in slices": ("/x", [{"chunk": x} for x in slices('http_requests_total{code="200"} 12\nhttp_requests_total{code="500"} 1\nup 1\nprocess_open_fds 31\nprocess_threads 12\n', 20)]),
    "csv": ("/x", [{"content": x} for x in ("id,name,city\n", "1,Ann,Brest\n", "2,Bob,Cork\n", "3,Cyd,Faro\n")]),
    "csv in slices": ("/x", [{"chunk": x} for x in slices("id,name,city\n1,Ann,Brest\n2,Bob,Cork\n3,Cyd,Faro\n4,Dan,Lyon\n", 9)]),
    "build log": ("/x", [ev("output", text=x) for x in ("> tsc -p .\n", "src/a.ts(3,1): error TS2304\n", "Found 1 error.\n", "npm ERR! code 2\n")]),
    "actions log": ("/x", [{"line": i, "content": x} for i, x in enumerate(("##[group]Run actions/checkout", "Syncing repository: a/b", "##[endgroup]", "Deleting the contents of '/home'"))]),
    "compiler": ("/x", [{"output": x} for x in ("cc -c a.c", "cc -c b.c", "ar rc liba.a a.o b.o", "ranlib liba.a")]),
    "traceback": ("/x", [{"content": x} for x in ("Traceback (most recent call last):", '  File "a.py", line 3, in f', "    return g()", "ValueError: no lake")]),
    "sse of a pager": ("/x", [("page", {"text": f"Page {i} of 9", "number": i}) for i in range(9)]),
    "terraform": ("/x", [{"@level": "info", "@message": f"aws_instance.a{i}: Creating...", "type": "apply_start"} for i in range(4)]),
    # People, notices and feeds.
    "slack": ("/x", [ev("message", channel="C1", user="U1", text=x, ts=f"17670000{i}.0001") for i, x in enumerate(PEOPLE)]),
    "room": ("/x", [{"room": "r", "from": "ann", "text": x} for x in PEOPLE]),
    "people in words": ("/x", [ev("message.text", content=x) for x in WORDS]),
    "people in words, plain": ("/x", [x.encode() for x in WORDS]),
    "irc": ("/x", [f":ann!a@h PRIVMSG #c :{x}".encode() for x in PEOPLE]),
    "people in Chinese": ("/x", [ev("message", id=i, text=x) for i, x in enumerate(CHINESE_CHAT)]),
    "people in Chinese, named": ("/x", [("message", {"nick": "a", "content": x}) for x in CHINESE_CHAT]),
    "steps in Japanese": ("/x", [("step", {"text": x}) for x in JAPANESE_STEPS]),
    "documents in Chinese": ("/x", [{"index": i, "content": x} for i, x in enumerate(("湖水很深。", "鱼很少。", "水很冷。", "山很高。"))]),
    "telegram": ("/x", [{"update_id": i, "message": {"message_id": i, "from": {"id": 3, "first_name": "Ann"}, "chat": {"id": 5, "type": "group"}, "text": x}} for i, x in enumerate(PEOPLE)]),
    "people as choices": (CHAT, [{"choices": [{"text": "Tea"}, {"text": "Coffee"}], "votes": [3, i]} for i in range(4)]),
    "people as ollama": ("/room", [{"message": {"content": x}, "done": False} for x in PEOPLE]),
    "notifications": ("/x", [ev("notification", content=x) for x in ("Build 12 passed", "deploy started", "deploy finished")]),
    "toasts": ("/x", [ev("toast", text=x) for x in ("Saved", "Shared with Ann", "Saved", "Copied")]),
    "prices": ("/x", [{"s": "ACME", "p": f"{10 + i}.25", "v": str(100 + i)} for i in range(8)]),
    "prices in words": ("/x", [ev("quote", text=f"ACME {10 + i}.25 +0.{i}") for i in range(8)]),
    "prices as tokens": ("/x", [{"token": t, "usd": p} for t, p in (("BTC", 9.1), ("ETH", 3.2), ("SOL", 1.3), ("BTC", 9.2), ("ETH", 3.1))]),
    "match": ("/x", [{"minute": m, "text": x} for m, x in ((1, "Kick-off"), (12, "Goal by Ann"), (45, "Half time"), (90, "Full time"))]),
    "headlines": ("/x", [{"content": x} for x in ("Rain ahead", "Sun later this week", "Ferry delayed", "Tide tables updated")]),
    "quiz": ("/x", [{"question": q, "answer": a} for q, a in (("2 + 2", "4"), ("Capital of Ireland", "Dublin"), ("Moons of Mars", "two"))]),
    "menu": ("/x", [{"key": f"menu.{i}", "text": x} for i, x in enumerate(("File", "Open", "Save as", "Print", "Close"))]),
    "translation memory": ("/x", [{"locale": "de", "key": f"k{i}", "translation": x} for i, x in enumerate(("Datei", "Speichern", "Drucken", "Beenden"))]),
    "speech, replaced": ("/x", [{"is_final": False, "text": x} for x in SPEECH]),
    "speech, replaced, plain": ("/x", [{"text": x} for x in SPEECH]),
    "lyrics": ("/x", [{"time": 3.5 * i, "line": x} for i, x in enumerate(("Down by the lake", "where few fish live", "I wait for you", "until the tide"))]),
    # Patches, files, sound and pictures.
    "unified diff": ("/x", [x.encode() for x in ("--- a/x.py", "+++ b/x.py", "@@ -1,3 +1,4 @@", " import os", "-import re", "+import json", "+import sys")]),
    "diff lines": ("/x", [{"line": x} for x in ("--- a/x.py", "+++ b/x.py", "@@ -1,3 +1,4 @@", " import os", "-import re", "+import json", "+import sys")]),
    "patches of a document": ("/x", [[{"op": "replace", "path": "/body", "value": s}] for s in SO]),
    "patches, named": ("/x", [ev("patch", ops=[{"op": "add", "path": f"/items/{i}", "value": {"text": x}}]) for i, x in enumerate(("Buy tea", "Call Ann", "Mend the boat"))]),
    "source file": ("/x", [{"content": x} for x in ("def f(x):\n", "    return x\n", "\n", "def g(x):\n", "    return f(x)\n")]),
    "short base64": ("/x", [("chunk", {"chunk": x}) for x in slices(BYTES, 12)]),
    "short base64 as content": ("/x", [ev("content.delta", content=x) for x in slices(BYTES, 8)]),
    "hex": ("/x", [ev("chunk", data=" ".join(f"{(31 * i + k) % 256:02x}" for k in range(8))) for i in range(9)]),
    "hex without blanks": ("/x", [ev("chunk", content=f"{(7919 * i + 40503) % 65536:04x}") for i in range(1, 19)]),
    "moves": ("/x", [{"move": x} for x in ("e4", "e5", "Nf3", "Nc6", "Bb5", "a6")]),
    "dna": ("/x", [{"chunk": x} for x in ("ACGTACGTGG", "TTGACCATGC", "GGATCCAAGT", "CCGTATGACA", "ATTGCCGGTA", "CCATGGTTAA")]),
    # Forms of known dialects without a model behind them.
    "pong": ("/health", [{"response": "pong"}] * 3),
    "ids as tokens": ("/x", [("message", {"token": f"9f8e7d6c5b4a{i}9f8e7d6c5b4a"}) for i in range(4)]),
    "text output of a job": ("/x", [{"text_output": f"{i} %"} for i in range(0, 50, 10)]),
    "numbers as answers": ("/x", [{"text_output": str(i)} for i in range(5)]),
    "status on chat path": (CHAT, [{"status": "queued", "message": "You are number 3"}, {"status": "queued", "message": "You are number 2"}, {"status": "ready", "message": "Go"}]),
    "workflow on chat path": (CHAT, [ev("node", name=n, output=o) for n, o in (("search", "3 pages"), ("rank", "2 pages"), ("fetch", "ok"))]),
    "dots on chat path": (CHAT, [{"choices": [{"delta": {"note": "."}}]}] * 6),
    # JSON-RPC.
    "rpc, log": ("/x", [rpc("window/logMessage", type=3, message=x) for x in ("Indexing started", "12 files indexed", "Indexing done")]),
    "rpc, progress": ("/x", [rpc("$/progress", token="t", value={"kind": "report", "message": f"{i} of 9 files", "percentage": 11 * i}) for i in range(9)]),
    "rpc, edits of a user": ("/x", [rpc("textDocument/didChange", textDocument={"uri": "file:///a", "version": i}, contentChanges=[{"text": s}]) for i, s in enumerate(SO)]),
    "rpc, sampling": ("/x", [{**rpc("sampling/createMessage", messages=[{"role": "user", "content": {"type": "text", "text": T}}], systemPrompt="Be brief.", maxTokens=9), "id": i} for i in range(3)]),
    "rpc, user chunk": ("/x", [rpc("session/update", sessionId="s", update={"sessionUpdate": "user_message_chunk", "content": {"type": "text", "text": x}}) for x in L]),
    "rpc, prompt": ("/x", [rpc("session/prompt", sessionId="s", prompt=[{"type": "text", "text": T}])]),
    "rpc, arguments": ("/x", [{**rpc("tools/call", name="note", arguments={"text": x}), "id": i} for i, x in enumerate(("Buy tea", "Call Ann", "Mend the boat"))]),
    "rpc, delta": ("/x", [rpc("turn/started", turnId="u"), *(Out(rpc("item/agentMessage/delta", threadId="t", itemId="i", delta=x)) for x in L), rpc("turn/completed", turnId="u")]),
    "rpc, text": ("/x", [Out(rpc("message", text=x)) for x in L]),
    "rpc, thought and answer": ("/x", [*(Out(rpc("session/update", sessionId="s", update={"sessionUpdate": "agent_thought_chunk", "content": {"type": "text", "text": x}}), "reasoning") for x in L[:6]), *(Out(rpc("session/update", sessionId="s", update={"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": x}})) for x in L), {"jsonrpc": "2.0", "id": 2, "result": {"stopReason": "end_turn"}}]),
    "rpc, token and end": ("/x", [*(Out(rpc("$/stream", id=4, chunk=x)) for x in L), {"jsonrpc": "2.0", "id": 4, "result": {"usage": {"input_tokens": 9, "output_tokens": 13}}}]),
    # A model behind much else.
    "status, then bits": ("/x", [*STATUS, *(Out(ev("bit", piece={"text": x})) for x in L), ev("over")]),
    "status, then plain members": ("/x", [*STATUS, *(Out({"v": x}) for x in L)]),
    "status, then the text so far": ("/x", [*STATUS, *(Out({"reply": s, "done": False}) for s in SO)]),
    "status, then chat": ("/x", [*STATUS, *(Out({"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": x}}]}) for x in L), b"[DONE]"]),
    "status, then chat on its path": (CHAT, [*STATUS, *(Out({"id": "c", "choices": [{"index": 0, "delta": {"content": x}}]}) for x in L), b"[DONE]"]),
    "status, then Chinese": ("/x", [*STATUS, *(Out({"v": x}) for x in CHINESE * 2)]),
    "dots, then bits": ("/x", [*[{"text": "."}] * 20, *(Out({"word": x}) for x in L)]),
    "changes, then answer": ("/x", [*({"op": "u", "table": "notes", "row": {"id": 7, "text": s}} for s in SO * 2), *(Out(ev("answer.delta", delta=x)) for x in L)]),
    "status, then notices": ("/x", [*STATUS, *(ev("tip", text=x) for x in PEOPLE)]),
    "status, then people": ("/x", [*STATUS, *({"v": x} for x in PEOPLE)]),
    "status, then one short text": ("/x", [*STATUS, {"response": "pong"}, *STATUS[:3]]),
    # Text of a model.
    "pt token": ("/x", [Out({"tok": x}) for x in PORTUGUESE]),
    "ko delta": ("/x", [Out(ev("delta", text=x)) for x in KOREAN]),
    "ar chunk": ("/x", [Out({"chunk": x, "seq": i}) for i, x in enumerate(ARABIC)]),
    "ja content": ("/x", [Out({"content": x, "done": False}) for x in JAPANESE] + [{"content": "", "done": True}]),
    "zh text": ("/x", [Out({"data": {"text": x}}) for x in CLAUSES]),
    "zh answer so far": ("/x", [Out({"answer": x}) for x in so_far(CLAUSES)]),
    "code": ("/x", [Out({"text": x}) for x in CODE]),
    "list": ("/x", [Out({"piece": x}) for x in LIST]),
    "table": ("/x", [Out({"output": x}) for x in TABLE]),
    "json out": ("/x", [Out({"text": x}) for x in JSON]),
    "json out token": ("/x", [Out({"token": x}) for x in JSON]),
    "long words": ("/x", [Out({"token": x}) for x in ["un", "believ", "ab", "ly", " deep", " lake", "s"]]),
    "step agent": ("/x", [ev("step_start", step=1), *(Out(ev("step_text", text=x)) for x in L), ev("step_end", step=1)]),
    "with model name so far": ("/x", [Out({"model": "m-1", "text": s}) for s in SO]),
    "bot so far": ("/x", [Out({"sender": "bot", "text": s}) for s in SO]),
    "so far, finished": ("/x", [Out({"text": s, "finished": False}) for s in SO] + [{"text": T, "finished": True}]),
    "so far, generated": ("/x", [Out({"generated_text": s}) for s in SO]),
    "so far, message": ("/x", [Out({"message": {"role": "assistant", "content": s}}) for s in SO]),
    "rpc result": ("/x", [Out({"jsonrpc": "2.0", "id": 1, "result": {"delta": x}}) for x in L]),
    "rpc partial": ("/x", [Out(rpc("notifications/partial", token=3, text=x)) for x in L]),
    "rpc progress token text": ("/x", [Out(rpc("$/progress", token="t", value={"kind": "report", "message": x})) for x in L]),
    "two choices": ("/x", [Out({"choices": [{"index": i % 2, "delta": {"content": x}}]}) for i, x in enumerate(L)]),
    "translation": ("/x", [Out(ev("translation.delta", delta=x)) for x in PORTUGUESE]),
    "summary": ("/x", [("summary", Out({"text": x})) for x in L]),
    "caption of image": ("/x", [Out({"caption_delta": x}) for x in L]),
    "long status then words": ("/x", [*[ev("queue", pos=50 - i) for i in range(50)], *(Out({"word": x}) for x in L), ev("finish", usage={"input_tokens": 3, "output_tokens": 13})]),
    "status between": ("/x", [y for i, x in enumerate(L) for y in (ev("tick", n=i), ev("tick", n=i), Out(ev("text", text=x)))]),
    "search then answer": ("/x", [*[ev("search_result", title=f"Page {i}", url=f"https://a/{i}", snippet=f"Lakes are wet {i}") for i in range(25)], *(Out(ev("answer_token", value=x)) for x in L)]),
    "docs then answer": ("/x", [*[{"docs": [{"id": i, "text": f"The lake {i} is deep."}]} for i in range(25)], *(Out({"answer": x}) for x in L)]),
    "heartbeat then plain": ("/x", [*[b"ping"] * 20, *(Out(x.encode()) for x in L)]),
    "thinking then answer late": ("/x", [*STATUS[:20], *(Out(ev("thought", text=x), "reasoning") for x in L), *(Out(ev("answer", text=x)) for x in L)]),
    "spaces keepalive in text": ("/x", [{"text": ""}, {"text": ""}, *(Out({"text": x}) for x in L)]),
    "pcm small": ("/x", [Out(ev("response.audio.delta", delta=x)) for x in ("UklG", "RiQA", "AABX", "QVZF", "Zm10", "IBAA")]),
    # A second list of streams without a model, written after the rules.
    "outbox": ("/x", [{"event_id": i, "entity": "note", "entity_id": 7, "changes": {"body": {"from": a, "to": b}}} for i, (a, b) in enumerate(zip(["", *SO], SO, strict=False))]),
    "audit before after": ("/x", [{"who": "ann", "prev": {"bio": a}, "next": {"bio": b}} for a, b in zip(["", *SO], SO, strict=False)]),
    "crdt": ("/x", [{"actor": "a1", "seq": i, "ops": [{"action": "set", "key": "text", "value": s}]} for i, s in enumerate(SO)]),
    "google doc": ("/x", [{"docId": "d", "text": s} for s in SO]),
    "shared notes ws": ("/x", [{"kind": "note:changed", "noteId": 3, "body": s} for s in SO]),
    "html of an editor": ("/x", [{"html": f"<p>{s}</p>"} for s in SO]),
    "graphql live row": ("/x", [{"data": {"note": {"id": 7, "body": s, "updatedAt": f"2026-01-01T00:00:{i:02d}Z"}}} for i, s in enumerate(SO)]),
    "signal patch": ("/x", [("patch", {"title": s}) for s in SO]),
    "redis": ("/x", [["pmessage", "note:*", "note:7", s] for s in SO]),
    "cdc sql": ("/x", [{"sql": f"UPDATE notes SET body = '{s}' WHERE id = 7"} for s in SO]),
    "mqtt text": ("/x", [{"topic": "lab/display", "payload": s} for s in SO]),
    "display": ("/x", [{"line1": s, "line2": "ok"} for s in SO]),
    "teletype": ("/x", [{"c": c} for c in T]),
    "game state": ("/x", [{"tick": i, "players": [{"name": "Ann", "say": "hi"}, {"name": "Bob", "say": "yo"}]} for i in range(6)]),
    "ocr words": ("/x", [{"text": w, "box": [1, 2, 3, 4], "conf": 0.9} for w in T.split()]),
    "word list": ("/x", [{"word": w, "count": i} for i, w in enumerate(("lake", "deep", "cold", "fish", "tide", "port"))]),
    "bpe merges": ("/x", [{"merge": ["t", "he"], "rank": 1}, {"merge": ["la", "ke"], "rank": 2}, {"merge": ["i", "s"], "rank": 3}]),
    "nmt n-best": ("/x", [{"hyp": s, "score": -i} for i, s in enumerate(("The lake is deep.", "A lake is deep.", "The lake is profound."))]),
    "spell": ("/x", [{"suggestion": s, "from": "lkae"} for s in ("lake", "lack", "leak")]),
    "autocomplete": ("/x", [{"completions": ["lake", "lakes", "lakeside"]}, {"completions": ["lake view", "lake house"]}]),
    "email list": ("/x", [{"subject": s, "snippet": "See below", "unread": True} for s in ("Lake trip", "Tide table", "Boat")]),
    "calendar": ("/x", [{"summary": s, "start": "2026-01-01", "end": "2026-01-02"} for s in ("Lake trip", "Boat repair", "Tide watch")]),
    "ci annot": ("/x", [{"file": "a.py", "line": i, "message": f"E50{i} line too long"} for i in range(5)]),
    "lint": ("/x", [{"text": f"a.py:{i}: unused import"} for i in range(6)]),
    "pip": ("/x", [{"text": s} for s in ("Collecting flask", "Downloading flask-3.0.whl (101 kB)", "Installing collected packages: flask", "Successfully installed flask-3.0")]),
    "pytest": ("/x", [{"text": s} for s in ("tests/a.py ", ".", " .", "F", " .", " [100%]\n")]),
    "bar chars": ("/x", [{"text": s} for s in ("[", "#", "#", "#", "#", "]", " 100%", "\n")]),
    "ffmpeg": ("/x", [{"content": f"frame={i * 10} fps=25 time=00:00:0{i}"} for i in range(7)]),
    "git": ("/x", [{"output": s} for s in ("Cloning into 'a'...\n", "remote: Counting objects: 12\n", "Receiving objects: 50%\n", "Resolving deltas: done.\n")]),
    "blank chat": (CHAT, [{"id": "x", "note": "."}] * 4),
    "chat id only": (CHAT, [{"id": "c", "object": "chat.completion.chunk", "choices": []}] * 4),
    "vote": (CHAT, [{"choices": [{"text": "Tea"}], "total": i} for i in range(5)]),
    "quiz choices": (CHAT, [{"question": "Q", "choices": [{"text": x}]} for x in ("Lake", "River", "Sea")]),
    "messages path feed": ("/v1/messages", [{"type": "message", "content": x} for x in PEOPLE]),
    "responses path feed": ("/v1/responses", [{"type": "response.note", "text": x} for x in PEOPLE]),
    "generate path progress": ("/generate", [{"text": f"{i}%"} for i in range(0, 90, 10)]),
    "ollama path pull": ("/api/generate", [{"status": f"pulling {i}"} for i in range(6)]),
    "jsonl of prices": ("/x", [{"ts": i, "data": f"{i}.25"} for i in range(8)]),
    "uuid deltas": ("/x", [ev("delta", delta="0f8fad5b-d9cb-469f-a165-70867728950e") for i in range(4)]),
    "hash chunk": ("/x", [ev("chunk", chunk=f"{i:03d}abcdef0123456789") for i in range(6)]),
    "audio bytes small": ("/x", [{"audio": {"delta": "UklG"}}, {"audio": {"delta": "RiQA"}}, {"audio": {"delta": "AABX"}}]),
    "png rows": ("/x", [{"content": f"iVBORw0KGgoAAAANSUhEUgAA{i}"} for i in range(5)]),
    "geo": ("/x", [{"text": f"{50 + i}.1, 4.{i}"} for i in range(6)]),
    "phone": ("/x", [{"text": "ringing"}, {"text": "answered"}, {"text": "hung up"}]),
    "order": ("/x", [ev("message", text=x) for x in ("Order placed", "Order packed", "Order shipped", "Order delivered")]),
    "poll": ("/x", [{"result": "pending"}] * 5 + [{"result": "ok"}]),
    "emoji": ("/x", [{"reaction": c} for c in "👍❤👍😀👍"]),
    "captions zh": ("/x", [{"caption": c} for c in ("大家好", "欢迎收看", "今天的天气", "明天有雨")]),
    "danmaku": ("/x", [{"user": "u1", "msg": c} for c in ("哈哈", "好看", "666", "来了")]),
    "ko chat": ("/x", [{"id": i, "text": c} for i, c in enumerate(("안녕하세요", "반갑습니다", "네 좋아요", "내일 봐요"))]),
    "ar chat": ("/x", [{"id": i, "text": c} for i, c in enumerate(("مرحبا", "كيف حالك", "بخير", "شكرا"))]),
}  # fmt: skip
