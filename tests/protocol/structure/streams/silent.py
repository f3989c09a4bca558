# ruff: noqa: E501  (tables of streams, one event a line)
"""Streams without text of a model: progress, logs, telemetry, documents, pictures."""

from tests.protocol.structure.streams.forms import Item, stream

_UUID = "5f0c3a4e-8d1b-4a55-9f7e-0c1d2e3f4a5%x"
_B64 = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1Njc4OTo7"

_SILENT: dict[str, list[Item]] = {
    "job_progress": [{"job": "j1", "state": s, "percent": p, "message": m} for s, p, m in (("queued", 0, "Waiting for a worker"), ("running", 10, "Downloading weights"), ("running", 40, "Loading shard 2 of 4"), ("running", 80, "Compiling kernels"), ("done", 100, "Finished in 31 s"))],
    "job_progress_events": [("progress", {"step": i, "total": 8, "text": f"Step {i} of 8"}) for i in range(1, 9)],
    "status_words": [{"id": "run_1", "status": s} for s in ("queued", "in_progress", "in_progress", "finalizing", "completed")],
    "status_text": [{"type": "status", "text": s} for s in ("Thinking", "Searching the web", "Reading 3 pages", "Writing the answer")],
    "fine_tuning": [{"object": "fine_tuning.job.event", "id": f"ftevent-{i}", "created_at": 1767000000 + i, "level": "info", "message": f"Step {i * 10}/200: training loss=0.{90 - i}", "type": "metrics"} for i in range(8)],
    "docker_pull": [{"status": "Pulling fs layer", "progressDetail": {}, "id": "3f4a9c0d1e2b"}, *[{"status": "Downloading", "progressDetail": {"current": 1000 * i, "total": 9000}, "progress": "[" + "=" * i + ">" + " " * (9 - i) + f"] {i}kB/9kB", "id": "3f4a9c0d1e2b"} for i in range(1, 9)], {"status": "Pull complete", "progressDetail": {}, "id": "3f4a9c0d1e2b"}],
    "model_pull": [{"status": "pulling manifest"}, *[{"status": "pulling 6a0746a1ec1a", "digest": "sha256:6a0746a1ec1aef3e7ec53868f220ff6e3", "total": 4661211424, "completed": 100000 * i} for i in range(6)], {"status": "verifying sha256 digest"}, {"status": "success"}],
    "docker_build": [{"stream": s} for s in ("Step 1/3 : FROM alpine\n", " ---> 1d34ffeaf190\n", "Step 2/3 : RUN apk add curl\n", " ---> Running in 5b6f1a2c3d4e\n", "fetch index\n", "Successfully built 7c8d9e0f1a2b\n")],
    "log_lines": [{"ts": f"2026-11-20T10:00:0{i}Z", "level": "INFO", "msg": m} for i, m in enumerate(("server started", "listening on port 8080", "client connected", "request handled", "client left"))],
    "log_text": [("log", {"text": m + "\n"}) for m in ("Fetching index", "Resolving packages", "Building wheel", "Installing", "Done")],
    "log_plain": [b"2026-11-20 10:00:01 INFO start", b"2026-11-20 10:00:02 INFO bind 8080", b"2026-11-20 10:00:03 WARN slow disk"],
    "k8s_watch": [{"type": t, "object": {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": f"web-{i}", "namespace": "default", "uid": _UUID % i, "resourceVersion": str(9000 + i)}, "status": {"phase": p, "message": "", "reason": ""}}} for i, (t, p) in enumerate((("ADDED", "Pending"), ("MODIFIED", "Running"), ("MODIFIED", "Running"), ("DELETED", "Succeeded")))],
    "telemetry": [{"ts": 1767000000 + i, "name": n, "value": v, "unit": "%", "host": "n-17"} for i, (n, v) in enumerate((("cpu", 0.3), ("mem", 0.71), ("gpu", 0.99), ("cpu", 0.31), ("mem", 0.7)))],
    "otel_spans": [{"name": n, "traceId": "4bf92f3577b34da6a3ce929d0e0e4736", "spanId": f"00f067aa0ba902b{i}", "kind": 3, "attributes": {"gen_ai.request.model": "m", "http.route": "/v1/chat"}} for i, n in enumerate(("chat m", "tool search", "chat m"))],
    "ticker": [{"type": "trade", "symbol": "ACME", "price": f"{10 + i}.25", "size": 100, "text": "regular"} for i in range(6)],
    "chat_room": [{"type": "message", "user": u, "text": x, "id": _UUID % i} for i, (u, x) in enumerate((("ann", "hello all"), ("bob", "did the build pass?"), ("cyd", "not yet"), ("ann", "ok, waiting")))],
    "chat_room_plain": [{"id": i, "text": x} for i, x in enumerate(("hello all", "did the build pass?", "Not yet", "ok, waiting"))],
    "discord": [{"op": 10, "d": {"heartbeat_interval": 41250}, "s": None, "t": None}, {"op": 0, "t": "READY", "s": 1, "d": {"v": 10, "user": {"id": "80351110224678912", "username": "bot"}, "session_id": "abc"}}, *[{"op": 0, "t": "MESSAGE_CREATE", "s": 2 + i, "d": {"id": f"33430741207583130{i}", "content": c, "author": {"id": "53908099506183680", "username": "Mason"}, "channel_id": "290926798999357250"}} for i, c in enumerate(("Supa Hot", "anyone here?", "see you"))]],
    "gateway_routing": [{"type": "route.selected", "model": "m-small", "provider": "b", "reason": "lowest latency"}, {"type": "cache.miss", "key": "9f8e7d6c5b4a"}, {"type": "guardrail.passed", "name": "pii", "message": "nothing found"}, {"type": "budget.updated", "remaining": 12.5}],
    "live_handshake": [{"setupComplete": {}}, {"sessionResumptionUpdate": {"newHandle": "Cihz", "resumable": True}}, {"goAway": {"timeLeft": "10s"}}],
    "realtime_handshake": [{"type": "session.created", "event_id": "event_1", "session": {"id": "sess_1", "object": "realtime.session", "model": "m", "modalities": ["text", "audio"], "instructions": "You are helpful. Answer briefly.", "voice": "alloy"}}, {"type": "session.updated", "event_id": "event_2", "session": {"id": "sess_1", "instructions": "Be brief."}}, {"type": "conversation.item.created", "event_id": "event_3", "item": {"id": "i1", "type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is the tide?"}]}}],
    "hello": [{"type": "connected", "client_id": _UUID % 1}, {"type": "subscribed", "topics": ["a", "b"]}, {"type": "heartbeat"}, {"type": "heartbeat"}],
    "speech": [{"type": "speech.audio.delta", "audio": _B64 + x} for x in ("AA==", "BB==", "CC==")],
    "speech_data": [{"data": _B64 + x, "format": "pcm16"} for x in ("AA==", "BB==", "CC==")],
    "images": [("image_generation.partial_image", {"type": "image_generation.partial_image", "b64_json": _B64 * 2, "partial_image_index": i, "size": "1024x1024"}) for i in range(3)],
    "image_urls": [{"type": "image", "url": f"https://cdn.example.org/i/{i}.png", "revised_prompt": "A quiet lake at dawn"} for i in range(3)],
    "embeddings": [{"index": i, "embedding": [0.1 * i, 0.2, 0.3], "text": t} for i, t in enumerate(("hello", "good bye", "see you"))],
    "embedding_lines": [{"object": "embedding", "index": i, "embedding": [0.1, 0.2], "usage": {"prompt_tokens": 3, "total_tokens": 3}} for i in range(4)],
    "rerank": [{"index": i, "relevance_score": 0.9 - i / 10, "document": {"text": t}} for i, t in enumerate(("The lake is deep.", "Mountains are high.", "Rivers flow."))],
    "search_results": [("result", {"title": t, "url": f"https://example.org/{i}", "snippet": s}) for i, (t, s) in enumerate((("Lakes", "Lakes are bodies of water."), ("Rivers", "Rivers flow to the sea."), ("Seas", "Seas are salty.")))],
    "citations": [{"type": "citation", "index": i, "text": t, "source": {"url": "https://example.org"}} for i, t in enumerate(("[1] Smith 2020", "[2] Jones 2021", "[3] Wu 2022"))],
    "moderation": [{"type": "moderation", "flagged": False, "categories": {"hate": False}, "category": "none"} for _ in range(4)],
    "errors": [{"error": {"type": "overloaded", "message": "Try again"}}, {"error": {"type": "overloaded", "message": "Try again later"}}],
    "error_texts": [("error", {"message": m, "code": 500}) for m in ("connection refused", "retrying in 1 s", "connection refused")],
    "pings": [{"type": "ping", "time": 1767000000 + i} for i in range(5)],
    "build_steps": [{"step": s, "output": o} for s, o in (("checkout", "ok"), ("compile", "42 files"), ("test", "118 passed"), ("deploy", "done"))],
    "shell": [{"type": "stdout", "data": s} for s in ("total 8\n", "drwxr-xr-x 2 a a 4096 docs\n", "-rw-r--r-- 1 a a 12 readme.md\n")],
    "agent_steps": [{"type": "step", "name": n, "input": i, "output": o} for n, i, o in (("search", "tide Brest", "High water at six."), ("calc", "6 + 6", "12"), ("search", "tide Cork", "High water at nine."))],
    "presence": [{"user": f"u{i}", "state": s, "message": m} for i, (s, m) in enumerate((("online", "at work"), ("away", "lunch"), ("offline", "")))],
    "spinner": [{"status": "Loading" + "." * i} for i in range(1, 7)],
    "counter": [{"value": "1" * i, "n": i} for i in range(1, 7)],
    "translations_meta": [{"locale": x, "file": f"{x}.po", "strings": 120} for x in ("de", "fr", "ja", "pl")],
    "sensor": [{"sensor": "t1", "value": f"{20 + i / 10:.1f} C", "at": f"2026-11-20T10:00:0{i}Z"} for i in range(6)],
    "tokens_issued": [{"token": f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkw{i}In0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"} for i in range(3)],
    "file_list": [{"path": p, "size": n, "content_type": "text/plain"} for p, n in (("a/readme.md", 12), ("a/docs/x.md", 40), ("a/main.py", 9))],
    "queue_position": [{"event": "queue", "data": {"position": i, "message": f"You are number {i} in the queue"}} for i in range(5, 0, -1)],
    "gradio": [{"msg": "estimation", "rank": 0, "queue_size": 1}, {"msg": "process_starts", "eta": 3.2}, {"msg": "progress", "progress_data": [{"index": 1, "length": 30, "unit": "steps"}]}, {"msg": "process_completed", "success": True}],
    "workflow": [{"event": "node_started", "data": {"id": _UUID % i, "node_id": str(1767000000000 + i), "title": t, "index": i}} for i, t in enumerate(("Start", "Knowledge retrieval", "Question classifier", "Answer"))],
    "user_echo": [{"type": "message.created", "message": {"id": f"m{i}", "role": "user", "content": c}} for i, c in enumerate(("What is the tide?", "And in Cork?", "Thanks."))],
    "news": [{"type": "article", "headline": h, "content": c, "author": "AP"} for h, c in (("Rain ahead", "Rain is expected."), ("Sun later", "Sun on Friday."))],
    "notifications": [("notification", {"title": t, "body": b, "priority": "low"}) for t, b in (("Build", "Build 12 passed."), ("Deploy", "Deploy started."), ("Deploy", "Deploy finished."))],
    "mcp_progress": [{"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": "p", "progress": i, "total": 5, "message": f"Indexed {i * 10} files"}} for i in range(1, 6)],
    "mcp_tools": [{"jsonrpc": "2.0", "id": 1, "result": {"content": [{"type": "text", "text": "42 files found"}], "isError": False}}],
    "a2a_status": [{"jsonrpc": "2.0", "id": 1, "result": {"kind": "status-update", "taskId": "t", "status": {"state": s}, "final": f}} for s, f in (("submitted", False), ("working", False), ("completed", True))],
    "sparse_usage": [{"usage": {"input_tokens": 3, "output_tokens": 0}}, {"usage": {"input_tokens": 3, "output_tokens": 0}}],
}  # fmt: skip

_WAV = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAESsAACJWAAACABAAZGF0YQAAAAA"
_MORE_SILENT: dict[str, list[Item]] = {
    "batch": [
        {"batch_id": "b1", "completed": i, "total": 5, "current_prompt": f"Prompt number {i}"}
        for i in range(5)
    ],
    "train": [
        ("log", {"epoch": i, "loss": 1.0 / (i + 1), "content": f"epoch {i}: loss {1.0 / (i + 1):.3f}"})
        for i in range(5)
    ],
    "train2": [{"type": "training.step", "delta": {"message": f"step {i} done"}} for i in range(5)],
    "ci": [
        {"event": "line", "data": d}
        for d in ("> npm ci", "added 312 packages", "> npm test", "PASS src/a.test.js", "Tests: 12 passed")
    ],
    "ci2": [b"> npm ci", b"added 312 packages", b"> npm test", b"PASS src/a.test.js", b"Tests: 12 passed"],
    "ansi": [{"chunk": s} for s in ("\u001b[32mok\u001b[0m\n", "\u001b[31mfail\u001b[0m\n", "done\n")],
    "vidgen": [
        {"type": "video.progress", "status": s, "progress": p, "message": "Rendering frames"}
        for s, p in (("queued", 0), ("rendering", 0.2), ("rendering", 0.7), ("encoding", 0.95))
    ],
    "imgdelta": [{"type": "image.delta", "data": _WAV + str(i)} for i in range(4)],
    "imgdelta2": [{"delta": {"b64": _WAV * 2 + str(i)}} for i in range(4)],
    "audiochunk": [{"chunk": _WAV + "x" * i, "sample_rate": 24000} for i in range(4)],
    "audio2": [
        {"audio": {"chunk": _WAV + "AA"}},
        {"audio": {"chunk": _WAV + "BB"}},
        {"audio": {"chunk": _WAV + "CC"}},
    ],
    "visemes": [
        {"type": "viseme", "value": v, "time_ms": i * 80}
        for i, v in enumerate(("sil", "PP", "aa", "E", "sil"))
    ],
    "wordtimes": [
        {"type": "alignment", "chars": list("Hello"), "start_ms": [0, 10, 20, 30, 40]} for _ in range(3)
    ],
    "vad": [
        {"type": "input_audio_buffer.speech_started", "audio_start_ms": 100, "item_id": "i1"},
        {"type": "input_audio_buffer.speech_stopped", "audio_end_ms": 900, "item_id": "i1"},
        {"type": "input_audio_buffer.committed", "item_id": "i1"},
    ],
    "live2": [
        {"type": "session.created", "session": {"id": "s", "tools": [], "prompt": "Be kind and brief."}},
        {"type": "rate_limits.updated", "rate_limits": [{"name": "tokens", "limit": 100, "remaining": 50}]},
    ],
    "livecfg": [
        {"serverContent": {"turnComplete": True}},
        {"usageMetadata": {"totalTokenCount": 0}},
        {"voiceActivity": {"type": "START"}},
    ],
    "gwlog": [
        {"type": "gateway.decision", "route": r, "explanation": e}
        for r, e in (("a", "cheapest provider"), ("b", "fallback after a timeout"), ("c", "sticky session"))
    ],
    "gwlog2": [
        ("gateway", {"policy": "pii", "result": "pass", "text": "no personal data"}),
        ("gateway", {"policy": "jailbreak", "result": "pass", "text": "no attack found"}),
        ("gateway", {"policy": "toxicity", "result": "pass", "text": "no toxic words"}),
    ],
    "queue": [
        {"message": "You are in line", "position": 3},
        {"message": "You are in line", "position": 2},
        {"message": "You are next", "position": 1},
    ],
    "embed": [
        {"data": [{"object": "embedding", "embedding": _WAV, "index": 0}], "model": "e"} for _ in range(3)
    ],
    "embedb64": [{"embedding": _WAV + str(i)} for i in range(3)],
    "classify": [
        {"label": label, "score": s}
        for label, s in (("positive", 0.9), ("negative", 0.05), ("neutral", 0.05))
    ],
    "ner": [
        {"entity": e, "word": w, "start": s}
        for e, w, s in (("PER", "Ann", 0), ("LOC", "Brest", 10), ("ORG", "Acme", 20))
    ],
    "ocr": [
        {"page": i, "boxes": [{"x": 1, "y": 2, "text": t}]}
        for i, t in enumerate(("Invoice", "Total 12.00", "Thank you"))
    ],
    "diff": [{"op": "replace", "path": "/status", "value": v} for v in ("queued", "running", "done")],
    "jsonpatch2": [
        {"op": "add", "path": "/logs/-", "value": v}
        for v in ("started worker", "fetched 3 files", "finished job")
    ],
    "weather": [
        {"city": c, "summary": s, "temp": t}
        for c, s, t in (("Brest", "Rain", 9), ("Cork", "Wind", 8), ("Faro", "Sun", 19))
    ],
    "iss": [{"lat": 1.0 + i, "lon": 2.0, "message": "success"} for i in range(4)],
    "mail": [
        {"event": "mail.received", "subject": s, "body": b, "from": "a@example.org"}
        for s, b in (("Hi", "Hello there"), ("Re: Hi", "See you"), ("Lunch", "At noon?"))
    ],
    "github": [
        {
            "id": str(i),
            "type": t,
            "actor": {"login": "ann"},
            "payload": {"ref": "main", "commits": [{"message": m}]},
        }
        for i, (t, m) in enumerate(
            (("PushEvent", "Fix the build"), ("PushEvent", "Add docs"), ("PushEvent", "Bump version"))
        )
    ],
    "toot": [
        ("update", {"id": str(i), "content": f"<p>{c}</p>", "account": {"acct": "a"}})
        for i, c in enumerate(("Good morning", "Coffee first", "Rain again"))
    ],
    "wiki": [
        {"type": "edit", "title": t, "comment": c, "user": "X", "bot": False}
        for t, c in (("Lake", "typo"), ("River", "added source"), ("Sea", "rv"))
    ],
    "sql": [{"row": [i, "name" + str(i)]} for i in range(4)],
    "sql2": [
        {"id": i, "name": n, "bio": b}
        for i, (n, b) in enumerate((("Ann", "Likes tea."), ("Bob", "Sails."), ("Cyd", "Runs far.")))
    ],
    "audit": [
        {"actor": "ann", "action": a, "resource": "vm-1", "text": t}
        for a, t in (("start", "ann started vm-1"), ("stop", "ann stopped vm-1"), ("tag", "ann tagged vm-1"))
    ],
    "agentplan": [
        {"type": "plan.updated", "tasks": [{"title": "Search", "status": s}]}
        for s in ("todo", "doing", "done")
    ],
    "subagents": [
        {"type": "agent.status", "agent": a, "text": t}
        for a, t in (("research", "Reading sources"), ("writer", "Drafting"), ("critic", "Checking facts"))
    ],
    "tooldefs": [{"type": "tools", "tools": [{"name": "tide", "description": "Returns the tide"}]}],
    "toolrun": [
        {"type": "tool.started", "name": "tide"},
        {"type": "tool.output", "output": "High water at six."},
        {"type": "tool.output", "output": "Low water at noon."},
        {"type": "tool.finished"},
    ],
    "sugg": [{"type": "suggestions", "items": ["Ask about Cork", "Ask about Brest"]}],
    "title": [{"type": "title", "text": "Tides in Brest"}, {"type": "ping"}, {"type": "ping"}],
    "title2": [{"type": "conversation_title", "content": "Tides"}, {"type": "keepalive"}],
    "stats": [{"requests": i * 10, "tokens": {"in": 100 * i, "out": 50 * i}} for i in range(1, 5)],
    "metering": [
        {"usage": {"input_tokens": 10 * i, "output_tokens": 5 * i}, "tenant": "a"} for i in range(1, 5)
    ],
    "health": [{"status": "ok"}, {"status": "ok"}, {"status": "degraded", "message": "slow disk"}],
    "prom": [
        {"metric": "up", "labels": {"job": "a"}, "value": "1"},
        {"metric": "up", "labels": {"job": "b"}, "value": "0"},
    ],
    "deploy": [
        {"phase": p, "text": t}
        for p, t in (
            ("build", "Building the image"),
            ("push", "Pushing layers"),
            ("roll", "Rolling out"),
            ("done", "Live"),
        )
    ],
    "think_status": [
        {"type": "thinking", "text": "Thinking..."},
        {"type": "thinking", "text": "Thinking..."},
        {"type": "thinking", "text": "Thinking..."},
    ],
    "moderation2": [
        {"type": "moderation.delta", "category": "violence", "content": "none", "score": 0.01}
        for _ in range(3)
    ],
    "kafka": [
        {"topic": "orders", "partition": 0, "offset": i, "value": v}
        for i, v in enumerate(('{"id":1}', '{"id":2}', '{"id":3}'))
    ],
    "mqtt": [{"topic": "lab/t1", "payload": p} for p in ("20.1", "20.2", "20.4", "20.4")],
    "cursor": [{"type": "cursor", "pos": i, "user": "ann"} for i in range(4)],
    "collab": [{"type": "insert", "pos": i, "text": c, "user": "ann"} for i, c in enumerate("hello")],
    "subtitle_src": [
        {"start": i, "end": i + 1, "speaker": "A", "text": t}
        for i, t in enumerate(("Good evening.", "Tonight: rain.", "And now sport."))
    ],
    "dns": [
        {"name": "a.example.org", "type": "A", "answer": "192.0.2.1"},
        {"name": "b.example.org", "type": "A", "answer": "192.0.2.2"},
        {"name": "c.example.org", "type": "A", "answer": "192.0.2.3"},
    ],
    "faq": [
        {"question": q, "answer": a}
        for q, a in (("Where?", "In Brest."), ("When?", "At six."), ("Why?", "Because of the moon."))
    ],
    "retrieval": [
        {"type": "retrieval.chunk", "chunk": {"text": t, "source": "doc.pdf", "score": 0.8}}
        for t in ("The lake is deep.", "Fish are few.", "Water is cold.")
    ],
    "reranked": [
        {"id": i, "text": t, "score": 0.9 - 0.1 * i}
        for i, t in enumerate(("The lake is deep.", "Fish are few.", "Water is cold."))
    ],
    "validation": [
        {"check": c, "result": r, "output": o}
        for c, r, o in (
            ("schema", "pass", "no errors"),
            ("lint", "fail", "2 warnings"),
            ("types", "pass", "no errors"),
        )
    ],
    "sleep": [{"type": "wait", "seconds": i} for i in range(5)],
    "hb_text": [{"data": "ping"}, {"data": "ping"}, {"data": "pong"}],
    "hb_plain": [b"ping", b"ping", b"ping"],
    "tick_plain": [b"1", b"2", b"3", b"4", b"5"],
    "clock_plain": [b"2026-11-20T10:00:00Z", b"2026-11-20T10:00:01Z"],
    "status_plain": [b"queued", b"running", b"running", b"done"],
    "html_plain": [b"<html>", b"<body>Not found</body>", b"</html>"],
    "a2a_msg": [
        {
            "jsonrpc": "2.0",
            "id": 1,
            "result": {
                "kind": "status-update",
                "status": {
                    "state": "working",
                    "message": {"role": "agent", "parts": [{"kind": "text", "text": t}]},
                },
            },
        }
        for t in ("Looking up the tide", "Comparing sources", "Almost done")
    ],
    "snapshots": [
        {"state": {"messages": [{"role": "user", "content": "Hi there"}], "step": i}} for i in range(3)
    ],
    "values": [
        ("values", {"messages": [{"type": "human", "content": "What is the tide?"}]}),
        (
            "values",
            {
                "messages": [
                    {"type": "human", "content": "What is the tide?"},
                    {"type": "system", "content": "Be brief."},
                ]
            },
        ),
    ],
}
SILENT = [stream(name, items) for name, items in (_SILENT | _MORE_SILENT).items()]
