#!/usr/bin/env python3
"""Seconds from the start of a process to the first token, and where they go.

    PYTHONPATH=src python benchmarks/gpu/startup.py [--modes offline,served,parts] [--out startup.jsonl]

Llama-3.1-8B shape, dummy weights, no tokenizer, `compare.py`'s settings. Each run is a process of its own. Each mode begins
with an empty folder for Triton's compiled kernels ("first start") and keeps it for the runs after ("second start"; the best of
--runs). offline: `LLM(...)` and one token. served: `hotswap serve`, then a completion of one token over HTTP. parts: what a
process pays for whatever the engine does (interpreter, imports, opening the device).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from workloads import SHAPES

PROMPT = list(range(100, 116))
SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 4096, "max_num_seqs": 256, "seed": 0}
SERVE = "import sys; from hotswap.server.cli.main import main; sys.exit(main(sys.argv[1:]))"
LINE = re.compile(r"start-up in seconds: ((?:[\w ]+ [\d.]+(?:, )?)+)")
START_SECONDS = 300

# Opens the device's context through the driver, without torch and without the GIL, so that it can go on beside an import. The
# context is the one that torch will use.
OPEN_CONTEXT = """
import ctypes, threading
def open_context():
    driver = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    assert driver.cuInit(0) == 0 and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
thread = threading.Thread(target=open_context)
thread.start()
"""


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    return {**SETTINGS, **arguments.llm}


# Offline.


def child(spec: dict[str, Any]) -> None:
    """In a fresh process. Prints the moments, in seconds since the epoch, and the engine's own account."""
    moments = [time.time()]
    from hotswap import LLM, SamplingParams

    moments.append(time.time())
    llm = LLM(
        model=spec["model"],
        skip_tokenizer_init=True,
        load_format="dummy",
        plugins=[f"platform={spec['device']}"],
        **spec["settings"],
    )
    moments.append(time.time())
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    moments.append(time.time())
    if len(outputs[0].outputs[0].token_ids) != 1:
        raise SystemExit("the engine gave no token")
    print(json.dumps({"moments": moments, "engine": llm.info.startup_seconds}), flush=True)
    llm.shutdown()


def offline(model: Path, arguments: argparse.Namespace, environment: dict[str, str]) -> dict[str, float]:
    """Part -> seconds, in order; they add up to "total"."""
    spec = {"model": str(model), "device": arguments.device, "settings": settings_of(arguments)}
    command = [sys.executable, __file__, "--child", json.dumps(spec)]
    began = time.time()
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=START_SECONDS
    )
    told = json.loads(done.stdout.splitlines()[-1])
    python, imported, built, token = told["moments"]
    engine = dict(told["engine"])
    imports = engine.pop("imports", 0.0)
    inside = engine.pop("engine")
    parts = {
        "interpreter": python - began,
        "import hotswap": imported - python,
        "settings, plugins, config": built - imported - inside - imports,
        "import torch and the engine": imports,
        **engine,
        "rest of the engine": inside - sum(engine.values()),
        "first token": token - built,
    }
    return {**parts, "total": token - began}


# Served.


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:  # not listening yet, or too busy to answer
        return False


