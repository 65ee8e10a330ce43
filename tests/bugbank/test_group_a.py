"""Bug bank, group A: streaming and detokenization."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from hotswap.core.testing.fake_engine import FakeEngine
from hotswap.core.text.detokenizer import TextStream
from hotswap.core.text.tokenizer import Tokenizer, TokenizerSpec

Api = Any
Sse = Callable[[Any], list[dict[str, Any]]]
REPLACEMENT = "\ufffd"
EOS = "<|im_end|>"


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte, whatever the merges."""
    table = {tokenizer.token_bytes(i): i for i in range(4, 260)}
    return [table[bytes([byte])] for byte in data]


def chat_answer(reply: Any, sse: Sse, stream: bool) -> tuple[str, list[dict[str, Any]]]:
    """Text and logprob entries of choice 0."""
    if not stream:
        (choice,) = reply.json()["choices"]
        return choice["message"]["content"], choice["logprobs"]["content"]
    choices = [choice for event in sse(reply) for choice in event["choices"]]
    entries = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    return "".join(choice["delta"].get("content", "") for choice in choices), entries


def body_of(path: str, text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}


# A01


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["é😀", "😀", "aé", "日本語 ü😀z", "👩‍👩‍👧‍👦!", "\u00ad\u200b"])
def test_a01_bytes_of_consecutive_entries_are_the_exact_text(
    make_api: Callable[..., Api], sse: Sse, tokenizer: Tokenizer, text: str, stream: bool
) -> None:
    """Chat over the application, one token a byte: the same for 0 and for 2 alternatives; no U+FFFD in a token's text."""
    api = make_api(FakeEngine(lambda prompt, choice: byte_ids(tokenizer, text.encode())))
    found = []
    for top in (None, 0, 2):
        fields = {} if top is None else {"top_logprobs": top}
        shown, entries = chat_answer(api.chat("x", logprobs=True, stream=stream, **fields), sse, stream)
        assert shown == text
        assert bytes(byte for entry in entries for byte in entry["bytes"]) == text.encode() + EOS.encode()
        assert "".join(entry["token"] for entry in entries) == text + EOS
        assert all(REPLACEMENT not in entry["token"] for entry in entries)
        assert [len(entry["top_logprobs"]) for entry in entries] == [top or 0] * len(entries)
        found.append([(entry["token"], entry["bytes"]) for entry in entries])
    assert found[0] == found[1] == found[2]


def test_a01_alternatives_stand_in_the_place_of_the_sampled_token(
    make_llm: Callable[..., Any], run: Callable[..., Any], tokenizer: Tokenizer
) -> None:
    """The last byte of U+1F600 has U+1F601's as its alternative: each completes its own character after the three bytes
    sampled before. Half a character stays empty, and so does an alternative that breaks one off late."""
    head, last = byte_ids(tokenizer, b"\xf0\x9f\x98"), byte_ids(tokenizer, b"\x80\x81\xc3")
    row = {"base": 0.0, str(last[0]): 9.0, str(last[1]): 8.0, str(last[2]): 7.0}
    llm = make_llm({"A": [*head, row, 68]})
    (output,) = run(llm, ["A"], logprobs=3)
    choice = output.outputs[0]
    assert choice.text == "😀a"
    pieces = [next(iter(position.values())) for position in choice.logprobs]
    assert [piece.decoded_token for piece in pieces] == ["", "", "", "😀", "a", EOS]
    by_id = choice.logprobs[3]
    assert by_id[last[1]].decoded_token == "😁" and by_id[last[1]].bytes == b"\x81"
    assert by_id[last[2]].bytes == b"\xc3" and by_id[last[2]].decoded_token == REPLACEMENT