def flags_of(settings: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [] if value is False else [flag, str(value)]
    return flags


def served(model: Path, arguments: argparse.Namespace, environment: dict[str, str]) -> dict[str, float]:
    """Part -> seconds. The engine's parts run beside the server's own start, so they do not add up to "ready"."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", SERVE, "serve", "--model", str(model), "--port", str(port)]
    command += ["--load-format", "dummy", "--skip-tokenizer-init", "--plugin", f"platform={arguments.device}"]
    command += flags_of(settings_of(arguments))
    with tempfile.TemporaryFile() as log:
        began = time.time()
        server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log)

        def logged() -> str:
            log.seek(0)
            return log.read().decode(errors="replace")

        try:
            while not is_healthy(url):
                if server.poll() is not None or time.time() - began > START_SECONDS:
                    raise SystemExit(f"the server did not become ready:\n{logged()[-2000:]}")
                time.sleep(0.02)
            ready = time.time()
            body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
            request = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                if json.load(answer)["usage"]["completion_tokens"] != 1:
                    raise SystemExit("the server gave no token")
            token = time.time()
        finally:
            server.terminate()
            server.wait()
        told = LINE.search(logged())
    engine = {f"engine: {name}": seconds for name, seconds in pairs(told[1] if told else "")}
    return {**engine, "ready": ready - began, "first token": token - ready, "total": token - began}


def pairs(text: str) -> list[tuple[str, float]]:
    """("device", 0.5), ... out of the engine's line in the log."""
    return [(name, float(seconds)) for name, seconds in re.findall(r"(\w[\w ]*) ([\d.]+)", text)]


# Parts.


def parts(device: str, environment: dict[str, str]) -> dict[str, float]:
    """What of it -> seconds of a process that does this and nothing else."""
    opened = f"import torch; torch.zeros(1, device={device!r})"
    programs = {
        "interpreter": "pass",
        "import hotswap.LLM": "from hotswap import LLM",
        "import torch": "import torch",
        "import torch, open the device": opened,
        "the same, a first product": f"{opened}; x = torch.ones(64, 64, device={device!r}); print((x @ x).sum().item())",
        "import triton": "import triton",
    }
    if device == "cuda":
        programs["open the context, no torch"] = f"{OPEN_CONTEXT}; thread.join()"
        programs["import torch, the context opened meanwhile"] = f"{OPEN_CONTEXT}; {opened}; thread.join()"
    found = {}
    for name, program in programs.items():
        began = time.time()
        done = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.DEVNULL, check=False)
        if done.returncode == 0:
            found[name] = time.time() - began
    return found


def report(title: str, columns: dict[str, dict[str, float]]) -> None:
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    print(f"\n{title:<44}" + "".join(f"{column:>14}" for column in columns))
    for name in names:
        cells = (f"{column[name]:.3f}" if name in column else "" for column in columns.values())
        print(f"{name:<44}" + "".join(f"{cell:>14}" for cell in cells), flush=True)


def measured(mode: str, model: Path, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Column -> part -> seconds."""
    with tempfile.TemporaryDirectory(prefix="triton-") as kernels:
        environment = {**os.environ, "TRITON_CACHE_DIR": kernels}
        if mode == "parts":
            return {"seconds": parts(arguments.device, environment)}
        start = {"offline": offline, "served": served}[mode]
        first = start(model, arguments, environment)
        again = [start(model, arguments, environment) for _ in range(arguments.runs)]
    best = {"second start": min(again, key=lambda run: run["total"])} if again else {}
    return {"first start": first, **best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default="offline,served,parts")
    parser.add_argument("--shape", default="llama8b", choices=tuple(SHAPES))
    parser.add_argument("--config", type=json.loads, default={}, help="changes to the shape, JSON")
    parser.add_argument("--device", default="cuda", choices=("cuda", "rocm", "cpu"))
    parser.add_argument("--runs", type=int, default=1, help="second starts, of which the best counts")
    parser.add_argument("--llm", type=json.loads, default={}, help="more settings of the engine, JSON")
    parser.add_argument("--out", type=Path, help="append the rows as JSON lines")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments.child)
        return
    modes = arguments.modes.split(",")
    if unknown := set(modes) - {"offline", "served", "parts"}:
        parser.error(f"--modes: {', '.join(sorted(unknown))} is none of offline, served, parts")
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps({**SHAPES[arguments.shape], **arguments.config}))
        for mode in modes:
            columns = measured(mode, model, arguments)
            report(mode, columns)
            if arguments.out is not None:
                with arguments.out.open("a", encoding="utf-8") as file:
                    for column, seconds in columns.items():
                        row = {"benchmark": "startup", "mode": mode, "start": column, "device": arguments.device}
                        file.write(json.dumps({**row, "seconds": {k: round(v, 3) for k, v in seconds.items()}}) + "\n")


if __name__ == "__main__":
    main()