@pytest.mark.parametrize("top", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a01_on_a_real_server(served: Any, sse: Sse, stream: bool, top: int) -> None:
    """Both routes, through the real sampler and the engine process."""
    text, entries = chat_answer(
        served.chat("E", logprobs=True, top_logprobs=top, temperature=0, stream=stream), sse, stream
    )
    assert text == "é😀"
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == (text + EOS).encode()
    reply = served.complete("E", logprobs=top, temperature=0, stream=stream)
    choices = [c for event in sse(reply) for c in event["choices"]] if stream else reply.json()["choices"]
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    data = b"".join(
        bytes(int(part, 16) for part in token.removeprefix("bytes:").split("\\x")[1:])
        if token.startswith("bytes:")
        else token.encode()
        for token in tokens
    )
    assert data == (text + EOS).encode() and not any(REPLACEMENT in token for token in tokens)


# A03


def cut_at_stop(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The definition: the stop string that ends first, of two that end together the longer one. Text and which it was."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end if include else end - len(stop)], stop


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a03_false_starts_of_a_stop_string_are_sent_once(served: Any, sse: Sse, path: str, include: bool) -> None:
    """Joined deltas = the text of the whole answer = the definition, on a real server, for several sets of stops."""
    from_script = "a\nb\n\nUs\n\nUx\n\n\nUse\n\nUser\n\nUser: more"
    prompt = body_of(path, "F")
    for stops in (["\n\nUser"], ["\n\nUser", "Ux"], ["\n\nUser\n"], ["User", "\n\nUser"], ["zzz"], ["a", "b"], [": "]):
        body = {**prompt, "stop": stops, "max_tokens": 64, "temperature": 0, "include_stop_str_in_output": include}
        whole = served.post(path, body).json()["choices"][0]
        events = sse(served.post(path, {**body, "stream": True}))
        if "chat" in path:
            text = whole["message"]["content"]
            deltas = [c["delta"].get("content", "") for event in events for c in event["choices"]]
        else:
            text = whole["text"]
            deltas = [c["text"] for event in events for c in event["choices"]]
        expected, stop = cut_at_stop(from_script, stops, include)
        assert text == expected == "".join(deltas), stops
        assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", stop)


def test_a03_random_texts_cut_into_random_runs(tokenizer: Tokenizer) -> None:
    """2,000 texts over a small alphabet with multi-byte characters, random stops, random runs: the deltas join to the
    definition, and what was sent never has to be taken back."""
    source = random.Random(3)
    alphabet = ["\n", "U", "s", "é", "😀", "x"]
    for _ in range(2000):
        text = "".join(source.choices(alphabet, k=source.randrange(24)))
        stops = ["".join(source.choices(alphabet, k=source.randrange(1, 5))) for _ in range(source.randrange(1, 4))]
        include = source.random() < 0.5
        stream = TextStream(tokenizer, stops=stops, include_stop_str=include)
        ids = byte_ids(tokenizer, text.encode())
        (expected, _), sent, done = cut_at_stop(text, stops, include), "", False
        while ids and not done:
            run, ids = ids[: (size := source.randrange(1, 6))], ids[size:]
            result = stream.push(run, finished=not ids)
            sent, done = sent + result.text, result.stop is not None
            assert expected.startswith(sent), (text, stops)
        assert sent == expected, (text, stops)


# A05


def test_a05_a_thousand_random_byte_sequences(tokenizer: Tokenizer) -> None:
    """Lone continuation bytes, truncated leads, ASCII: no exception; the end is the decoding of all with replacement; at
    most the last three bytes wait."""
    source = random.Random(5)
    pools = [range(0x80, 0xC0), (0xF0, 0xF4, 0xE2, 0xC3, 0xED, 0xFF), range(0x20, 0x7F), range(256), "é😀日".encode()]
    for _ in range(1000):
        data = bytes(source.choice(source.choice(pools)) for _ in range(source.randrange(1, 30)))
        stream, sent = TextStream(tokenizer), ""
        for count, token_id in enumerate(byte_ids(tokenizer, data), 1):
            sent += stream.push([token_id]).text
            waits = [data[: count - held].decode(errors="replace") for held in range(min(count, 3) + 1)]
            assert sent in waits, (data, count)
        sent += stream.push([], finished=True).text
        assert sent == data.decode(errors="replace") == tokenizer.decode(byte_ids(tokenizer, data))


def test_a05_through_the_engine(make_llm: Callable[..., Any], run: Callable[..., Any], tokenizer: Tokenizer) -> None:
    """100 such requests in batches of the real engine, without and with a stop string that never comes."""
    source = random.Random(55)
    scripts = {
        first: [source.choice([*range(4, 260), *byte_ids(tokenizer, b"\xf0\x9f\x98\x80")]) for _ in range(12)]
        for first in range(4, 104)
    }
    llm = make_llm(scripts, num_gpu_blocks_override=256, max_num_seqs=32, max_num_batched_tokens=64)
    plain = run(llm, [[first] for first in scripts])
    stopped = run(llm, [[first] for first in scripts], stop=["never \u00e9 there"])
    for first, output, other in zip(scripts, plain, stopped, strict=True):
        assert output.outputs[0].text == other.outputs[0].text == tokenizer.decode(scripts[first])
        assert output.outputs[0].token_ids == [*scripts[first], 3]


# A06


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_a06_the_stop_token_s_text_comes_by_the_flag(
    served: Any, sse: Sse, chat: bool, stream: bool, skip: bool, include: bool
) -> None:
    """An ordinary, a special and the end-of-sequence token as the stop: its text is there once or not at all, and every
    generated token has its logprob, the stop token too (docs/operators/api_rules.md)."""
    for stop_ids, before, name in (
        ([74], "ef<|im_start|>", "g"),
        ([2], "ef", "<|im_start|>"),
        ([], "ef<|im_start|>gh", EOS),
    ):
        fields: dict[str, Any] = {
            "skip_special_tokens": skip,
            "stop_token_ids": stop_ids,
            "include_stop_str_in_output": include,
            "temperature": 0,
            "max_tokens": 10,
            "stream": stream,
            "return_token_ids": True,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        }
        reply = served.chat("S", logprobs=True, **fields) if chat else served.complete("S", logprobs=0, **fields)
        events = sse(reply) if stream else [reply.json()]
        choices = [choice for event in events for choice in event["choices"]]
        if chat:
            text = "".join((c["delta"] if stream else c["message"]).get("content", "") for c in choices)
            count = sum(len((c["logprobs"] or {"content": []})["content"]) for c in choices)
        else:
            text = "".join(c["text"] for c in choices)
            count = sum(len(c["logprobs"]["tokens"]) for c in choices)
        shown = before.replace("<|im_start|>", "") if skip else before
        special = name != "g"
        assert text == shown + (name if include and not (skip and special) else "")
        tokens = [i for c in choices for i in c.get("token_ids", ())]
        assert count == len(tokens) == events[-1]["usage"]["completion_tokens"]
        assert choices[-1]["finish_reason"] == "stop"
        assert choices[-1]["stop_reason"] == (stop_ids[0] if stop_ids else None)


# A07


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("chat", [False, True])
def test_a07_a_reader_that_sleeps_for_50_steps_misses_nothing(make_api: Callable[..., Api], chat: bool, n: int) -> None:
    """The consumer's `send` blocks while the engine runs to the end: every token once, in order, with its logprobs;
    counts equal usage."""
    tokens = [68 + k % 26 for k in range(120)]
    api = make_api(FakeEngine(lambda prompt, choice: tokens[choice:]))
    common = {
        "stream": True,
        "n": n,
        "max_tokens": 200,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    if chat:
        path = "/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2, **common}
    else:
        path, body = "/v1/completions", {"prompt": "x", "logprobs": 2, **common}
    data = api.runner.run(
        slow_reader(api.app, path, body, lambda: len(api.engine.finished) + api.engine.stats.num_running)
    )
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
    assert lines[-1] == b"[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    for index in range(n):
        choices = [c for event in events for c in event["choices"] if c["index"] == index]
        assert [i for c in choices for i in c.get("token_ids", ())] == [*tokens[index:], 3]
        if chat:
            entries = [e for c in choices for e in (c["logprobs"] or {"content": []})["content"]]
            assert "".join(e["token"] for e in entries) == "".join(chr(97 + (i - 68)) for i in tokens[index:]) + EOS
        else:
            offsets = [o for c in choices for o in c["logprobs"]["text_offset"]]
            assert offsets == list(range(len(tokens[index:]) + 1))
    assert events[-1]["usage"]["completion_tokens"] == sum(len(tokens[index:]) + 1 for index in range(n))


async def slow_reader(app: Any, path: str, body: dict[str, Any], progress: Callable[[], int]) -> bytes:
    """Calls the application; its first chunk is taken only after the engine had time for all its steps."""
    received, sent = b"", asyncio.Event()
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await sent.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal received
        if message["type"] == "http.response.body":
            if not received:
                for _ in range(600):  # passes of the event loop: far more than the engine's steps
                    await asyncio.sleep(0)
            received += message.get("body", b"")
            if not message.get("more_body"):
                sent.set()

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "extensions": {},
    }
    await app(scope, receive, send)
    return received


def test_a07_a_slow_socket_on_a_real_server(served: Any, eventually: Callable[..., None]) -> None:
    """The connection is not read until the engine has long finished."""
    body = {
        "prompt": "L",
        "max_tokens": 600,
        "logprobs": 5,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    connection = served.ask("/v1/completions", body)
    eventually(lambda: not served.is_idle(), 5.0)
    eventually(served.is_idle, 20.0)
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received += connection.recv(1 << 16)
    connection.close()
    payload, rest = b"", received.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        payload += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    events = [json.loads(part[6:]) for part in payload.split(b"\n\n") if part.startswith(b"data: {")]
    choices = [c for event in events for c in event["choices"]]
    assert [i for c in choices for i in c["token_ids"]] == [68 + n % 26 for n in range(600)]
    assert sum(len(c["logprobs"]["tokens"]) for c in choices) == 600 == events[-1]["usage"]["completion_tokens"]


# A08


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("n", [1, 2])
def test_a08_usage_comes_when_asked_for_and_once(make_api: Callable[..., Api], sse: Sse, path: str, n: int) -> None:
    """Every value of stream_options, both routes: one last chunk without choices, or none; nothing on other chunks."""
    api = make_api()
    body = body_of(path, "abc")
    body |= {"stream": True, "n": n, "max_tokens": 3}
    silent: list[Any] = ["absent", None, {}, {"include_usage": False}, {"include_usage": None}]
    silent += [{"continuous_usage_stats": True}, {"include_usage": False, "continuous_usage_stats": True}]
    for options in silent:
        fields = {} if options == "absent" else {"stream_options": options}
        events = sse(api.post(path, {**body, **fields}))
        assert all(event["choices"] and event.get("usage") is None for event in events), options
    quiet: list[dict[str, Any]] = [{}, {"continuous_usage_stats": False}, {"continuous_usage_stats": None}]
    for more in quiet:
        events = sse(api.post(path, {**body, "stream_options": {"include_usage": True, **more}}))
        assert all(event["choices"] and event["usage"] is None for event in events[:-1])
        assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 3 * n
        assert all("usage" not in choice for event in events for choice in event["choices"])
    asked = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    counts = [event["usage"]["completion_tokens"] for event in sse(api.post(path, {**body, **asked}))]
    assert counts == sorted(counts) and counts[-1] == 3 * n


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a08_options_without_a_stream_are_refused(make_api: Callable[..., Api], path: str) -> None:
    api = make_api()
    body = body_of(path, "abc")
    streams: list[dict[str, Any]] = [{}, {"stream": False}, {"stream": None}]
    for stream, options in itertools.product(streams, ({}, {"include_usage": True})):
        reply = api.post(path, {**body, **stream, "stream_options": options})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "stream_options"
    assert api.post(path, {**body, "stream_options": None}).status_code == 200
    wrong: list[Any] = ["yes", [], 1, True, {"include_usage": "true"}, {"include_usage": 1}, {"usage": True}]
    for value in wrong:
        reply = api.post(path, {**body, "stream": True, "stream_options": value})
        assert reply.status_code == 400 and reply.json()["error"]["param"].startswith("stream_options"), value


# A09


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a09_chunks_are_what_the_official_models_say(served: Any, sse: Sse, chat: bool, n: int) -> None:
    """Every chunk through openai's own pydantic models, strictly; ids constant, index = choice, finish_reason null until a
    choice's last chunk, [DONE] last."""
    reply = (
        served.chat("G", n=n, stream=True, temperature=0, logprobs=True, top_logprobs=1)
        if chat
        else served.complete("G", n=n, stream=True, temperature=0, max_tokens=30, logprobs=1)
    )
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("data: [DONE]\n\n")
    events = sse(reply)
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
    finished: set[int] = set()
    for event in events:
        if chat:
            ChatCompletionChunk.model_validate(event, strict=True)
        else:
            # OpenAI's own stream has null here, which its model of the whole answer does not foresee.
            choices = [{**c, "finish_reason": c["finish_reason"] or "stop"} for c in event["choices"]]
            Completion.model_validate({**event, "choices": choices}, strict=True)
        for choice in event["choices"]:
            assert choice["index"] in range(n) and choice["index"] not in finished
            assert "finish_reason" in choice
            if choice["finish_reason"] is not None:
                finished.add(choice["index"])
    assert finished == set(range(n))
    if chat:
        first = {c["index"]: c["delta"] for event in reversed(events) for c in event["choices"]}
        assert all(delta.get("role") == "assistant" for delta in first.values())


@pytest.mark.parametrize("n", [1, 2])
def test_a09_the_official_client_reads_it(served: Any, n: int) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "G"}]
        whole = client.chat.completions.create(model="scripted", messages=messages, n=n, temperature=0)
        ChatCompletion.model_validate(whole.model_dump(), strict=True)
        texts = [""] * n
        for chunk in client.chat.completions.create(
            model="scripted", messages=messages, n=n, temperature=0, stream=True
        ):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [choice.message.content for choice in whole.choices] == ["ab<cd|ef>gh"] * n
        completed = client.completions.create(model="scripted", prompt=["G", "H"], n=n, temperature=0, max_tokens=30)
        Completion.model_validate(completed.model_dump(), strict=True)
        pieces = [""] * (2 * n)
        for part in client.completions.create(
            model="scripted", prompt=["G", "H"], n=n, temperature=0, max_tokens=30, stream=True
        ):
            for piece in part.choices:
                pieces[piece.index] += piece.text
        assert pieces == [choice.text for choice in completed.choices] == ["ab<cd|ef>gh"] * n + ["hello"] * n


# A10


def space_mark_tokenizer(decoder: str) -> Tokenizer:
    """A SentencePiece-like vocabulary: pieces with the mark, runs of marks, byte fallback."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    mark = "\u2581"
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["a", "b", f"{mark}a", f"{mark}b", mark, mark * 2, mark * 4, mark * 16, f"{mark}the"]
    backend = Backend(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.add_special_tokens(["<s>", "</s>"])
    if decoder == "llama":
        backend.decoder = decoders.Sequence(
            [decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    elif decoder == "no-strip":
        backend.decoder = decoders.Sequence([decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        backend.decoder = decoders.Metaspace(mark, decoder)
    return Tokenizer(TokenizerSpec(backend.to_str().encode(), bos_id=1, eos_id=2))


@pytest.mark.parametrize("decoder", ["llama", "no-strip", "always", "first", "never"])
def test_a10_spaces_survive_piece_by_piece(decoder: str) -> None:
    """ "a", 17 spaces, "b"; a leading space; bytes between: joined deltas = what the output adds to the decoded prompt."""
    tokenizer = space_mark_tokenizer(decoder)
    ids = {tokenizer.token_string(i): i for i in range(len(tokenizer))}
    mark = "\u2581"
    outputs = [
        ([ids["a"], ids[mark * 16], ids[mark], ids["b"]], "a" + " " * 17 + "b"),
        ([ids["a"], *[ids[mark]] * 17, ids["b"]], "a" + " " * 17 + "b"),
        ([ids[f"{mark}the"], ids[f"{mark}a"]], " the a"),
        ([ids[mark * 4]], " " * 4),
        ([ids[mark], ids[mark], ids["a"]], "  a"),
    ]
    if decoder in ("llama", "no-strip"):
        bytes_of = [ids[f"<0x{byte:02X}>"] for byte in "é".encode()]
        outputs.append(([ids[mark], *bytes_of, ids[mark], ids["b"]], " é b"))
    prompt = [ids["a"], ids[f"{mark}b"]]
    source = random.Random(10)
    for output, expected in outputs:
        backend_text = tokenizer.decode([*prompt, *output])
        assert backend_text == tokenizer.decode(prompt) + expected
        for _ in range(20):
            stream, sent, rest = TextStream(tokenizer, stops=["zz"] if source.random() < 0.5 else ()), "", list(output)
            while rest:
                size = source.randrange(1, 4)
                sent += stream.push(rest[:size], finished=len(rest) <= size).text
                rest = rest[size:]
            assert sent == expected == tokenizer.decode(output, continuation=True)


def test_a10_through_the_engine(make_llm: Callable[..., Any], run: Callable[..., Any], tmp_path: Path) -> None:
    """The byte tokenizer writes a space as a merge of its own: the same sentence through the real engine."""
    text = "a" + " " * 17 + "b the  and "
    llm = make_llm({"A": text, "B": " leading", "C": "   "})
    assert [output.outputs[0].text for output in run(llm, "ABC", max_tokens=60)] == [text, " leading", "   "]
